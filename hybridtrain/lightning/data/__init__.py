"""Which samples a worker trains and evaluates on: samplers and loaders."""
