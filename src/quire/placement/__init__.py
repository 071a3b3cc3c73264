"""Clusters, how their instances are divided, and files of placements: what planning writes and servers read."""
