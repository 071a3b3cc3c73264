"""Structured output: what the text of an answer must be, compiled to the tokens that may come next."""
