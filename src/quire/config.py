"""Every setting of the engine and of the server. Flags, the TOML file and the reference page are made from these.

A group is one frozen dataclass; the string below a field is its documentation. `quire.options` has the machinery.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from quire import options as _options
from quire.arguments import Arguments
from quire.cache.codecs import CODECS, DENSE
from quire.errors import ConfigError
from quire.options import AtLeast, Bytes, Count, OneOf, SettingsGroup, format_bytes, nearest, parse_bytes

__all__ = [
    "AttentionConfig", "CacheConfig", "ClusterConfig", "EngineConfig", "ModelConfig", "RetainConfig", "RuntimeConfig",
    "SchedulerConfig", "ServeConfig", "SloConfig", "TiersConfig",
    "add_flags", "describe", "format_bytes", "nearest", "options_from", "parse_bytes", "sources",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig(SettingsGroup):
    """The model: types, limits, tokenizer and name."""

    key: ClassVar[str] = "model"

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and dense cache pages. auto: the checkpoint's own, bfloat16 for GGUF."""
    weights: Literal["native", "dequantized", "g4"] = "native"
    """Type of weight matrices in memory. native: the file's packed type. dequantized: expanded to `model.dtype`. g4:
    quantized to 4.5 bits while loading, whatever the file has; embedding and output head stay packed or take 8.5."""
    images: bool = True
    """On a CPU, write the packed layers of a model of 384 MiB or more into the user's cache folder once, and map them
    in later starts. `quire cache` lists and removes them. false: every start packs the layers again."""
    max_context: Annotated[int, AtLeast(2)] | None = None
    """Maximum length of prompt plus output, in tokens; at least one each. auto: the model's own context."""
    tokenizer: str | None = None
    """Folder or tokenizer.json to use in place of the model's own tokenizer."""
    chat_template: str | None = None
    """File with a Jinja chat template to use in place of the model's own."""
    name: str | None = None
    """Name of the model in the server's API. none: the MODEL argument, of a path the last part without .gguf."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig(SettingsGroup):
    """The key-value cache: one arena of bytes, cut into pages of 64 tokens of one head."""

    key: ClassVar[str] = "cache"

    codec: Annotated[str, OneOf(CODECS)] = DENSE
    """Format of sealed pages."""
    calibration: str | None = None
    """File made by `quire calibrate` for this model. none: the earlier calibration with the same settings, else the one
    that comes with Quire (for smollm2); if there is none yet, Quire makes one, a server as calibrate.when says."""
    check: bool = True
    """Check a codec the first time that this model runs with it: read one short text through the codec and through a
    dense cache, and refuse to start if the predictions differ by more than 0.5 nats per token. The result is
    remembered."""
    outlier_slots: Annotated[int, AtLeast(0)] = 1
    """Number of elements per key or value vector of a head that nuq codecs may store exactly: 0, 1 or 2."""
    sink_tokens: Annotated[int, AtLeast(0)] = 1
    """Number of first tokens of every sequence that nuq codecs keep exact, at most 64: they draw much attention."""
    memory: Bytes | Literal["auto"] = "auto"
    """Size of the cache, allocated at start. auto: chosen from the memory that the weights leave free."""
    share: bool = True
    """Requests that begin with the same tokens share one copy of these tokens. It stays cached until its memory is
    needed."""
    lifetime: Annotated[float, AtLeast(0)] | None = None
    """Drop a cached prefix after this many seconds without use. 0: when the last request that reads it ends. auto: when
    its memory is needed."""
    pin: str | None = None
    """File with prefixes to compute at start and to keep; a server keeps one copy per API key. One prefix per line:
    {"prompt": "..."} or {"messages": [...]}."""
    strict: bool = True
    """Every token attends to earlier chunks as they are stored, so results do not depend on which chunks were cached or
    computed together. false: a token reads chunks of the same step before they are encoded."""

    sparse_values: Annotated[float, AtLeast(0)] = 1.0
    """Share of the values that a decoded token reads, above 0, at most 1: of the tokens before it, those with the
    largest attention weights in each query head. The weights are not renormalised, so the other values are lost. The
    token reads all keys. Prompts read all values. 1: every token reads all values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sparse_values <= 1:
            raise ConfigError(
                f"cache.sparse_values is {self.sparse_values}; it must be above 0 and at most 1, all of the values"
            )
        if not self.strict and self.codec == DENSE:
            raise ConfigError("cache.strict is false, which has no effect on dense pages; leave it true")
        if self.pin is not None and not self.share:
            raise ConfigError("cache.pin needs prefix sharing, but cache.share is false; set it true")
        if self.outlier_slots > 2:
            raise ConfigError(f"cache.outlier_slots is {self.outlier_slots}; it must be at most 2")
        if self.sink_tokens > 64:
            raise ConfigError(f"cache.sink_tokens is {self.sink_tokens}; it must be at most 64, the tokens of a chunk")
        if self.calibration is not None and not self.is_calibrated:
            calibrated = ", ".join(name for name, row in CODECS.items() if row.is_calibrated)
            raise ConfigError(f"cache.calibration is for {calibrated}, but cache.codec is {self.codec}")

    @property
    def is_calibrated(self) -> bool:
        """Whether the codec needs a calibration."""
        return CODECS[self.codec].is_calibrated

    @property
    def num_sinks(self) -> int:
        """First tokens of every sequence that stay exact."""
        return self.sink_tokens if CODECS[self.codec].has_sinks else 0


