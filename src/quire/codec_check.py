"""Checks whether a codec works on a model: compares next-token predictions through a dense cache and through the codec,
over one short text.

Every codec fails on some models. Before g4 subtracted key biases, it turned Qwen2's answers into noise without any
warning. docs/lab/quality.md has the divergences of working and failing codecs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from quire.cache.codecs import DENSE
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS
from quire.calibrate import settings
from quire.config import CacheConfig, EngineConfig, OffloadConfig, RetainConfig, SchedulerConfig, TiersConfig
from quire.engine.build import assemble, resolve
from quire.engine.calibration import Calibration
from quire.engine.control_plane import namespace_of
from quire.engine.runner import LOGIT_ROWS
from quire.engine.teacher_forcing import log_probabilities, window_hidden_states
from quire.errors import ConfigError
from quire.models.layers import torch_dtype
from quire.models.plan import Model
from quire.models.tokenizer import Tokenizer
from quire.safe_io import atomic_write
from quire.version import __version__

log = logging.getLogger("quire")

MOST_DIVERGENCE = 0.5
"""Maximum mean KL(dense || codec), in nats per token: 1.65 times the perplexity, for text that the model itself would
write."""

NUM_TOKENS = 320
"""Minimum tokens of the text. All but the first chunk of 64 read encoded chunks. SmolLM2 takes 1.7 s of processor time
to read them through both caches."""

LEAST_TOKENS = 2 * PAGE_TOKENS + 1
"""A model with a shorter context reads hardly any encoded chunk."""

SPARE_CHUNKS = 8
"""Dense chunks of an arena in addition to the text's, because arenas are rounded down to whole slabs."""

TEXT = """\
The ferry to the island leaves at seven in the morning and comes back at six, except on Sundays, when it does not sail \
at all. Anna had known this since she was a child, and still she stood on the empty pier on a Sunday in October with a \
suitcase in each hand and asked the gulls what she should do now. In the harbour office a man with a grey beard looked \
up from his newspaper. "The ferry?" he said. "Tomorrow, at seven. But the baker's boat goes over at noon, and if you \
carry the bread for him, he will not ask you for money." So it happened that Anna came home after eleven years with \
forty loaves of rye bread, and that her brother, who was waiting for the bread and not for her, dropped his pipe.

What are the largest planets? There are eight planets in the solar system. In order of their size they are:
1. Jupiter, 139,820 km across, with more than ninety known moons
2. Saturn, 116,460 km across, known for its rings of ice and rock
3. Uranus, 50,724 km across, which lies on its side
4. Neptune, 49,244 km across, the farthest from the Sun
5. Earth, 12,742 km across, the only one known to carry life

def median(values):
    \"\"\"The middle one of some numbers, or the mean of the two middle ones.\"\"\"
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

assert median([3, 1, 2]) == 2
assert median([4, 1, 3, 2]) == 2.5

On Monday the ferry left at seven in the morning, as it always did. Anna did not hear it. She slept until noon, and \
when she came down to the kitchen, her brother had put the last loaf of rye bread on the table, with butter and salt.
"""


@dataclass(frozen=True)
class Divergence:
    """The divergence of a codec's predictions from those of a dense cache.

    kl          mean over tokens of KL(dense || codec) of the next-token distributions, in nats
    ratio       perplexity divided by that of the dense cache
    num_tokens  number of predicted tokens: all but those of the first chunk, which reads no encoded chunk
    """

    kl: float
    ratio: float
    num_tokens: int


