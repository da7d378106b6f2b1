"""The seam to PyTorch Lightning."""

# First, whichever module of this package is imported first: the import of Lightning registers the
# strategies, and registering imports the modules of this package.
import pytorch_lightning  # noqa: F401