@dataclass(frozen=True, kw_only=True)
class RetainConfig(SettingsGroup):
    """Retention (FastGen): each head keeps some tokens of a computed prompt, and the memory of the others is freed."""

    key: ClassVar[str] = "retain"

    threshold: Annotated[float, AtLeast(0)] | Literal["off"] = "off"
    """Share of its attention that a head must recover with the tokens it keeps. A head takes the shortest beginning of
    `retain.chain` that reaches the threshold. If none does, it keeps everything, as with a threshold above 1. off: all
    heads keep everything."""
    budget: Annotated[float, AtLeast(0)] | Literal["off"] = "off"
    """Share of a sequence's bytes to keep, in place of a threshold; it also holds while the sequence grows. The tokens
    of all heads are ranked by the attention that they get from distant rows: the prompt's last ones and all later ones.
    Above 0, at most 1. Of the settings below only `profile_rows` applies to a budget."""
    frequent: Annotated[float, AtLeast(0)] = 0.3
    """Number of tokens that the member `frequent` adds, as a share of the sequence's current length."""
    local: Annotated[float, AtLeast(0)] = 0.3
    """Number of last tokens that the member `local` keeps, as a share of the prompt's length."""
    chain: str = "special,punctuation,frequent,local"
    """Members in the order in which they are added: special (tokens that begin a sequence or a turn), punctuation,
    frequent (tokens that have received the most attention), local (the last tokens)."""
    profile_rows: Count = 256
    """Number of last prompt rows that judge `local`, or that rank tokens for a budget; at most a quarter of the prompt.
    These rows are computed even if they are cached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        members = self.members
        unknown = [member for member in members if member not in RETAIN_MEMBERS]
        if unknown or len(set(members)) < len(members) or not members:
            raise ConfigError(
                f"retain.chain is {self.chain!r}; it must name some of {', '.join(RETAIN_MEMBERS)}, each once"
            )
        for name, share in (("frequent", self.frequent), ("local", self.local)):
            if share > 1:
                raise ConfigError(f"retain.{name} is {share}; it must be at most 1, all of the length")
        if self.budget != "off" and self.threshold != "off":
            raise ConfigError("retain.budget and retain.threshold exclude each other; leave one off")
        for name in () if self.is_on else ("frequent", "local", "chain", "profile_rows"):
            if (value := getattr(self, name)) != getattr(RetainConfig, name):
                raise ConfigError(
                    f"retain.{name} is {value!r}, which has no effect without retention; set retain.threshold"
                    + (" or retain.budget" if name == "profile_rows" else "")
                )
        if self.budget != "off":
            for name in ("frequent", "local", "chain"):
                if getattr(self, name) != getattr(RetainConfig, name):
                    raise ConfigError(
                        f"retain.{name} belongs to retain.threshold, but retain.budget is given, which ranks tokens by"
                        " later attention to them; leave one off"
                    )
        if self.budget != "off" and not 0 < self.budget <= 1:
            raise ConfigError(f"retain.budget is {self.budget}; it must be above 0 and at most 1, all of the bytes")

    @property
    def members(self) -> tuple[str, ...]:
        """The chain, in order."""
        return tuple(member.strip() for member in self.chain.split(","))

    @property
    def is_on(self) -> bool:
        """Whether anything may be dropped."""
        return self.threshold != "off" or self.budget != "off"


RETAIN_MEMBERS = ("special", "punctuation", "frequent", "local")


@dataclass(frozen=True, kw_only=True)
class TiersConfig(SettingsGroup):
    """Stores beside the cache: they keep chunks that are evicted or soon will be, which are fetched when a prompt
    begins with them again.
    """

    key: ClassVar[str] = "tiers"

    disk: str | None = None
    """Folder and its largest size, such as /var/cache/quire:20GiB. What is kept there survives a restart. Several
    engines may use one folder. none: no disk."""
    disk_bandwidth: Bytes | None = None
    """Most bytes per second that are read from and written to the disk, for machines that share it. auto: no limit."""
    memory: Bytes | None = None
    """Size of a cache in pinned memory beside one on a GPU. auto: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disk is None and self.disk_bandwidth is not None:
            raise ConfigError("tiers.disk_bandwidth has no effect without tiers.disk")
        if self.disk is not None:
            _, colon, size = self.disk.rpartition(":")
            if not (colon and self.disk_folder):
                raise ConfigError(f"tiers.disk is {self.disk!r}; it must be a folder and its size, such as DIR:20GiB")
            try:
                is_enough = parse_bytes(size) >= LEAST_TIER
            except ConfigError as error:
                raise ConfigError(f"tiers.disk is {self.disk!r}: {error}") from None
            if not is_enough:
                raise ConfigError(f"tiers.disk is {self.disk!r}; its size must be at least {format_bytes(LEAST_TIER)}")
        if self.memory is not None and self.memory < LEAST_TIER:
            raise ConfigError(
                f"tiers.memory is {format_bytes(self.memory)}; it must be at least {format_bytes(LEAST_TIER)}"
            )
        if self.disk_bandwidth is not None and self.disk_bandwidth < LEAST_BANDWIDTH:
            raise ConfigError(
                f"tiers.disk_bandwidth is {format_bytes(self.disk_bandwidth)}; it must be at least"
                f" {format_bytes(LEAST_BANDWIDTH)}"
            )

    @property
    def is_on(self) -> bool:
        """Whether there is any store beside the cache."""
        return self.disk is not None or self.memory is not None

    @property
    def disk_folder(self) -> str:
        """The folder of `disk`."""
        return (self.disk or "").rpartition(":")[0]

    @property
    def disk_bytes(self) -> int:
        """The size of `disk`."""
        return parse_bytes((self.disk or "0").rpartition(":")[2])


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(SettingsGroup):
    """Weights that do not fit into memory: they are read from the disk while layers compute."""

    key: ClassVar[str] = "offload"

    mode: str = "off"
    """off: weights and cache are in memory. auto: the weights that fit into `offload.memory` are, and the others are
    read in every step. Otherwise a JSON file with a policy for the tiers cpu and disk, and on a GPU for gpu, cpu and
    disk."""
    profile: str | None = None
    """File made by `quire plan hardware` for this model: `quire generate --input` then plans the placement for its
    prompts, within `offload.memory` for weights, cache and activations together."""
    memory: Bytes | None = None
    """Memory for weights, buffers included; on a GPU its memory. auto: the memory beside the cache, less a tenth."""
    cache: Bytes | None = None
    """Room for the cache on the disk, on a GPU in the host's memory. `cache.memory` is then the size of the part in
    memory, which a step works on. none: the cache is in memory, or as a policy says."""
    micro_batch: Count | None = None
    """Most sequences that are computed together; the others follow, layer by layer. auto: all, or as a policy says."""
    overlap: bool = True
    """Read and write the next layers while one is computed. false: one after the other, for comparisons."""
    disk_bandwidth: Bytes | None = None
    """Most bytes per second that are read from the disk and written. auto: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("profile", "memory", "cache", "micro_batch", "disk_bandwidth"):
            if not self.is_on and getattr(self, name) is not None:
                raise ConfigError(f"offload.{name} has no effect with offload.mode off; set offload.mode auto")
        if not self.is_on and not self.overlap:
            raise ConfigError("offload.overlap has no effect with offload.mode off; set offload.mode auto")
        if self.disk_bandwidth is not None and self.disk_bandwidth < LEAST_BANDWIDTH:
            raise ConfigError(
                f"offload.disk_bandwidth is {format_bytes(self.disk_bandwidth)}; it must be at least"
                f" {format_bytes(LEAST_BANDWIDTH)}"
            )
        for name in ("profile", "memory"):
            if self.mode not in ("off", "auto") and getattr(self, name) is not None:
                raise ConfigError(f"offload.{name} is for offload.mode auto; a policy's file has its own shares")

    @property
    def is_on(self) -> bool:
        """Whether weights or the cache may be on the disk."""
        return self.mode != "off"


LEAST_BANDWIDTH = 1 << 20
LEAST_TIER = 64 << 20
"""Room for several runs of chunks: a run would be offered in vain, again and again, to a tier too small for it."""


Backend = Literal["auto", "reference", "cpu", "triton"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(SettingsGroup):
    """The kernels that compute attention."""

    key: ClassVar[str] = "attention"

    backend: Backend = "auto"
    """reference: plain torch in float32, slow, the definition of the others. auto: triton on a GPU, else cpu."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SettingsGroup):
    """Limits on running and waiting requests."""

    key: ClassVar[str] = "scheduler"

    token_budget: Count | None = None
    """Maximum tokens per step: prompt slices and decoded tokens together. auto: chosen for the device."""
    max_running: Count = 256
    """Maximum number of running sequences."""
    max_queue: Count = 1024
    """Maximum number of waiting sequences, n of a request; the next request is refused (the server answers 429)."""


