"""Contents beside the protocol's messages: requests, descriptions of caches, outputs, and the state of instances.

The protocol decides by the messages alone. Each class here with a `message` carries one. A token is a message of the
protocol that includes the client's output: see `messages.Token`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.keys import KEY_BYTES
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.namespace import Namespace
from quire.cache.path import Path, PathReservation, PathRetention, SwappedPath
from quire.cache.retention.policies import PolicyChain
from quire.cache.retention.retained import RetainedTokens
from quire.cache.run import Run
from quire.cluster import wire
from quire.cluster.messages import Attempt, Compute, Manifest, Receive
from quire.engine.admission import RequestLimits
from quire.engine.params import CacheHints, SamplingParams
from quire.errors import ExtentError

# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceJob:
    """A request of one sequence.

    name        name of the request in logs, the same on every instance
    params      fields of SamplingParams
    hints       fields of CacheHints
    seed        seed of the sequence
    token_ids   tokens that the client has already
    cumulative  sum of their log-probabilities
    trace       id of the request's trace, 32 hexadecimal digits
    """

    name: str
    prompt_ids: list[int]
    params: dict[str, Any]
    hints: dict[str, Any]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    cumulative: float = 0.0
    trace: str = ""

    def described(self, number: int) -> str:
        """An attempt of this job in logs. Leaves the trace out if the request's name contains it."""
        trace = "" if self.trace in self.name else f" of trace {self.trace}"
        return f"request {self.name}{trace}, attempt {number}"

    def sampling(self) -> SamplingParams:
        """Raises RequestError for an invalid value. A field that SamplingParams lacks is a TypeError: instances of one
        cluster have the same version.
        """
        return SamplingParams(**self.params)

    def cache_hints(self) -> CacheHints:
        """The cache hints. Raises RequestError."""
        return CacheHints(**self.hints)


@dataclass(frozen=True)
class RemotePrefix:
    """A prefix of a prompt that another instance may have in its cache.

    num_chunks  number of its chunks, from the first one on
    """

    instance: str
    num_chunks: int


@dataclass(frozen=True)
class ComputeJob:
    """Router to source. remote_prefix: a prefix that it may fetch instead of computing it."""

    message: Compute
    job: SequenceJob
    remote_prefix: RemotePrefix | None = None


@dataclass(frozen=True)
class ReceiveJob:
    """Router to receiver. remote_prefix: a prefix that it may fetch instead of computing it, if it has no source."""

    message: Receive
    job: SequenceJob
    remote_prefix: RemotePrefix | None = None


# ---- caches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetainedState:
    """The state of retention. Fields are those of `RetainedTokens` and its `PolicyChain`."""

    threshold: float
    frequent: float
    local: float
    members: tuple[str, ...]
    policies: NDArray[np.uint8]
    num_prompt: int
    holds_last: bool
    keeps_first: bool
    positions: NDArray[np.int32]
    in_place: NDArray[np.bool_]
    origins: NDArray[np.int32]


