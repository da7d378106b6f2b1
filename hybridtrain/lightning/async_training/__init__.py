"""What workers that run freely must agree on: counts of updates, stops, validations."""