MAX_THREADS = 512
"""CPU threads of one process. With thousands the system refuses some, and OpenMP then aborts the process."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(SettingsGroup):
    """The machine."""

    key: ClassVar[str] = "runtime"

    threads: Count | None = None
    """Number of CPU threads. It applies to the whole process: the last engine built decides. auto: one per core that
    this process may use."""
    cpu_level: Literal["auto", "v4bf16", "v4", "v3", "v2"] = "auto"
    """Instruction set of the CPU kernels. It applies to the whole process: the last engine built decides. v2 is SSE4,
    v3 AVX2, v4 AVX-512, v4bf16 AVX-512 with bfloat16 dot products. auto: the best that this CPU has. torch has its own
    settings, the environment variables ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of weights and cache. auto: cuda if there is a GPU."""
    step_log: str | None = None
    """File to which a server appends what each step computed and its seconds, for `quire bench latency --steps`. Every
    instance of a cluster has its own, with its name before the ending. none: nothing is written."""

    @property
    def level(self) -> str | None:
        """The requested level of CPU kernels; None for the best."""
        return None if self.cpu_level == "auto" else self.cpu_level

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError(f"runtime.threads is {self.threads}; it must be at most {MAX_THREADS}")


class CommandGroup(SettingsGroup):
    """A group of settings of a command, beside those of the engine."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], file: Path | None = None) -> Self:
        """The group's settings; see EngineConfig.from_options."""
        return _options.make(cls, _options.collect([cls], options, file, ALL_GROUPS)[0])

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> Self:
        """The group's settings from a command line and its --config."""
        return cls.from_options(options_from(args, (cls.key,)), args.config)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(CommandGroup):
    """The HTTP server. These flags also work without their group: `--port 8000`."""

    key: ClassVar[str] = "serve"
    bare_flags: ClassVar[bool] = True

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, AtLeast(0)] = 8000
    """Port to listen on; 0 takes a free one."""
    api_key_file: str | None = None
    """File with one API key per line. Requests must then carry one of the keys."""
    allow_public: bool = False
    """Listen on an address that other machines can reach, even if no API key is set."""
    tenants_share: bool = False
    """Let requests with different API keys share cached prefixes. false: only requests with the same key share. A
    client that shares can tell from the time to first token whether a prefix is cached."""
    max_request_bytes: Bytes = 8 * 2**20
    """Maximum size of a request body, at least 1KB; a larger one is answered 413."""
    max_output_tokens: Count | None = None
    """Maximum tokens that one request may generate. auto: the rest of the context."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Defaults for temperature, top_p, top_k, min_p, repetition_penalty and a chat's max_tokens. model: the values that
    the model's authors recommend, from its generation_config.json or GGUF file. openai: the API's defaults,
    temperature 1 and everything else off."""
    special_tokens_in_text: Literal["text", "tokens"] = "text"
    """How the name of a control token is read in a conversation's texts of users and tools. text: as its characters.
    tokens: as the control token, so that a user can end a message and write one for another role. In texts of the
    system and of assistants, and in prompts without a chat template, it is the control token in either case."""
    max_connections: Count = 1024
    """Maximum number of connections. A further connection replaces the oldest one that has not sent a complete request;
    if there is none, it is answered 503."""
    max_connections_per_address: Count | None = None
    """Maximum number of connections from one address, for servers that clients reach without a proxy; the next one is
    answered 429. auto: no limit."""
    cors_origins: str | None = None
    """Web pages whose scripts may ask this server: their origins with commas between, such as https://example.org, or *
    for all pages. none: no page may."""
    access_log: bool = True
    """Write a line to stderr for each request except /health and /metrics: status, seconds, number of prompt tokens, of
    cached and of kept ones, and its id."""
    ping_seconds: Annotated[float, AtLeast(0)] = 10.0
    """Seconds without an event after which a stream sends a comment, also while its request waits in the queue or its
    prompt is computed: proxies close connections that are silent for long. 0: no comments."""
    drain_seconds: Annotated[float, AtLeast(0)] = 30.0
    """Time in which running requests may finish after SIGTERM, SIGINT or SIGHUP; then they are cut off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port > 65535:
            raise ConfigError(f"serve.port is {self.port}; it must be at most 65535")
        if self.cors_origins is not None:
            origins = [each.strip() for each in self.cors_origins.split(",")]
            for origin in origins:
                if origin != "*" and not re.fullmatch(r"https?://[^/,\s]+", origin):
                    raise ConfigError(f"serve.cors_origins has {origin!r}; an origin is like https://example.org, or *")
            object.__setattr__(self, "cors_origins", ",".join(origins))
        if self.max_request_bytes < 1000:
            raise ConfigError(f"serve.max_request_bytes is {self.max_request_bytes}; it must be at least 1KB")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(CommandGroup):
    """Several instances behind one server (docs/guide/machines.md). Every instance has the settings of the engine; a
    placement may change some of them for a role.
    """

    key: ClassVar[str] = "cluster"

    prefill: Annotated[int, AtLeast(0)] = 0
    """Number of instances that compute prompts."""
    decode: Annotated[int, AtLeast(0)] = 0
    """Number of instances that decode."""
    mixed: Annotated[int, AtLeast(0)] = 0
    """Number of instances that do both. 0 with no others: one engine in the server's own process."""
    routing: Literal["expected", "queue", "affinity"] = "expected"
    """How an instance for a prompt is chosen. expected: the earliest first token, by queues, cached prefixes and
    transfers. queue: the shortest queue. affinity: where most of the prompt is cached, whatever the queue."""
    transport: Literal["auto", "shm", "tcp"] = "auto"
    """How caches travel between instances. shm: shared memory of one machine. auto: shm if possible, else tcp."""
    timeout: Annotated[float, AtLeast(1)] = 60.0
    """Seconds after which an attempt at a request is given up if no token comes and no instance says that it works on
    it or has it in its queue."""
    tries: Count = 4
    """Number of attempts at a request, on one instance after the other, before the client gets an error."""
    heartbeat: Annotated[float, AtLeast(0.5)] = 3.0
    """Seconds without a sign of life after which an instance counts as failed. It is ended and started again."""
    address: str | None = None
    """Ray cluster on whose machines the instances run: HOST:PORT of its head, or auto for the one that this machine
    belongs to. none: they are processes of this machine."""
    placement: Literal["pack", "spread", "pairs"] | str = "pack"
    """Which machines of a Ray cluster the instances get. pack: as few as possible. spread: as many as possible. pairs:
    an instance that computes prompts and one that decodes always share a machine, and caches move within it. Otherwise
    a file made by `quire plan placement`: it has the numbers of instances, here or on a Ray cluster, and settings of
    the engine for each role."""
    replan: str | None = None
    """Search another placement when lengths or cached share of the requests have changed for minutes, or more come than
    the present one serves, and switch to it without a failed request: a file with the machines, as for `quire plan
    placement --cluster.file`. It needs `cluster.placement` to be a file, `slo.ttft` and `slo.tpot`. none: the placement
    stays."""
    cores: Count | None = None
    """Cores of each instance on a Ray cluster. auto: `runtime.threads`, or else as many as all instances can have."""
    prefill_labels: str | None = None
    """Labels of the Ray nodes that may compute prompts, as KEY=VALUE or KEY=VALUE,KEY=VALUE. none: any node."""
    decode_labels: str | None = None
    """The same for instances that decode."""
    mixed_labels: str | None = None
    """The same for instances that do both."""
    place_seconds: Annotated[float, AtLeast(1)] = 60.0
    """Time in which Ray must find room for all instances. A cluster that adds machines by itself may need more."""

    @property
    def is_on(self) -> bool:
        """Whether there are instances."""
        return self.prefill + self.decode + self.mixed > 0 or self.placement_file is not None

    @property
    def placement_file(self) -> Path | None:
        """The file that has the instances."""
        return None if self.placement in ("pack", "spread", "pairs") else Path(self.placement)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill", "decode", "mixed") if self.placement_file is not None else ():
            if number := getattr(self, name):
                raise ConfigError(
                    f"cluster.placement is {self.placement!r}, a file with the numbers of instances, and"
                    f" cluster.{name} is {number}; leave one of them out, or set cluster.placement to pack, spread or"
                    " pairs"
                )
        if self.prefill and not self.decode and not self.mixed:
            raise ConfigError("cluster.prefill needs instances that decode: set cluster.decode or cluster.mixed")
        if self.decode and not self.prefill and not self.mixed:
            raise ConfigError(
                "cluster.decode needs instances that compute prompts: set cluster.prefill or cluster.mixed"
            )
        for role in ("prefill", "decode", "mixed"):
            self.labels(role)
        if self.address is None:
            given = {"cores": self.cores, "placement": self.placement in ("spread", "pairs")}
            given |= {name: getattr(self, name) for name in ("prefill_labels", "decode_labels", "mixed_labels")}
            for name in (name for name, value in given.items() if value):
                raise ConfigError(f"cluster.{name} is for machines of a Ray cluster: set cluster.address")
            return
        host, _, port = self.address.rpartition(":")
        if self.address != "auto" and not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"cluster.address is {self.address!r}; it must be none, auto or HOST:PORT")
        if not self.is_on:
            raise ConfigError(
                "cluster.address is for instances: set cluster.mixed, or cluster.prefill and cluster.decode"
            )
        if self.transport == "shm":
            raise ConfigError("cluster.transport shm is for one machine; with cluster.address it must be auto or tcp")

    def labels(self, role: str) -> dict[str, str]:
        """Labels of the nodes for instances of a role. Raises ConfigError."""
        text, found = getattr(self, f"{role}_labels"), {}
        for part in text.split(",") if text else ():
            key, _, value = (word.strip() for word in part.partition("="))
            if not key or not value:
                raise ConfigError(f"cluster.{role}_labels is {text!r}; it must be KEY=VALUE or KEY=VALUE,KEY=VALUE")
            found[key] = value
        return found


