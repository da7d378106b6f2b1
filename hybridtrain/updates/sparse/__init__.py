"""Optimizers for sparse gradients: only rows that have a gradient are stepped."""
