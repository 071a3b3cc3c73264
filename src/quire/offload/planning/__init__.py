"""Plans where offloaded weights, cache and activations lie: profiles, costs and the linear program."""
