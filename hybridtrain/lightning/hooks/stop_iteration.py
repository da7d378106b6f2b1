"""``StopIteration`` out of a step, a hook or a data set is an error, as in a generator (PEP 479).

Lightning's loops take any ``StopIteration`` for the end of the epoch: a ``next()`` on an exhausted
iterator in a ``training_step`` or ``__getitem__`` ends the epoch silently. With several workers one
would then miss the others' meetings. Intended ends stay: the end of the data, also in
``training_step(dataloader_iter)``, and ``on_train_batch_start`` that returns -1.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

from pytorch_lightning.loops import fetchers
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.fetch import (
    _BaseDatasetFetcher,
    _IterableDatasetFetcher,
    _MapDatasetFetcher,
)

from hybridtrain.lightning.hooks.points import Point, around, instead


def refuse_stray_stop_iteration(trainer: Any) -> None:
    """Patch this process, and so those that a DataLoader forks from it."""
    fit = trainer.fit_loop
    for point in (Point.EPOCH_START, Point.EPOCH, Point.EPOCH_END):
        around(point, fit, only_the_end)
    for point in (Point.BATCH, Point.BATCH_END):
        around(point, fit.epoch_loop, only_the_end)
    for loop in (fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        around(Point.EVALUATION_STEP, loop, only_the_end)
        around(Point.LOADER_END, loop, only_the_end)
    around(Point.PREDICTION_STEP, trainer.predict_loop, only_the_end)
    instead(Point.ITEMS, _MapDatasetFetcher, strict(_MapDatasetFetcher.fetch))
    instead(Point.STREAM, _IterableDatasetFetcher, strict(_IterableDatasetFetcher.__init__))
    instead(Point.COLLATE, _BaseDatasetFetcher, collating_strictly(_BaseDatasetFetcher.__init__))
    instead(Point.RERAISE, ExceptionWrapper, in_its_words(ExceptionWrapper.reraise))


def only_the_end(proceed: Any, *args: Any, **kwargs: Any) -> Any:
    """A loop's method, which lets only the end of the data pass."""
    try:
        return proceed(*args, **kwargs)
    except StopIteration as error:
        if _is_the_end(error, proceed.__code__):
            raise
        raise RuntimeError(_in_words(error)) from error


def strict(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def strict(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(_in_words(error)) from error

    return strict


def collating_strictly(init: Callable[..., None]) -> Callable[..., None]:
    """Let a stream end, but not the function that collates a mini-batch."""

    @wraps(init)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.collate_fn = strict(self.collate_fn)

    return begin


def in_its_words(reraise: Callable[[Any], None]) -> Callable[[Any], None]:
    """Re-raise a loader process's exception with its text, where torch's would mislead."""

    @wraps(reraise)
    def again(self: Any) -> None:
        if issubclass(self.exc_type, StopIteration | BaseExceptionGroup):
            raise RuntimeError(f"Caught {self.exc_type.__name__} {self.where}.\n{self.exc_msg}")
        reraise(self)

    return again


def _is_the_end(error: StopIteration, loop: CodeType) -> bool:
    """Whether the loop itself or its data fetcher has raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    fetched = any(
        frame.f_code.co_name == "__next__" and frame.f_code.co_filename == fetchers.__file__
        for frame in frames
    )
    return fetched or frames[-1].f_code is loop


def _in_words(error: StopIteration) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"StopIteration was raised in {last.name} ({last.filename}, line {last.lineno}: "
        f"{last.line}); it would be taken for the end of the epoch. Catch it where it is "
        "raised, or give next() a default"
    )
