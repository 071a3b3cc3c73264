"""Every setting of the engine and of the server. Flags, the TOML file and the reference page are generated from these.

A group is one frozen dataclass; the string below a field is its documentation. `quire.options` has the machinery.
`python -m quire.config` prints the reference page (docs/configuration.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from quire import options as _options
from quire.arguments import Arguments
from quire.errors import ConfigError
from quire.options import AtLeast, Bytes, Count, Group, format_bytes, nearest, parse_bytes

__all__ = [
    "AttentionConfig", "CacheConfig", "EngineConfig", "ModelConfig", "RetainConfig", "RuntimeConfig", "SchedulerConfig",
    "ServeConfig",
    "add_flags", "describe", "format_bytes", "nearest", "options_from", "parse_bytes", "reference", "sources",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Group):
    """The model: its numbers, its limits and what belongs to it."""

    key: ClassVar[str] = "model"

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and dense cache pages. auto: the checkpoint's own, bfloat16 for GGUF."""
    weights: Literal["native", "dequantized", "g4"] = "native"
    """How matrices are held. native: as packed as the file has them; dequantized: expanded to `model.dtype`; g4: in
    4.5 bits, quantized while loading, whatever the file has; embedding and output head stay packed or take 8.5."""
    images: bool = True
    """Whether the packed layers of a model of 384 MiB or more are written into the user's cache folder once, and run
    from there by later starts on a CPU; `quire cache` lists and removes them. false: they are packed at each start."""
    max_context: Count | None = None
    """Longest prompt plus output in tokens. auto: what the model was made for."""
    tokenizer: str | None = None
    """Folder or tokenizer.json to use in place of the model's own tokenizer."""
    chat_template: str | None = None
    """File with a Jinja chat template to use in place of the model's own."""
    name: str | None = None
    """Name under which the server offers the model; none: the name it was asked for by."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Group):
    """The key-value cache: one arena of bytes, cut into pages of 64 tokens of one head."""

    key: ClassVar[str] = "cache"

    codec: Literal["dense", "nuq4", "nuq3", "nuq2", "g4"] = "dense"
    """How sealed pages are stored. dense: keys and values as they are, in `model.dtype`. nuq4, nuq3, nuq2: non-uniform
    codes of 4, 3 and 2 bits on average, calibrated for the model. g4: 4 bits in groups of 64, without calibration."""
    calibration: str | None = None
    """File made by `quire calibrate` for this model. none: the one made before with the same settings, or, if there
    is no such file yet, it is made first."""
    check: bool = True
    """Whether a codec that this model has not run with before reads one short text first, beside a dense cache. The
    start is refused if the predictions differ by more than 0.5 nats a token; the result is remembered."""
    outlier_slots: Annotated[int, AtLeast(0)] = 1
    """Elements of each key and each value vector of a head that nuq codecs may store exactly: 0, 1 or 2."""
    sink_tokens: Annotated[int, AtLeast(0)] = 1
    """First tokens of every sequence that nuq codecs keep exact, at most 64: attention rests on them."""
    memory: Bytes | Literal["auto"] = "auto"
    """Bytes of the arena, allocated at start. auto: chosen from the memory that is free beside the weights."""
    share: bool = True
    """One copy of a prefix for all requests that begin with it, kept until its memory is needed."""
    lifetime: Annotated[float, AtLeast(0)] | None = None
    """Seconds after which a cached prefix that nobody used is dropped; 0 keeps none beyond the requests that read it.
    auto: when its memory is needed."""
    pin: str | None = None
    """File with prefixes to compute at start and to keep, on a server one copy for each API key. A line each:
    {"prompt": "..."} or {"messages": [...]}."""
    strict: bool = True
    """Every token attends to earlier chunks as they are stored, so results do not depend on what was cached or computed
    at once. false: chunks computed in the same step are read before they are encoded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.strict and self.codec == "dense":
            raise ConfigError("cache.strict is false, but dense pages store what was computed; leave it true")
        if self.pin is not None and not self.share:
            raise ConfigError("cache.pin keeps prefixes for sharing, and cache.share is false; set it true")
        if self.outlier_slots > 2:
            raise ConfigError(f"cache.outlier_slots is {self.outlier_slots}; it must be at most 2")
        if self.sink_tokens > 64:
            raise ConfigError(f"cache.sink_tokens is {self.sink_tokens}; it must be at most 64, the tokens of a chunk")
        if self.calibration is not None and not self.is_calibrated:
            raise ConfigError(f"cache.calibration is for the nuq codecs, and cache.codec is {self.codec}")

    @property
    def is_calibrated(self) -> bool:
        """Whether the codec needs a calibration."""
        return self.codec.startswith("nuq")


