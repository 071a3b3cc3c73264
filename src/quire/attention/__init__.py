"""Attention of a step's query rows over pages: plan once per step on the host, attend per layer."""
