"""The key-value cache: pages of bytes, chunks of pages, segments of chunks, and who holds them."""
