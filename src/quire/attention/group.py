"""The tables of group codes for the CPU kernels: the biases of keys."""

from __future__ import annotations

from quire.cache.codecs.group import GroupCodec


class KeyBiases:
    """The key biases, which are subtracted before keys are stored.

    address  address of the biases, float32 [L, H, D]; None: there are no biases
    """

    def __init__(self, codec: GroupCodec) -> None:
        self._biases = codec.key_bias
        self.address = None if self._biases is None else self._biases.data_ptr()
