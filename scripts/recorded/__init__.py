"""The parts of scripts/recorded.py: requests by endpoint, command lines, servers, and what of an answer is compared.

Nothing here imports quire: the package that is recorded runs in child processes only.
"""