@dataclass(frozen=True, kw_only=True)
class SloConfig(CommandGroup):
    """Latency targets of the server. Its metrics count the requests that meet both."""

    key: ClassVar[str] = "slo"

    ttft: Annotated[float, AtLeast(0)] | None = None
    """Most seconds to the first token. auto: no target."""
    tpot: Annotated[float, AtLeast(0)] | None = None
    """Most seconds per token after the first one, on average over a request. auto: no target."""
    attainment: Annotated[float, AtLeast(0)] = 0.9
    """Share of requests that should meet the targets, at most 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attainment > 1:
            raise ConfigError(f"slo.attainment is {self.attainment:g}; it is a share, at most 1")


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(CommandGroup):
    """When `quire serve` calibrates a codec that has no calibration of the model yet."""

    key: ClassVar[str] = "calibrate"

    when: Literal["beside", "start"] = "beside"
    """beside: serve at once with dense pages, calibrate meanwhile at low priority, and take the codec when it is there.
    start: calibrate before serving. Instances of a cluster, a GPU, tiers, offloading, cache.pin and runtime.step_log
    calibrate at start in any case."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every setting of one engine. Immutable: the engine fills automatic values in a new object."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    retain: RetainConfig = field(default_factory=RetainConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], file: Path | None = None) -> EngineConfig:
        """The configuration from options by key (`{"cache.memory": "1GiB"}`) and a TOML file.

        Options override the file, the file overrides the defaults. A value may be text, as in flags, or have the
        setting's type. Server settings in the file are ignored.
        Raises ConfigError for an unknown key, naming the nearest valid one, and for an invalid value.
        """
        values, _ = _options.collect(ENGINE_GROUPS, options, file, ALL_GROUPS)
        groups: dict[str, Any] = {group.key: _options.make(group, values) for group in ENGINE_GROUPS}
        return cls(**groups)

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> EngineConfig:
        """The configuration from a command line and its --config."""
        return cls.from_options(options_from(args), args.config)

    def to_options(self) -> dict[str, Any]:
        """Every setting by its key. from_options of these returns an equal configuration."""
        return {key: value for group in _groups(self) for key, value in group.to_options().items()}

    def with_options(self, options: Mapping[str, Any]) -> EngineConfig:
        """The configuration with some settings changed. Keys, values and errors are those of `from_options`."""
        values, _ = _options.collect(ENGINE_GROUPS, options, None, ALL_GROUPS)
        groups: dict[str, Any] = {group.key: group.with_options(values) for group in _groups(self)}
        return EngineConfig(**groups)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(CommandGroup):
    """What `quire plan` plans for: memory of the machine, and for `quire plan auto` the quality that may be lost."""

    key: ClassVar[str] = "plan"

    gpu: Bytes = 16 << 30
    """Memory of the GPU."""
    cpu: Bytes | None = None
    """Memory of the host. auto: what is free here; 64GiB for `--hardware t4`."""
    disk: Bytes | None = None
    """Room on the disk. auto: what is free in the folder that was measured; 500GiB for `--hardware t4`."""
    memory: Bytes | None = None
    """Memory for all processes of a server together: weights, caches and what else they need. auto: what is free here.
    """
    quality: Annotated[float, AtLeast(0)] = 0.01
    """Quality that may be lost: perplexity over that of the same model with a dense cache of all tokens, less 1."""


