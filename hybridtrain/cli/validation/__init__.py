"""Checks of configuration, checkpoint and host before a run starts."""
