"""Free-running workers agree on counts of updates, stops and validations."""
