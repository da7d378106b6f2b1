"""Progress, logged figures and ``summary.json`` of a run."""
