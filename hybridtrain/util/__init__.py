"""Small helpers that know nothing of training: files, arguments, wrappers."""