def check_codec(
    model: Model, tokenizer: Tokenizer, config: EngineConfig, model_id: str, calibration: Calibration | None
) -> None:
    """Checks the codec, unless an earlier check with the same model, tokenizer, codec and codec settings passed.

    config       resolved
    model_id     the checkpoint's fingerprint
    calibration  the codec's calibration, if it needs one
    Raises ConfigError, with the number, beyond MOST_DIVERGENCE. A failure is not remembered.
    """
    codec = config.cache.codec
    tokens = _tokens(model, tokenizer)
    if len(tokens) < LEAST_TOKENS:
        return
    # Results are kept in quire/checks in the user's cache folder, beside the calibrations.
    folder = settings.folder().parent / "checks"
    file = folder / f"{_digest(model, config, model_id, calibration, tokens)}.json"
    # Not Path.exists, which raises if the folder may not be read.
    if os.path.exists(file):
        return
    log.info("first run of this model with cache.codec %s: checking it on a text of %d tokens", codec, len(tokens))
    begun = time.monotonic()
    found = measure_divergence(model, tokenizer, config, calibration, tokens)
    apart = f"{found.kl:.3f} nats per token from a dense cache, perplexity x {found.ratio:.4g}"
    if not found.kl <= MOST_DIVERGENCE:
        raise ConfigError(
            f"cache.codec {codec} does not work on this model: over {found.num_tokens} tokens its predictions are"
            f" {apart}; the limit is {MOST_DIVERGENCE} nats; use another codec, or set cache.check false"
        )
    log.info(
        "cache.codec %s checked on this model: over %d tokens %s, limit %s; %.1f s",
        codec,
        found.num_tokens,
        apart,
        MOST_DIVERGENCE,
        time.monotonic() - begun,
    )
    _remember(file, {"codec": codec, "model": model_id, "kl": found.kl, "ratio": found.ratio})


@torch.inference_mode()
def measure_divergence(
    model: Model, tokenizer: Tokenizer, config: EngineConfig, calibration: Calibration | None, tokens: list[int]
) -> Divergence:
    """Reads at least LEAST_TOKENS tokens through two small caches.

    The caches are strict, because otherwise the text would be read before it is encoded. Retention is off, because it
    drops tokens.
    """
    shape = model.shape
    page_bytes = DenseCodec(shape.head_dim, torch_dtype(config.model.dtype)).page_bytes
    chunks = (-(-len(tokens) // PAGE_TOKENS) + SPARE_CHUNKS) * 5 // 4
    memory = chunks * page_bytes * shape.num_layers * shape.num_kv_heads
    dense = CacheConfig(codec=DENSE, memory=memory, share=False)
    encoded = replace(config.cache, memory=memory, share=False, lifetime=None, pin=None, strict=True)
    hidden = []
    for cache, tables in ((dense, None), (encoded, calibration)):
        small = replace(
            config,
            cache=cache,
            model=replace(config.model, max_context=None),
            tiers=TiersConfig(),
            offload=OffloadConfig(),  # the weights are loaded already, and these caches are small
            retain=RetainConfig(),
            scheduler=SchedulerConfig(max_running=1),
        )
        resolved, fits = resolve(small, shape, None, tables)
        engine = assemble(model, tokenizer, resolved, fits, "", tables)
        # The first chunk reads no encoded chunk.
        hidden.append(window_hidden_states(engine, tokens)[0][PAGE_TOKENS:])
    kl = nll = 0.0
    targets = torch.tensor(tokens[PAGE_TOKENS + 1 :], device=hidden[0].device).split(LOGIT_ROWS)
    blocks = (log_probabilities(model, each) for each in hidden)
    for expected, found, wanted in zip(*blocks, targets, strict=True):
        missing = expected - found
        nll += float(missing.gather(1, wanted[:, None]).double().sum())
        kl += float(missing.mul_(expected.exp()).sum(-1).double().sum())
    rows = len(hidden[0])
    return Divergence(kl / rows, math.exp(min(nll / rows, 700.0)), rows)


def _tokens(model: Model, tokenizer: Tokenizer) -> list[int]:
    """The token ids to read: the beginning of TEXT, without ids that the model does not have."""
    shape = model.shape
    known = (token for token in tokenizer.encode(TEXT) if token < shape.vocab_size)
    return list(islice(known, min(NUM_TOKENS, shape.context_limit)))


def _digest(
    model: Model, config: EngineConfig, model_id: str, calibration: Calibration | None, tokens: list[int]
) -> str:
    """A digest of everything the result depends on: page contents, kernels, token ids, limit."""
    namespace = namespace_of(config, model.shape, model_id, calibration)
    said = [repr(namespace), config.attention.backend, __version__, tokens, MOST_DIVERGENCE]
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()


def _remember(file: Path, result: dict[str, object]) -> None:
    """Writes a result atomically. If it cannot be written, the next start checks again."""
    try:
        with atomic_write(file) as draft:
            draft.write_text(json.dumps(result))
    except OSError as error:
        log.warning("%s: cannot be written (%s); the next start checks again", file, error.strerror or error)
