"""The seam to PyTorch Lightning."""

from hybridtrain.lightning_package import decide
from hybridtrain.util.versions import check_versions, lacks

_PACKAGE = decide().replace("_", "-")  # before any module in here imports Lightning
check_versions("torch", _PACKAGE)

try:  # what is private to Lightning
    from hybridtrain.lightning.hooks import lean_hooks, loop_hooks, trainer_hooks  # noqa: F401
except (ImportError, AttributeError) as _error:
    raise lacks(_PACKAGE, _error) from _error
