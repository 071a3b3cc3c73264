"""Drives engines to find what they take: seconds, memory, bytes a second."""
