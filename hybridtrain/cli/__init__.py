"""The command line: composing a run with Hydra, checking it, running it, sweeping over it."""
