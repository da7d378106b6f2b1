"""Measure what single parts of the package cost: recording, and watching the workers.

Here live commands, each with what it alone needs, and the training that they share.
What is compared with other software is in ``benchmarks``.
"""
