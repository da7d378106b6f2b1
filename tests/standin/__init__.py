"""A device type of the tests' own, in pure Python, that shows what CUDA shows; see ``device``."""
