"""Faults on purpose: which there are, when they happen, which have happened."""