ENGINE_GROUPS: tuple[type[SettingsGroup], ...] = (
    ModelConfig,
    CacheConfig,
    RetainConfig,
    TiersConfig,
    OffloadConfig,
    AttentionConfig,
    SchedulerConfig,
    RuntimeConfig,
)
ALL_GROUPS: tuple[type[SettingsGroup], ...] = (
    *ENGINE_GROUPS,
    CalibrateConfig,
    ServeConfig,
    ClusterConfig,
    SloConfig,
    PlanConfig,
)
ENGINE_SECTIONS = tuple(group.key for group in ENGINE_GROUPS)
SECTIONS = tuple(group.key for group in ALL_GROUPS)


def add_flags(
    parser: Arguments, sections: Iterable[str] = SECTIONS, common: Sequence[str] = (), left_out: Collection[str] = ()
) -> None:
    """Adds a flag such as `--cache.memory` for every setting of the sections but those in `left_out`. Those in `common`
    come first in help.

    Flags that are not given are absent from the namespace.
    """
    _options.add_flags(parser, _groups_of(sections), common, left_out)


def options_from(namespace: argparse.Namespace, sections: Iterable[str] = ENGINE_SECTIONS) -> dict[str, Any]:
    """The settings of the sections that were given as flags, by key, as text."""
    return _options.options_from(namespace, _groups_of(sections))


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Words of a command line that set these settings: what `options_from` reads back."""
    known = {each.key: each for group in ALL_GROUPS for each in _options.settings_of(group)}
    return [word for key, value in options.items() for word in (f"--{key}", known[key].show(value))]


def sources(
    options: Mapping[str, Any], file: Path | None = None, sections: Iterable[str] = ENGINE_SECTIONS
) -> dict[str, str]:
    """The origin of every setting of the sections: `flag`, `file NAME` or `default`."""
    return _options.collect(_groups_of(sections), options, file, ALL_GROUPS)[1]


def describe(config: EngineConfig | SettingsGroup, sources: Mapping[str, str]) -> str:
    """The configuration as a TOML file that --config reads back, with the origin of each value as a comment."""
    return _options.describe(_groups(config), sources)


def _groups(config: EngineConfig | SettingsGroup) -> list[SettingsGroup]:
    return [config] if isinstance(config, SettingsGroup) else [getattr(config, each.name) for each in fields(config)]


def _groups_of(sections: Iterable[str]) -> list[type[SettingsGroup]]:
    by_key = {group.key: group for group in ALL_GROUPS}
    return [by_key[section] for section in sections]
