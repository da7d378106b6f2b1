"""Find calls in a pickle that take memory beside its content, without making them.

``torch.load`` makes some calls also with ``weights_only=True``, and a few bytes may then stand for
gigabytes: ``bytearray(n)``, ``torch.FloatTensor(n)``, ``TypedStorage(n)``, nested encodings.
``torch.save`` writes none of these. So the opcodes are followed as ``torch.load`` follows them,
with texts, numbers and tuples, and with the names of functions in place of the functions.
"""

from __future__ import annotations

import pickletools
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from io import BytesIO
from mmap import mmap
from typing import Any, TypeAlias

_FOR_MEMORY = re.compile(
    r"builtins\.bytearray|torch[\w.]*\.\w*(Tensor|Storage)|torch\._utils\._rebuild_device_tensor_.*"
)
_COPY = {f"collections.{x}" for x in ("Counter", "OrderedDict")} | {"builtins.set", "torch.Size"}
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"  # calls its first argument
_REBUILDS = "torch._utils._rebuild_"
_PICKLES = 5  # in a file that is no archive: magic number, version, system, content, storages


class _Named(str):
    """A function or class."""


class _Held:
    """A list, dictionary, or result of a call; ``n``: its elements."""

    def __init__(self, n: int = 0) -> None:
        self.n = n


Value: TypeAlias = str | int | tuple["Value", ...] | _Held | None


class _Fault(Exception):
    """Raised with the fault, in a few words."""


def call_for_memory(pickled: bytes | mmap, n_bytes: int) -> str | None:
    """Describe a call that takes memory without content for it; ``None``: there is none.

    Args:
        pickled: one pickle, or a file of several.
        n_bytes: of the whole file; its storages have no more elements.
    """
    file, n_pickles = (pickled, _PICKLES) if isinstance(pickled, mmap) else (BytesIO(pickled), 1)
    reader = _Reader(n_bytes)
    try:
        for _ in range(n_pickles):
            if not reader.has_read(file):
                return None
    except _Fault as fault:
        return str(fault)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        return "its pickle is not as torch.save writes it"
    return None


class _Reader:
    """Follows the opcodes that ``torch.load`` knows with ``weights_only=True``."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes, self._n_copied = n_bytes, 0
        self._storages: dict[str, int] = {}  # elements by key
        self._n_elements = 0  # of all storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def has_read(self, file: Any) -> bool:
        """Read one pickle; whether ``torch.load`` would read on. Raises _Fault, and others."""
        self._stack, self._marks, self._memo = [], [], {}
        for opcode, arg, _ in pickletools.genops(file):
            name = opcode.name
            if name in _PUSHED:
                self._stack.append(arg)
            elif name in _MADE:
                self._stack.append(_MADE[name]())
            elif name in _STEPS:
                _STEPS[name](self, arg)
            elif name not in ("PROTO", "STOP"):
                return False
        return True

    def _global(self, arg: str) -> None:
        module, name = arg.split(" ", 1)
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self._stack.append(_Named(f"{module}.{name}"))

    def _mark(self, _: object) -> None:
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _tuple(self, n: int | None) -> None:
        found = self._since_mark() if n is None else [self._stack.pop() for _ in range(n)][::-1]
        self._stack.append(tuple(found))

    def _put(self, arg: int) -> None:
        self._memo[arg] = self._stack[-1]

    def _get(self, arg: int) -> None:
        self._stack.append(self._memo[arg])

    def _add(self, n: int | None) -> None:
        found = self._since_mark() if n is None else [self._stack.pop() for _ in range(n)]
        self._stack[-1].n += len(found)

    def _build(self, _: object) -> None:
        self._stack.pop()

    def _call(self, _: object) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        self._stack.append(self._result(called, args))

    def _result(self, called: Value, args: tuple[Value, ...]) -> _Held:
        if not isinstance(called, _Named):
            return _Held()  # which torch.load does not call
        n_copied, is_wrong = 0, _FOR_MEMORY.fullmatch(called) is not None
        if called == _OF_TYPE:
            is_wrong = not (isinstance(args[0], _Named) and args[0].startswith(_REBUILDS))
        elif called == "_codecs.encode":  # as bytes are written
            text, encoding = args
            is_wrong = type(text) is not str or encoding != "latin1"
            n_copied = _length(text)
        elif called in _COPY:
            n_copied = sum(_length(each) for each in args)
        self._n_copied += n_copied
        if is_wrong or self._n_copied > self._n_bytes:
            name = called.removeprefix("builtins.")[:80]
            raise _Fault(f"it calls {name}, for memory beside its content")
        return _Held(n_copied)

    def _storage(self, _: object) -> None:
        _, _, key, _, n, *_ = self._stack.pop()
        if type(key) is not str or type(n) is not int:
            raise TypeError
        more = max(n - self._storages.get(key, 0), 0)
        self._storages[key] = self._storages.get(key, 0) + more
        self._n_elements += more
        if self._n_elements > self._n_bytes:
            raise _Fault("its storages have more elements than the file has bytes")
        self._stack.append(_Held())


def _length(value: Value) -> int:
    if isinstance(value, _Held):
        return value.n
    return len(value) if isinstance(value, str | tuple) else 0


_PUSHED = {"BINUNICODE", "SHORT_BINSTRING", "BININT", "BININT1", "BININT2", "LONG1"}
_MADE: dict[str, Callable[[], Value]] = {
    **dict.fromkeys(("NONE", "NEWFALSE", "NEWTRUE", "BINFLOAT"), lambda: None),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _Held),
    "EMPTY_TUPLE": tuple,
}
_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    "GLOBAL": _Reader._global,
    "MARK": _Reader._mark,
    "TUPLE": _Reader._tuple,
    "TUPLE1": lambda self, _: self._tuple(1),
    "TUPLE2": lambda self, _: self._tuple(2),
    "TUPLE3": lambda self, _: self._tuple(3),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader._put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Reader._get),
    **dict.fromkeys(("APPENDS", "SETITEMS"), _Reader._add),
    "APPEND": lambda self, _: self._add(1),
    "SETITEM": lambda self, _: self._add(2),
    "BUILD": _Reader._build,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Reader._call),
    "BINPERSID": _Reader._storage,
}
