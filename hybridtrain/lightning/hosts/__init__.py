"""Training over several hosts: which one this is, the run's key, what hosts must agree on."""
