"""The seam to PyTorch Lightning."""

from hybridtrain.lightning_package import decide

decide()  # before any module in here imports Lightning
