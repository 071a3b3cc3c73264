"""Stores: places for runs beside the arena. Knows runs and their bytes, not sequences, pages or tokens."""
