"""Engines that work together: what crosses from one to another."""