@dataclass(frozen=True)
class CacheState:
    """The description of a sequence's cache, without its bytes: the fields of `SwappedPath`.

    namespace      digest of model, codec, calibration and everything else besides tokens that determines pages
    layers, heads  the described slice: (first, end) each. Always all of them, as long as instances have one rank
    own            a private run
    """

    namespace: bytes
    layers: tuple[int, int]
    heads: tuple[int, int]
    num_shared: int
    num_tokens: int
    num_sealed: int
    num_stored: int
    free_until: int
    num_dropped: int
    is_decided: bool
    own: Run | None
    retained: RetainedState | None

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays; the rest are a few numbers."""
        values = [value for part in (self.own, self.retained) if part is not None for value in vars(part).values()]
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


@dataclass(frozen=True)
class ManifestMessage:
    """Source to receiver."""

    message: Manifest
    cache: CacheState


@dataclass(frozen=True)
class PrefillProgress:
    """Source to receiver: the first chunks of a prompt are computed, and may be pulled before the others."""

    attempt: Attempt
    num_chunks: int


@dataclass(frozen=True)
class KeepAlive:
    """Source and receiver to each other, a few times a second: these attempts wait for their turn, or are being
    computed or pulled. It renews the deadline of the attempt at the other instance.
    """

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True)
class PullRequest:
    """To a source, or to an instance that may have the first chunks of a prompt in its cache.

    pull    a number that the answer names
    groups  the wanted parts of the attempt, or indices into `names`; each group is packed together
    names   keys of the prompt's first chunks, if they are wanted from the cache; otherwise empty
    """

    attempt: Attempt
    pull: int
    groups: list[list[int]]
    names: list[bytes] = field(default_factory=list)

    @property
    def parts(self) -> frozenset[int]:
        """All wanted parts."""
        return frozenset(itertools.chain(*self.groups))


@dataclass(frozen=True)
class PullExtents:
    """Source to receiver, before the extents of a pull."""

    attempt: Attempt
    pull: int


@dataclass(frozen=True)
class PullNotFound:
    """Source to receiver: it lacks the requested chunks."""

    attempt: Attempt
    pull: int


def cache_state_of(swapped: SwappedPath, shape: tuple[int, int], namespace: bytes) -> CacheState:
    """Describes a cache. shape: layers and kv heads of the model. namespace: see CacheState."""
    path, retained, kept = swapped.path, swapped.path.retention.retained, None
    if retained is not None:
        chain = retained.chain
        kept = RetainedState(
            chain.threshold, chain.frequent, chain.local, chain.members, retained.policies, retained.num_prompt,
            retained.holds_last, retained.keeps_first, retained.positions, retained.in_place, retained.origins,
        )  # fmt: skip
    return CacheState(
        namespace, (0, shape[0]), (0, shape[1]), swapped.num_shared, path.num_tokens, path.num_sealed, path.num_stored,
        path.reservation.free_until, path.retention.num_dropped, path.retention.is_decided, swapped.run, kept,
    )  # fmt: skip


def swapped_of(
    state: CacheState, num_tokens: int, shape: tuple[int, int], num_kinds: int, namespace: bytes
) -> SwappedPath:
    """The inverse of `cache_state_of`. Raises ExtentError for a cache that does not fit this shape and namespace.

    num_tokens  number of tokens with keys and values that the cache must have
    num_kinds   number of known page formats
    """
    _check(state.namespace == namespace, "pages of another model, codec or calibration")
    _check(state.layers == (0, shape[0]) and state.heads == (0, shape[1]), "a slice of other layers or heads")
    _check(state.num_tokens == num_tokens, f"the cache of {state.num_tokens} tokens, not of {num_tokens}")
    chunks = -(-num_tokens // PAGE_TOKENS)
    _check(0 <= state.num_shared <= num_tokens // PAGE_TOKENS, f"{state.num_shared} shared chunks")
    counts = (state.num_sealed, state.num_stored, state.num_dropped)
    _check(all(0 <= count <= chunks for count in counts), f"counts of chunks {counts} of {chunks}")
    _check(0 <= state.free_until <= (chunks + 1) * PAGE_TOKENS, f"free until {state.free_until}")
    path = Path(
        num_tokens=state.num_tokens, num_sealed=state.num_sealed, num_stored=state.num_stored,
        reservation=PathReservation(free_until=state.free_until),
        retention=PathRetention(state.is_decided, num_dropped=state.num_dropped),
    )  # fmt: skip
    if state.own is not None:
        _check_private(state.own, shape, num_kinds)
    if state.retained is not None:
        path.retention.retained = _retained_of(state.retained, shape)
    return SwappedPath(path, state.num_shared, state.own)


def _check_private(run: Run, shape: tuple[int, int], num_kinds: int) -> None:
    _check(run.kinds.ndim == run.tokens.ndim == 1, "rows or tokens of another shape")
    n, attached = len(run.kinds), run.num_attached
    is_private = not run.is_shared and not len(run.tokens) and run.namespace is None and not run.is_divisible
    _check(is_private and not run.start and not run.parent, "a run that others may share")
    _check([len(name) for name in run.names] == [KEY_BYTES], f"a private run of {len(run.names)} names")
    _check(0 <= attached <= n and n > 0, f"{n} rows, {attached} attached")
    _check(run.masks.shape == run.placed.shape == (n, *shape), "masks of another shape")
    _check(bool((run.kinds < num_kinds).all()), "a page format that is not known")
    _check(run.bases.shape == run.has_sidecar.shape == (n,), "rows that are described in part")


def _retained_of(state: RetainedState, shape: tuple[int, int]) -> RetainedTokens:
    rows = len(state.origins)
    _check(state.policies.shape == shape and state.in_place.shape == (*shape, rows), "retention of another shape")
    _check(state.positions.shape == (*shape, rows, PAGE_TOKENS), "positions of another shape")
    _check(bool((state.policies <= len(state.members)).all()), "a policy that is not in the chain")
    try:
        chain = PolicyChain(state.threshold, state.frequent, state.local, state.members)
    except AssertionError as error:
        raise ExtentError(str(error)) from error
    found = RetainedTokens(chain, state.policies.copy(), state.num_prompt, state.holds_last, state.keeps_first)
    found.positions, found.in_place = state.positions.copy(), state.in_place.copy()
    found.origins = state.origins.copy()
    return found


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ExtentError(f"a manifest describes {message}")


# ---- instances -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstanceReady:
    """Instance to router, once: the instance has loaded its model.

    address      address for other instances
    prompt_rows  L_m: the fewest prompt rows that saturate the processor
    batch        the largest useful batch of decoding sequences
    limits       limits of the requests that it accepts; None with an error
    error        why the model could not be loaded; the other fields then mean nothing
    cache_bytes  size of the cache
    namespace    namespace of its pages, without a salt
    """

    instance: str
    address: str
    prompt_rows: int
    batch: int
    limits: RequestLimits | None
    seconds_per_row: float
    seconds_per_step: float
    error: str = ""
    cache_bytes: int = 0
    namespace: Namespace = field(default_factory=Namespace)


@dataclass(frozen=True)
class InstanceLoad:
    """Instance to router, a few times a second: its heartbeat and its load.

    prompt_rows   prompt rows that are still to be computed
    num_running   sequences in the batch
    num_waiting   sequences that wait for room or their turn
    num_held      exports that a receiver has not taken
    free_bytes    free bytes of the cache, evictable ones included
    total_bytes   bytes of the cache
    at_work       attempts that wait for their turn, or whose prompt is being computed or pulled
    stats         counters of the engine, with every second load or less often
    """

    instance: str
    prompt_rows: int
    num_running: int
    num_waiting: int
    num_held: int
    free_bytes: int
    total_bytes: int
    at_work: tuple[Attempt, ...] = ()
    stats: dict[str, Any] | None = None


@dataclass(frozen=True)
class PeerAddresses:
    """Router to instance: the addresses of the other instances. An instance without an address is gone."""

    addresses: dict[str, str]


@dataclass(frozen=True)
class AssignRole:
    """Router to instance: its role from now on."""

    role: str


@dataclass(frozen=True)
class Shutdown:
    """Router to instance: end the process."""


@dataclass(frozen=True)
class LoadingHeartbeat:
    """Instance to router, while it loads: its heartbeat."""

    instance: str


wire.register(
    ComputeJob, ReceiveJob, ManifestMessage, PrefillProgress, KeepAlive, PullRequest,
    PullExtents, PullNotFound, InstanceReady, InstanceLoad, PeerAddresses, AssignRole, Shutdown, LoadingHeartbeat,
)  # fmt: skip
