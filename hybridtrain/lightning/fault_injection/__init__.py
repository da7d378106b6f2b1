"""Fault injection in the parent and in workers."""
