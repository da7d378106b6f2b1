"""Sparse gradients: step only the rows that have one."""
