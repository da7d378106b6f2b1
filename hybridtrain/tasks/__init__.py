"""The tasks that ship with hybridtrain: ordinary Lightning modules and data modules."""

from hybridtrain.lightning_package import decide

decide()  # before any module in here imports Lightning
