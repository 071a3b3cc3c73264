"""Plans what serves most: candidates, upper bounds, searches, and the goodputs that simulations give them."""
