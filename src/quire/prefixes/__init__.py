"""Prefixes of prompts in memory and on the disk: listed, found by their keys, dropped and imported."""
