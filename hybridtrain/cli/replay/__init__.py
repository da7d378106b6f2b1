"""Repeating a run of the command line from its record."""
