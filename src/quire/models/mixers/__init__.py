"""The kinds of mixers, one module each: what mixes the tokens of a sequence in a layer."""
