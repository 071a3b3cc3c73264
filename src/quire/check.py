"""Whether a codec works on a model: one short text through a dense cache and through the codec's, and how far the
predictions of the next token are apart.

Any codec has models that it destroys: before g4 took off key biases, Qwen2's turned its answers into noise, and nothing
said so. docs/quality.md has what codecs that work and codecs that do not differ by.
"""

from __future__ import annotations

import contextlib
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

from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PAGE_TOKENS
from quire.calibrate import settings
from quire.config import CacheConfig, EngineConfig, RetainConfig, SchedulerConfig
from quire.engine.build import assemble, namespace_of, resolve
from quire.engine.calibration import Calibration
from quire.engine.reading import log_probabilities, read_window
from quire.engine.runner import LOGIT_ROWS
from quire.errors import ConfigError
from quire.models.layers import torch_dtype
from quire.models.plan import Model
from quire.models.tokenizer import Tokenizer
from quire.version import __version__

log = logging.getLogger("quire")

MOST_DIVERGENCE = 0.5
"""Nats a token that a codec may cost, as mean KL(dense || codec): of a text that the model itself would write, 1.65
times the perplexity."""

NUM_TOKENS = 320
"""Of the text: all but its first chunk of 64 read encoded ones. SmolLM2 takes 1.7 s of processor time to read them
through both caches."""

LEAST_TOKENS = 2 * PAGE_TOKENS + 1
"""Below, a model's context ends before anything worth mentioning is read encoded."""

SPARE_CHUNKS = 8
"""Dense chunks that an arena has beyond the text's tokens: it is cut down to whole slabs."""

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
    """How far a codec's predictions are from a dense cache's.

    kl          mean over tokens of KL(dense || codec) of the distributions of the next token, in nats
    ratio       perplexity by the dense one's
    num_tokens  tokens that were predicted: all but those of the first chunk, which reads nothing encoded
    """

    kl: float
    ratio: float
    num_tokens: int


def check_codec(
    model: Model, tokenizer: Tokenizer, config: EngineConfig, model_id: str, calibration: Calibration | None
) -> None:
    """Reads TEXT unless that was done before, with the same model, tokenizer, codec and settings of it.

    config       resolved
    model_id     the checkpoint's fingerprint
    calibration  of a codec that needs one
    Raises ConfigError, with the number, beyond MOST_DIVERGENCE: that is not remembered.
    """
    codec = config.cache.codec
    tokens = _tokens(model, tokenizer)
    if len(tokens) < LEAST_TOKENS:
        return
    file = folder() / f"{_digest(model, config, model_id, calibration, tokens)}.json"
    # Not Path.exists, which raises where the folder may not be looked into.
    if os.path.exists(file):
        return
    log.info("cache.codec %s has not run on this model before: it reads a text of %d tokens first", codec, len(tokens))
    begun = time.monotonic()
    found = measure(model, tokenizer, config, calibration, tokens)
    apart = f"{found.kl:.3f} nats a token from a dense cache, perplexity x {found.ratio:.4g}"
    if not found.kl <= MOST_DIVERGENCE:
        raise ConfigError(
            f"cache.codec {codec} destroys this model: over a text of {found.num_tokens} tokens its predictions are"
            f" {apart}, and {MOST_DIVERGENCE} nats are the limit; use another codec, or set cache.check false"
        )
    log.info(
        "cache.codec %s checked on this model, once: over %d tokens %s, limit %s; %.1f s",
        codec,
        found.num_tokens,
        apart,
        MOST_DIVERGENCE,
        time.monotonic() - begun,
    )
    _remember(file, {"codec": codec, "model": model_id, "kl": found.kl, "ratio": found.ratio})


def folder() -> Path:
    """Where results are kept: quire/checks in the user's cache folder, beside the calibrations."""
    return settings.folder().parent / "checks"


@torch.inference_mode()
def measure(
    model: Model, tokenizer: Tokenizer, config: EngineConfig, calibration: Calibration | None, tokens: list[int]
) -> Divergence:
    """Reads at least LEAST_TOKENS tokens through two small caches.

    A cache that is not strict would read the text before it is encoded, and retention drops tokens: neither is on.
    """
    shape = model.shape
    page_bytes = DenseCodec(shape.head_dim, torch_dtype(config.model.dtype)).page_bytes
    chunks = (-(-len(tokens) // PAGE_TOKENS) + SPARE_CHUNKS) * 5 // 4
    memory = chunks * page_bytes * shape.num_layers * shape.num_kv_heads
    dense = CacheConfig(codec="dense", memory=memory, share=False)
    encoded = replace(config.cache, memory=memory, share=False, lifetime=None, pin=None, strict=True)
    hidden = []
    for cache, tables in ((dense, None), (encoded, calibration)):
        small = replace(
            config,
            cache=cache,
            model=replace(config.model, max_context=None),
            retain=RetainConfig(),
            scheduler=SchedulerConfig(max_running=1),
        )
        resolved, fits = resolve(small, shape, None, tables)
        engine = assemble(model, tokenizer, resolved, fits, "", tables)
        # The first chunk reads nothing encoded.
        hidden.append(read_window(engine, tokens)[0][PAGE_TOKENS:])
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
    """What the model reads: the beginning of TEXT, without tokens that the model does not have."""
    shape = model.shape
    known = (token for token in tokenizer.encode(TEXT) if token < shape.vocab_size)
    return list(islice(known, min(NUM_TOKENS, shape.context_limit)))


def _digest(
    model: Model, config: EngineConfig, model_id: str, calibration: Calibration | None, tokens: list[int]
) -> str:
    """All that the result depends on: what pages do, the kernels, the text as it is read, the limit."""
    namespace = namespace_of(config, model.shape, model_id, calibration)
    said = [repr(namespace), config.attention.backend, __version__, tokens, MOST_DIVERGENCE]
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()


def _remember(file: Path, result: dict[str, object]) -> None:
    """Writes a result whole or not at all; one that cannot be written is measured again at the next start."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(result))
        unfinished.replace(file)
    except OSError as error:
        log.warning("%s: cannot be written (%s); the next start checks again", file, error.strerror or error)
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
