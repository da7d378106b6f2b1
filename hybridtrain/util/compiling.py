"""Functions that numba compiles, where it is installed (extra ``sparse``)."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from hybridtrain.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])
INSTALL = "pip install 'hybridtrain[sparse]'"
# Sums in any order, so that they are vectorised; NaN and infinity stay what they are.
_FAST = {"contract", "nsz", "arcp", "reassoc"}


def is_installed() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def compiled(function: Function, **more: Any) -> Function:
    """Compile with numba at the first call, cached on disk for the next process.

    ``more``: options of ``numba.njit``.

    Raises:
        UserError: if numba is not installed.
    """
    try:
        import numba
    except ImportError as error:
        raise UserError(f"compiled steps need numba: {INSTALL}") from error
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy", **more}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:  # no folder that can be written to
        warnings.warn(
            f"compiled steps cannot be kept for the next start, which takes seconds longer "
            f"({error}); name a folder that can be written to in NUMBA_CACHE_DIR",
            stacklevel=2,
        )
        return numba.njit(**options)(function)


def inlined(function: Function) -> Function:
    """Compile into the callers, as numba counts references to arrays at each call."""
    return compiled(function, inline="always")
