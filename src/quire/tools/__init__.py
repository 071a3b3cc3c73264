"""Tools that a model may call: their definitions, how each model family writes calls, and a parser for calls."""