@dataclass(frozen=True, kw_only=True)
class RetainConfig(Group):
    """Which tokens of a prompt each head keeps once it is computed (FastGen): the memory of the others is free."""

    key: ClassVar[str] = "retain"

    threshold: Annotated[float, AtLeast(0)] | Literal["off"] = "off"
    """How much of its attention a head must recover with what it keeps: it takes the shortest part of `retain.chain`
    that does, and keeps everything if none does, as with a threshold above 1. off: all heads keep everything."""
    budget: Annotated[float, AtLeast(0)] | Literal["off"] = "off"
    """In place of a threshold, the share of a sequence's bytes that is kept, while it grows too: of all heads' tokens
    those that the prompt's last rows, and every row since, look back at most. Above 0, at most 1. Of the settings below
    only `profile_rows` applies to it."""
    frequent: Annotated[float, AtLeast(0)] = 0.3
    """Share of a sequence's current length that the member `frequent` keeps beside the members before it."""
    local: Annotated[float, AtLeast(0)] = 0.3
    """Share of the prompt's length that the member `local` keeps: the last tokens."""
    chain: str = "special,punctuation,frequent,local"
    """Members in the order in which they are added: special (what begins a sequence or a turn), punctuation, frequent
    (those that have had the most attention), local."""
    profile_rows: Count = 256
    """Last rows of a prompt, of a short one a quarter, over which `local` is judged, or which rank tokens for a budget.
    They are computed even if they are cached."""

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
            raise ConfigError("retain.budget and retain.threshold are two ways to decide; leave one off")
        if self.budget != "off":
            for name in ("frequent", "local", "chain"):
                if getattr(self, name) != getattr(RetainConfig, name):
                    raise ConfigError(
                        f"retain.{name} is of retain.threshold, and retain.budget is given, which ranks tokens by what"
                        " looks back at them; leave one off"
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
class AttentionConfig(Group):
    """The kernels that compute attention."""

    key: ClassVar[str] = "attention"

    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """reference: plain torch in float32, slow, the definition of the others. auto: triton on a GPU, else cpu."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Group):
    """Which requests run in a step, and how many may wait."""

    key: ClassVar[str] = "scheduler"

    token_budget: Count | None = None
    """Most tokens one step computes, prompt slices and decoded tokens together. auto: chosen for the device."""
    max_running: Count = 256
    """Most sequences that run at the same time."""
    max_queue: Count = 1024
    """Most requests that wait; the next one is refused (the server answers 429)."""


MAX_THREADS = 512
"""CPU threads of one process. With thousands the system refuses some, and OpenMP ends the process."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Group):
    """The machine."""

    key: ClassVar[str] = "runtime"

    threads: Count | None = None
    """CPU threads that compute, for the whole process: the engine built last decides. auto: one for each core this
    process may use."""
    cpu_level: Literal["auto", "v4bf16", "v4", "v3", "v2"] = "auto"
    """The instructions that the CPU kernels use, for the whole process: the engine built last decides. v2 is SSE4, v3
    AVX2, v4 AVX-512, v4bf16 also its dot products of bfloat16. auto: the best of this CPU. torch's own are not bound by
    it: ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2 in the environment are for them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where weights and cache live. auto: cuda where there is a GPU."""

    @property
    def level(self) -> str | None:
        """The level of CPU kernels that was asked for; None for the best."""
        return None if self.cpu_level == "auto" else self.cpu_level

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError(f"runtime.threads is {self.threads}; it must be at most {MAX_THREADS}")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Group):
    """The HTTP server. These flags may be written without their group: `--port 8000`."""

    key: ClassVar[str] = "serve"
    bare_flags: ClassVar[bool] = True

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, AtLeast(0)] = 8000
    """Port to listen on; 0 takes a free one."""
    api_key_file: str | None = None
    """File with one API key a line; with it, requests must carry one of the keys."""
    allow_public: bool = False
    """Listen on an address other machines can reach although no API key is set."""
    tenants_share: bool = False
    """Whether requests with different API keys may read each other's cached prefixes. Without it, only those with
    the same key do; an answer's time to first token tells who may read them whether a prefix is cached."""
    max_request_bytes: Bytes = 8 * 2**20
    """Largest request body, at least 1KB; a larger one is answered 413."""
    max_output_tokens: Count | None = None
    """Most tokens one request may ask for. auto: what the context leaves."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """What a request leaves out of temperature, top_p, top_k, min_p, repetition_penalty and a chat's max_tokens.
    model: as the model's makers advise, in its generation_config.json or GGUF file. openai: the API's defaults,
    temperature 1 and nothing else."""
    max_connections: Count = 1024
    """Most connections at once. When all are taken, a new one takes the place of the one that has waited for longest
    without having sent a whole request, or is answered 503 if all have."""
    max_connections_per_address: Count | None = None
    """Most connections at once from one address, for servers that clients reach without a proxy; the next is answered
    429. auto: no limit."""
    drain_seconds: Annotated[float, AtLeast(0)] = 30.0
    """On SIGTERM, how long running requests may take to finish before they are cut off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port > 65535:
            raise ConfigError(f"serve.port is {self.port}; it must be at most 65535")
        if self.max_request_bytes < 1000:
            raise ConfigError(f"serve.max_request_bytes is {self.max_request_bytes}; it must be at least 1KB")

    @classmethod
    def from_options(cls, options: Mapping[str, Any], file: Path | None = None) -> ServeConfig:
        """The server's settings; see EngineConfig.from_options."""
        return _options.make(cls, _options.collect([cls], options, file, _ALL_GROUPS)[0])


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every setting of one engine. Immutable: the engine fills automatic values in a new object."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    retain: RetainConfig = field(default_factory=RetainConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], file: Path | None = None) -> EngineConfig:
        """The configuration from options by key (`{"cache.memory": "1GiB"}`) and a TOML file.

        Options win over the file, the file over the defaults. Values may be text, as flags give them, or of the
        setting's type. The file's server settings are passed over.
        Raises ConfigError for an unknown key, naming the nearest that exists, and for a value that cannot be.
        """
        values, _ = _options.collect(ENGINE_GROUPS, options, file, _ALL_GROUPS)
        groups: dict[str, Any] = {group.key: _options.make(group, values) for group in ENGINE_GROUPS}
        return cls(**groups)

    def to_options(self) -> dict[str, Any]:
        """Every setting by its key; from_options gives an equal configuration back."""
        return {key: value for group in _groups(self) for key, value in group.to_options().items()}


