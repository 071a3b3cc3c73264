"""Requests over time: traces, what is fitted to them, and latency targets."""
