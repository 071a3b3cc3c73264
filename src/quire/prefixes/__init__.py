"""Prefixes of prompts in memory and on the disk: listing, finding by key, dropping and importing."""
