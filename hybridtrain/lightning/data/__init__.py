"""Samplers and loaders: which samples each worker trains and evaluates on."""
