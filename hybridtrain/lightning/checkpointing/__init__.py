"""Checkpoints: written whole, of one version, and resumed in the middle of an epoch."""
