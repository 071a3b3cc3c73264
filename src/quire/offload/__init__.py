"""Offloading: weights, cache and activations on any tier, placed by a linear program (FlexGen, arXiv 2303.06865)."""
