"""Retention: which tokens each head keeps, by which rules, and how a path's remaining pages are packed."""
