"""Runs engines to measure the seconds of their steps, their memory, and the speeds of the machine."""
