"""``optimizer.state`` in a worker: the server's, fetched when somebody looks.

The moments lie in the server; most modules never read them. Where one does (a monitor, a reset of
the momentum, ``optimizer.state_dict()``), it finds what one process would have; what it changes is
handed over with the next push.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hybridtrain.engine.updates.groups import same

Fetch = Callable[[], Mapping[Any, Any]]

_READERS = ["__getitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__"]
_READERS += ["get", "keys", "values", "items", "copy"]
_WRITERS = ["__setitem__", "__delitem__", "setdefault", "pop", "popitem", "update", "clear"]


class RemoteState(defaultdict[Any, Any]):
    """A dictionary that fills itself when it is first used after each step.

    Args:
        fetch: gets the state of the moment.
    """

    def __init__(self, fetch: Fetch) -> None:
        super().__init__(dict)
        self._fetch: Fetch | None = fetch
        self._seen: Any = None  # what was fetched, or nothing yet

    def fill(self) -> None:
        """Get what is not here yet."""
        if self._seen is None and self._fetch is not None:
            self._seen = ()
            dict.update(self, self._fetch())
            self._seen = _print_of(dict(dict.items(self)))

    def forget(self) -> None:
        """The server has stepped: what is here is old."""
        if self._seen is not None:
            dict.clear(self)
            self._seen = None

    @property
    def changed(self) -> bool:
        """Whether user code has made something else of what was fetched."""
        return self._seen is not None and _print_of(dict(dict.items(self))) != self._seen

    def close(self) -> None:
        """Nobody is there any more to be asked."""
        self._fetch = None

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Whoever looks inside finds only what is here already."""
        fetch, self._fetch = self._fetch, None
        try:
            yield
        finally:
            self._fetch = fetch


def _filling(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def method(self: RemoteState, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return plain(self, *args, **kwargs)

    return method


for _name in (*_READERS, *_WRITERS):
    setattr(RemoteState, _name, _filling(_name))


def without_fetching(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its ``state_dict()``, with what is here already."""
    state: Any = optimizer.state
    with state.left_alone() if isinstance(state, RemoteState) else nullcontext():
        return optimizer.state_dict()


def _print_of(value: Any) -> Any:
    """Something that differs when anything inside has been exchanged or changed in place."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, Mapping):
        return [(id(k), _print_of(v)) for k, v in value.items() if not _is_empty(v)]
    if isinstance(value, list | tuple):
        return [_print_of(v) for v in value]
    return value


def _is_empty(value: Any) -> bool:
    """Return True for the empty entry that reading ``state[parameter]`` creates."""
    return isinstance(value, Mapping) and not value


def moved(state: Any, device: torch.device) -> Any:
    """On the device; numbers, such as step counts, stay on the host."""
    if isinstance(state, torch.Tensor):
        return state.to(device) if state.ndim else state
    if isinstance(state, Mapping):
        return {key: moved(value, device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([moved(value, device) for value in state])
    return state


def is_theirs(key: str, group: dict[str, Any], sent: dict[str, Any]) -> bool:
    """Whether the server's value is at least as new; ``capturable`` is a matter of the device."""
    return key != "capturable" and key in sent and same(group.get(key), sent[key])
