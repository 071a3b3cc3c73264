#!/usr/bin/env python3
"""Compare tiny random models of every family, as llama.cpp's own converter writes them, with `transformers`.

    python scripts/families.py --llama-cpp FOLDER [--seeds N]

FOLDER is llama.cpp's source, for instance vendor/llama.cpp of the source archive of llama-cpp-python. Needs the
packages of the tests. Prints one line for each model: the largest difference of a logit over all seeds. The exit code
is 1 if any is above the tolerance. tests/models/test_gguf_families.py has the same models without the converter.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-4
"""Largest difference of a logit. Both compute in float32."""


def convert(folder: Path, path: Path) -> Path:
    """Write a model folder as a GGUF file without a vocabulary, which the converter knows for published models only."""
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, get_model_architecture

    settings = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(settings, ModelType.TEXT))
    writer: Any = kind(folder, gguf.LlamaFileType.ALL_F32, path, model_name="tiny")
    # Mistral 3 has another converter inside.
    for each in (writer, getattr(writer, "impl", None)):
        if each is not None:
            each.set_vocab = lambda: None
    writer.write()
    return path


def add_what_the_converter_needs(folder: Path) -> None:
    """Settings that published models have, and `transformers` does not write."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "cohere2":
        path.write_text(json.dumps(config | {"rotary_pct": 1.0}))


def difference(family: str, changes: dict[str, Any], seed: int, folder: Path) -> float:
    """The largest difference of a logit."""
    from tests.models.test_decoder import load, prefill, random_tokens, theirs
    from tests.tiny_models import save_tiny

    model_folder = save_tiny(folder / "model", family, seed, **changes)
    add_what_the_converter_needs(model_folder)
    model = load(convert(model_folder, folder / "model.gguf"))
    tokens = random_tokens(model.shape.vocab_size, min(64, model.shape.max_context), seed)
    return float((prefill(model, tokens) - theirs(model_folder, tokens)).abs().max())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="FOLDER", help="llama.cpp's source")
    parser.add_argument("--seeds", type=int, default=1, help="random models of each kind (default: 1)")
    options = parser.parse_args()
    # The folder of this script, where Python looks first, has another module called tests.
    sys.path[:1] = [str(ROOT), str(options.llama_cpp), str(options.llama_cpp / "gguf-py")]
    import torch

    from tests.models.test_gguf_families import CASES

    logging.disable(logging.WARNING)
    is_worse = False
    with torch.inference_mode():
        for family, changes in CASES:
            worst = 0.0
            for seed in range(options.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    worst = max(worst, difference(family, changes, seed, Path(folder)))
            is_worse |= not worst <= TOLERANCE
            options_text = json.dumps(changes) if changes else ""
            print(f"{family:12} {worst:.1e} {'ok' if worst <= TOLERANCE else 'TOO LARGE'} {options_text}", flush=True)
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
