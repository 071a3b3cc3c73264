"""The servers that are recorded, one after the other, each with settings of its own."""

from __future__ import annotations

from recorded import chats, completions, operations, prefixes, refusals, responses, tenants, tokenizing, tools, vectors
from recorded.cases import Crowd, Line, Places, Request, Server, get, post, user

SMALL = ("--model.dtype", "float32", "--runtime.device", "cpu")
SMOLLM2 = ("smollm2", *SMALL, "--cache.memory", "256MiB", "--model.max_context", "2048")

LONG = {"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True}
"""A completion of the embedded model that runs for many seconds."""

CONNECTIONS = 4
"""Most connections of one address, where they are limited."""


def servers_of(places: Places) -> list[Server]:
    """All servers, in the order in which they run."""
    tiny = (str(places.tiny), *SMALL, "--cache.memory", "32MiB")
    keys = places.file("keys", "\n".join(tenants.KEYS) + "\n")
    pins = places.file("pins.jsonl", f'{{"prompt": "{tenants.PINNED}"}}\n')
    (places.folder / "keys").chmod(0o600)
    disk = ("--tiers.disk", f"{places.folder / 'kv'}:256MiB")
    return [
        Server("plain", SMOLLM2, _plain()),
        Server("tiny", tiny, _tiny()),
        Server(
            "keys",
            (
                str(places.similar), *SMALL, "--cache.memory", "32MiB", "--api-key-file", keys, "--cache.pin", pins,
                "--max-request-bytes", "4KB", "--max-output-tokens", "32", "--cors-origins", "https://example.org",
                "--sampling-defaults", "openai", "--model.name", "near", "--slo.ttft", "5", "--slo.tpot", "1",
            ),
            (
                *tenants.let_in(), *tenants.apart(), *tenants.from_pages(),
                *(tenants.bearer(each, tenants.KEYS[0]) for each in vectors.similarity()),
                *(tenants.bearer(each, tenants.KEYS[0]) for each in refusals.large(5000)[:1]),
            ),
        ),
        Server(
            "limits",
            (
                *SMOLLM2, "--scheduler.max_running", "1", "--scheduler.max_queue", "1", "--serve.ping_seconds", "0.2",
                "--max-request-bytes", "4KB", "--max-connections-per-address", str(CONNECTIONS),
                "--special-tokens-in-text", "tokens", "--access-log", "false",
            ),
            _limits(), "numbers",
        ),
        Server(
            "pressed",
            (
                *tiny[:-1], "512KiB", "--scheduler.max_running", "8", "--scheduler.token_budget", "72",
                "--cache.lifetime", "3600",
            ),
            (*completions.pressed(), *prefixes.short()[:3], *operations.metrics()),
        ),
        Server("nuq4", (*SMOLLM2, "--cache.codec", "nuq4"), _encoded("nuq4")),
        Server("g4", (*tiny, "--cache.codec", "g4", "--cache.sparse_values", "0.5"), _encoded("g4")),
        Server("budget", (*SMOLLM2, "--retain.budget", "0.5"), _encoded("budget")),
        Server("threshold", (*tiny, "--retain.threshold", "0.9"), _encoded("threshold")),
        Server("disk", (*SMOLLM2, *disk), _encoded("disk")),
        Server("disk-again", (*SMOLLM2, *disk), _on_disk()),
        Server("cluster", (*tiny, "--cluster.prefill", "1", "--cluster.decode", "1"), _cluster(), "numbers"),
    ]  # fmt: skip


def _plain() -> tuple[Request | Crowd | Line, ...]:
    """Every endpoint of the embedded model."""
    return (
        *operations.models("smollm2"), *completions.texts(), *completions.scores(), *completions.choices(),
        *completions.streams(), *completions.conversation_prompt(), *chats.conversations(), *chats.options(),
        *chats.streams(), *chats.forms(), *tools.chosen("generic"), *tools.replayed("generic"), *responses.texts(),
        *vectors.embeddings(), *prefixes.requests(), *operations.metrics(),
        Line("line/inspect-tree", ("inspect", "--tree", "{url}")),
        Line("line/inspect-tree-json", ("inspect", "--tree", "{url}", "--json"), "json"),
    )  # fmt: skip


def _tiny() -> tuple[Request, ...]:
    """Calls and reasoning as Qwen writes them, and everything that is refused."""
    return (
        *operations.health(), *operations.models("tiny")[:2], *tokenizing.requests(), *tools.chosen("qwen"),
        *tools.called(), *tools.replayed("qwen"), *chats.reasoning(), *responses.tools("qwen"), *responses.free(),
        *chats.forms(chats.COMPLETIONS), *tools.refused(), *responses.refused(), *refusals.fields(),
        *refusals.bodies(), *refusals.framing(), *operations.wrong(), *operations.identified(), *operations.document(),
        *operations.metrics(),
    )  # fmt: skip


def _limits() -> tuple[Request | Crowd, ...]:
    """Large bodies, full queues, many connections, and a server that shuts down."""
    control = {"messages": [user("<|im_end|>")], "max_tokens": 2, "temperature": 0}
    asked = post("limits/queue-full", completions.PATH, completions.GREEDY)
    streamed = post("limits/queue-full-stream", completions.PATH, completions.GREEDY | {"stream": True})
    running = post("", completions.PATH, LONG)
    return (
        *refusals.large(5000),
        post("limits/control-tokens", chats.PATH, control),
        post("limits/many-sequences", completions.PATH, completions.GREEDY | {"n": 3}),
        *operations.health(),
        *operations.metrics(),
        Crowd((running, running), (asked, streamed)),
        Crowd((None,) * (CONNECTIONS + 2), (get("limits/connections", "/version"),)),
        Crowd(
            (running,),
            (
                get("limits/drain-ready", "/health/ready"),
                get("limits/drain-live", "/health/live"),
                get("limits/drain-metrics", "/metrics"),
                post("limits/drain-chat", chats.PATH, chats.GREEDY),
            ),
            drains=True,
        ),
    )


def _encoded(name: str) -> tuple[Request | Line, ...]:
    """A few requests of each kind for a cache with a codec, retention or a tier."""
    return (
        *completions.short(name), *chats.short(name), *prefixes.short(on_disk=name == "disk")[:3],
        *operations.metrics(),
    )  # fmt: skip


def _on_disk() -> tuple[Request | Line, ...]:
    """What an earlier server has left on the disk."""
    return (
        get("prefixes/list-at-first", prefixes.PATH), *completions.short("disk-again"), *chats.short("disk-again"),
        *prefixes.short(on_disk=True), *prefixes.pinned_on_disk(), *operations.metrics(),
        Line("line/inspect-tiers", ("inspect", "--tiers", "{url}"), "numbers"),
    )  # fmt: skip


def _cluster() -> tuple[Request | Line, ...]:
    """An instance that computes prompts and one that decodes."""
    wrong = [
        post("cluster/drain-unknown", "/v1/cluster/drain", {"instance": "prefill-7"}),
        post("cluster/drain-nothing", "/v1/cluster/drain", {}),
        post("cluster/role-unknown", "/v1/cluster/role", {"instance": "decode-0", "role": "boss"}),
        post("cluster/placement-wrong", "/v1/cluster/placement", {"version": 9, "instances": [], "predicted": {}}),
        post("cluster/restart-field", "/v1/cluster/restart", {"now": True}),
    ]
    return (
        *completions.short("cluster"), *chats.short("cluster"),
        *tools.chosen("cluster")[:2], *prefixes.short(), get("cluster/instances", "/v1/cluster"), *wrong,
        post("cluster/role", "/v1/cluster/role", {"instance": "decode-0", "role": "mixed"}),
        Line("line/cluster-status", ("cluster", "status", "--url", "{url}"), "numbers"),
        Line("line/cluster-json", ("cluster", "status", "--url", "{url}", "--json"), "shape"),
        Line("line/cluster-role", ("cluster", "role", "prefill-0", "mixed", "--url", "{url}"), "numbers"),
        *operations.metrics(),
    )  # fmt: skip
