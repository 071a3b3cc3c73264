"""Stores of runs outside the arena. `disk.DiskStore` keeps them in a folder."""
