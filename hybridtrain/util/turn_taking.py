"""Run an ordinary function as a coroutine, on a thread of its own.

Function and caller never run at the same time: somewhere inside, the function calls ``ask`` and is
suspended there until the caller passes the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Asked:
    """The function is suspended in ``ask(question)``."""

    question: Any


@dataclass(frozen=True, slots=True)
class FunctionEnded:
    """The function has returned, or raised ``error``."""

    error: BaseException | None = None


class Abandoned(BaseException):
    """Raised in ``ask``: no answer will come. Not an ``Exception``: user code lets it through."""


_CLOSE = object()


class TurnTaking:
    """One thread, made when first needed, that runs one function at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._to: SimpleQueue[Any] = SimpleQueue()
        self._back: SimpleQueue[Asked | FunctionEnded] = SimpleQueue()

    def start(self, function: Callable[[], Any]) -> Asked | FunctionEnded:
        """Run the function until it asks or ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hybridtrain-step", daemon=True)
            self._thread.start()
        return self.answer(function)

    def answer(self, value: Any) -> Asked | FunctionEnded:
        """Resume the suspended function with this answer until it asks again or ends."""
        self._to.put(value)
        return self._back.get()

    def ask(self, question: Any) -> Any:
        """Called by the function: suspend it until there is an answer."""
        self._back.put(Asked(question))
        if (value := self._to.get()) is _CLOSE:
            self._to.put(_CLOSE)  # for the thread's loop, or for another ask
            raise Abandoned
        return value

    def _work(self) -> None:
        torch.set_num_threads(1)  # as the server itself: OpenMP teams would fight over the cores
        with torch.no_grad():
            while (function := self._to.get()) is not _CLOSE:
                self._back.put(_outcome(function))

    def close(self) -> None:
        """End the thread; a suspended function is unwound."""
        if self._thread is not None:
            self._to.put(_CLOSE)
            self._thread.join(timeout=5.0)
            self._thread = None


def _outcome(function: Callable[[], Any]) -> FunctionEnded:
    try:
        function()
    except BaseException as error:
        return FunctionEnded(error)
    return FunctionEnded()
