"""How long steps take: the features of a step, and models of its seconds. Only numbers."""
