"""Predictions of papers, compared with the policies and updates that train.

Here live the laws, by topic. Tables and drawings are in ``scripts/laws.py``; bounds in the tests.
Nothing here starts a process or reads a clock.
"""
