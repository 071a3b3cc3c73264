"""Requests in, tokens out: parameters, scheduling, sampling, stopping."""
