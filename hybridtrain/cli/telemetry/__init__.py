"""What a run reports about itself: progress, figures, ``summary.json``."""
