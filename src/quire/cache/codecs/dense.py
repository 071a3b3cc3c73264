"""The plainest codec: the model's own dtype. Also the format of every open chunk.

Keys are rotated where sealed chunks stay dense, and not where these are encoded.
"""

from __future__ import annotations

import torch

from quire.cache.codecs.slots import RUN, SlottedPages
from quire.cache.ledger import PAGE_TOKENS, UNIT
from quire.kernels.runtime import DTYPE_IDS


class DenseCodec(SlottedPages):
    """A page is K [P, D], then V [P, D], row-major, then padding to a multiple of 128 bytes.

    head_dim  D
    dtype     bfloat16, float16 or float32
    """

    name = "dense"

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self.kernel_id = DTYPE_IDS[dtype]
        self.head_dim = head_dim
        self.dtype = dtype
        row = head_dim * dtype.itemsize
        self.page_bytes = -(-2 * PAGE_TOKENS * row // UNIT) * UNIT
        super().__init__([[(RUN, row), (RUN, row)]])

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Copies; layer and head do not matter."""
        body = torch.stack((k, v), 1).to(self.dtype).flatten(1).view(torch.uint8)
        return torch.nn.functional.pad(body, (0, self.page_bytes - body.shape[1]))

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored values, widened to float32 [n, P, D]."""
        numbers = pages.contiguous().view(self.dtype)[:, : 2 * PAGE_TOKENS * self.head_dim].float()
        k, v = numbers.unflatten(1, (2, PAGE_TOKENS, -1)).unbind(1)
        return k, v
