"""Elementwise optimizers over flat memory: mean of the rows and update in one pass."""
