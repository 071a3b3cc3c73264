"""Triton kernels on pages and the layout of a step they read. Imported only when the `triton` backend is chosen."""
