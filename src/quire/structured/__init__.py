"""Structured output: constraints on an answer's text, compiled to the sets of tokens that may come next."""
