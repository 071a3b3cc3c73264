"""Memories that page images live in, and what moves them. Tiers see bytes and ids only."""
