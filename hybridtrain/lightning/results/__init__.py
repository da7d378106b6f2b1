"""What comes home from the workers after ``fit``: metrics, callbacks, loggers."""
