"""Checkpoints: whole files of one version, and resuming in the middle of an epoch."""
