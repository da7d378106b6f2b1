"""The strategy for PyTorch Lightning, and all that it changes in Lightning's loops.

``strategy.py`` puts the parts together, and gives each what it needs when it is made;
``launcher.py`` makes the process that calls ``fit`` the server. ``hooks`` alone touches private
names of Lightning's, and lists each method of Lightning's that is replaced. ``run_context.py`` is
for code that Lightning calls with a trainer alone.

It must not know the command line, Hydra, the public server, the tasks or the pages of the report.
"""

from hybridtrain.lightning_package import decide
from hybridtrain.util.versions import check_versions, lacks

_PACKAGE = decide().replace("_", "-")  # before any module in here imports Lightning
check_versions("torch", _PACKAGE)

try:  # what is private to Lightning
    from hybridtrain.lightning.hooks import (  # noqa: F401
        faster_hooks,
        loop_hooks,
        stop_iteration,
        trainer_hooks,
    )
except (ImportError, AttributeError) as _error:
    raise lacks(_PACKAGE, _error) from _error
