"""Worker 0's metrics, callbacks and loggers, copied to the calling process after ``fit``."""
