"""Callbacks, modules and loggers as data that another process can take over."""
