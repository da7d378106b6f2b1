"""The command line: compose a run's configuration with Hydra, check it, run it, sweep over it."""
