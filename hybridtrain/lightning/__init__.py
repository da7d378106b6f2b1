"""The seam to PyTorch Lightning."""
