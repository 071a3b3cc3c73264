"""Tools that a model may call: what is asked for, how models of a family write calls, and reading them."""
