"""What a configuration, a checkpoint and the host must be like before a run starts."""
