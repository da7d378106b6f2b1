"""Checks before any process is started."""
