"""From per-frame probabilities to text."""
