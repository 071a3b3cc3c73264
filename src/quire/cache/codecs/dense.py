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

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self.name = "dense"
        self.kernel_id = DTYPE_IDS[dtype]
        self.head_dim = head_dim
        self.dtype = dtype
        self.data_bytes = 2 * PAGE_TOKENS * head_dim * dtype.itemsize
        self.page_bytes = -(-self.data_bytes // UNIT) * UNIT
        row = head_dim * dtype.itemsize
        super().__init__([[(RUN, 0, row), (RUN, PAGE_TOKENS * row, row)]])

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Copies; layer and head do not matter."""
        body = torch.stack((k, v), 1).to(self.dtype).flatten(1).view(torch.uint8)
        return torch.nn.functional.pad(body, (0, self.page_bytes - self.data_bytes))

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored values, widened to float32 [n, P, D]."""
        body = pages[:, : self.data_bytes].contiguous().view(self.dtype).float()
        k, v = body.view(-1, 2, PAGE_TOKENS, self.head_dim).unbind(1)
        return k, v