ENGINE_GROUPS: tuple[type[Group], ...] = (
    ModelConfig,
    CacheConfig,
    RetainConfig,
    AttentionConfig,
    SchedulerConfig,
    RuntimeConfig,
)
_ALL_GROUPS: tuple[type[Group], ...] = (*ENGINE_GROUPS, ServeConfig)
SECTIONS = tuple(group.key for group in _ALL_GROUPS)


def add_flags(parser: Arguments, sections: Iterable[str] = SECTIONS) -> None:
    """Adds a flag such as `--cache.memory` for every setting of the sections.

    Flags that are not given leave no trace in the namespace.
    """
    _options.add_flags(parser, _groups_of(sections))


def options_from(namespace: argparse.Namespace, sections: Iterable[str] = SECTIONS) -> dict[str, Any]:
    """The settings of the sections that were given as flags, by key, as text."""
    return _options.options_from(namespace, _groups_of(sections))


def sources(options: Mapping[str, Any], file: Path | None = None, sections: Iterable[str] = SECTIONS) -> dict[str, str]:
    """For every setting of the sections where its value comes from: `flag`, `file NAME` or `default`."""
    return _options.collect(_groups_of(sections), options, file, _ALL_GROUPS)[1]


def describe(config: EngineConfig | ServeConfig, sources: Mapping[str, str]) -> str:
    """The configuration as a TOML file that gives it back, each value with a comment that says where it came from."""
    return _options.describe(_groups(config), sources)


def reference() -> str:
    """The reference page of all settings, in Markdown."""
    return _REFERENCE_HEAD + "\n" + _options.reference(_ALL_GROUPS)


def _groups(config: EngineConfig | ServeConfig) -> list[Group]:
    return [config] if isinstance(config, Group) else [getattr(config, each.name) for each in fields(config)]


def _groups_of(sections: Iterable[str]) -> list[type[Group]]:
    by_key = {group.key: group for group in _ALL_GROUPS}
    return [by_key[section] for section in sections]


_REFERENCE_HEAD = """\
# Configuration

Generated from `src/quire/config.py` by `make docs`; edit the docstrings there.

One tree of settings, three ways to give them, the first one that does so wins:

1. a flag: `quire serve smollm2 --cache.memory 1GiB`; from Python `LLM("smollm2", options={"cache.memory": "1GiB"})`
2. a TOML file: `--config quire.toml` with `[cache]` and, below it, `memory = "1GiB"`
3. the default

An unknown key is refused with the nearest one that exists. `--print-config` prints every value and where it came from,
as a file that `--config` takes. Sizes are written `512MiB`, `1.5GiB` (binary) or `20GB` (decimal). Three things are
set elsewhere, in the environment: the log level (`QUIRE_LOG=debug`), the key that `quire inspect --tree` sends
(`QUIRE_API_KEY`), and the folder that holds `quire/` with models, calibrations, layer images and compiled kernels
(`XDG_CACHE_HOME`, `~/.cache` by default).
"""


if __name__ == "__main__":
    print(reference(), end="")
