"""The kinds of feed-forward parts, one module each: what each token goes through alone in a layer."""
