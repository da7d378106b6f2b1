"""Elementwise optimizers on flat memory: gradient mean and step in one pass."""
