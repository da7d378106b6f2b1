"""What the calling process takes over from worker 0 after ``fit``: metrics, callbacks, loggers."""
