"""The tasks that ship with hybridtrain: ordinary Lightning modules and data modules.

They are written as a user's own would be, so they must not know the engine, the strategy or any
other room but :mod:`hybridtrain.util`.
"""

from hybridtrain.lightning_package import decide

decide()  # before any module in here imports Lightning
