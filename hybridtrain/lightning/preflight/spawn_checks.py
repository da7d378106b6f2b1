"""Check, before workers are spawned, that they can be sent what they need.

A forked worker inherits its parent's memory. A spawned one imports the script anew and gets the
rest as pickles, so the script must not train while it is imported, and all parts must be picklable
and importable.
"""

from __future__ import annotations

import ast
import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.worker.device.cuda import forbids_fork

# Attributes that only the parent needs, back references, and a module's own containers.
_NO_PARTS = frozenset({"_trainer", "_fabric", "trainer", "_parameters", "_buffers", "_modules"})


@dataclass(slots=True)
class Load:
    """Bytes sent to a spawned worker: its own copy, and tensors, which all workers share."""

    own: int = 0
    shared: int = 0


def check_sending(start_method: str, job: Any, named: dict[str, Any]) -> Load:
    """Check that ``job``, with the parts ``named``, can be sent to workers started this way.

    Returns its size; nothing is sent to a forked worker.

    Raises:
        UserError: naming the line that trains on import, or the attribute that cannot be sent.
    """
    if start_method == "fork":
        return Load()
    if (line := unguarded_line()) is not None:
        raise UserError(
            f"workers are started by {start_method}, which imports the script anew in each of "
            f"them, and {line} would train there again; put what follows the imports under "
            f"if __name__ == '__main__':, or {_way_out()}"
        )
    main = sys.modules.get("__main__")
    lost = () if _can_be_imported(main) else ("__main__",)
    load = Load()
    if _fails(job, lost, load) is None:
        return load
    for path, part in named.items():
        if (found := unsendable(part, path, lost)) is not None:
            raise UserError(
                f"workers are started by {start_method}, but {found[0]} is {found[1]}, which "
                "cannot be sent to them; define it at the top level of a module (a file), or "
                f"{_way_out()}"
            )
    raise UserError(
        f"workers are started by {start_method}, but what they need cannot be sent to them: "
        f"{_fails(job, lost)}; {_way_out()}"
    )


def _way_out() -> str:
    """How workers could be forked instead. Called only before an error: it may fork."""
    if forbids_fork():
        return "let nothing touch CUDA before trainer.fit, so that workers can be forked"
    return "use start_method=fork"


# ---- the script ---------------------------------------------------------------------------------


def unguarded_line() -> str | None:
    """The line, as FILE:LINE, where the script trains outside ``if __name__ == "__main__"``."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    main = sys.modules.get("__main__")
    if frame is None or not _is_imported_anew(main):
        return None
    path = Path(frame.f_code.co_filename)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    line = frame.f_lineno
    guarded = any(
        isinstance(node, ast.If)
        and "__name__" in ast.dump(node.test)
        and node.lineno <= line <= (node.end_lineno or line)
        for node in tree.body
    )
    return None if guarded else f"{path.name}:{line}"


def _is_imported_anew(main: Any) -> bool:
    """Whether ``multiprocessing`` runs the main module again in a spawned process."""
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return not str(spec.name).endswith("__main__")
    return _can_be_imported(main) and Path(main.__file__).stem != "ipython"


def _can_be_imported(main: Any) -> bool:
    """Not so in a notebook, an interactive session, with ``-c`` or from a pipe."""
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).is_file()


# ---- parts that cannot be pickled ---------------------------------------------------------------


class _Nowhere:
    """A file that only counts bytes."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def write(self, part: Any) -> int:
        n_bytes = memoryview(part).nbytes
        self._load.own += n_bytes
        return n_bytes


class _Probe(ForkingPickler):
    """Pickles to nowhere; skips tensors, and objects that are sent only while a process starts."""

    def __init__(self, lost: tuple[str, ...], load: Load) -> None:
        super().__init__(_Nowhere(load))
        self._lost, self._load = lost, load
        self._counted: set[int] = set()  # addresses of storages, which tensors may share

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.Tensor):
            if obj.requires_grad and not obj.is_leaf:
                raise pickle.PicklingError("a tensor with a history cannot be sent: detach it")
            self._count(obj)
            return "tensor"
        known = isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage)
        return "other" if known or type(obj).__module__.startswith("multiprocessing.") else None

    def _count(self, tensor: torch.Tensor) -> None:
        """Count a storage that torch puts into shared memory, once for all workers."""
        plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if plain and not tensor.is_shared():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._counted:
                self._counted.add(storage.data_ptr())
                self._load.shared += storage.nbytes()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ in self._lost:
            raise pickle.PicklingError("what an interactive session has defined cannot be imported")
        return NotImplemented


def load_of(obj: Any) -> Load:
    """The size of an object sent to a spawned worker."""
    load = Load()
    _fails(obj, (), load)
    return load


def _fails(obj: Any, lost: tuple[str, ...], load: Load | None = None) -> str | None:
    """The reason why it cannot be sent; ``None``: it can."""
    try:
        _Probe(lost, load or Load()).dump(obj)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def unsendable(obj: Any, path: str, lost: tuple[str, ...] = ()) -> tuple[str, str] | None:
    """The innermost attribute that cannot be pickled, and its description; ``None`` if all can.

    Args:
        obj: to be searched.
        path: its name.
        lost: modules that a worker cannot import.
    """
    return _search(obj, path, lost, set())


def _search(obj: Any, path: str, lost: tuple[str, ...], seen: set[int]) -> tuple[str, str] | None:
    if id(obj) in seen or (reason := _fails(obj, lost)) is None:
        return None
    seen.add(id(obj))
    if not isinstance(obj, type | types.FunctionType):
        for name, part in _parts(obj):
            if (found := _search(part, f"{path}{name}", lost, seen)) is not None:
                return found
    return path, _describe(obj, reason)


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, with the text to be added to its name."""
    match obj:
        case dict():
            yield from ((f"[{key!r}]", value) for key, value in obj.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{index}]", value) for index, value in enumerate(obj))
        case types.MethodType():
            yield "", obj.__self__
        case functools.partial():
            yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
        case _:
            own = dict(getattr(obj, "__dict__", {}))
            if isinstance(obj, torch.nn.Module):  # it shows them as its own
                own = own["_parameters"] | own["_buffers"] | own["_modules"] | own
            yield from ((f".{k}", value) for k, value in own.items() if k not in _NO_PARTS)


def _describe(obj: Any, reason: str) -> str:
    if isinstance(obj, types.FunctionType):
        if obj.__name__ == "<lambda>":
            return "a lambda"
        return f"the function {obj.__qualname__}, {_where(obj)}"
    if isinstance(obj, type):
        return f"the class {obj.__qualname__}, {_where(obj)}"
    kind = type(obj)
    if "<locals>" in kind.__qualname__ or kind.__module__ == "__main__":
        return f"an object of the class {kind.__qualname__}, {_where(kind)}"
    return f"an object of the type {kind.__module__}.{kind.__qualname__} ({reason})"


def _where(obj: type | Callable[..., Any]) -> str:
    if "<locals>" in obj.__qualname__:
        return "which is defined inside a function"
    return "which is defined in an interactive session or under a name that leads elsewhere"
