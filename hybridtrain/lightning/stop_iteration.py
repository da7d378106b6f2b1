"""``StopIteration`` out of a step or a hook is an error, as it is in a generator (PEP 479).

Lightning's loops take it for the end of the epoch, wherever it comes from: a ``next()`` in a
``training_step`` that finds nothing ends the epoch without a word. Of one worker among several that
would be worse: it would leave the others' way. What is meant to end an epoch stays: the end of the
data, also in ``training_step(dataloader_iter)``, and ``on_train_batch_start`` that returns -1.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

from pytorch_lightning.loops import fetchers
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.prediction_loop import _PredictionLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop

_METHODS: tuple[tuple[type[Any], str], ...] = (
    (_FitLoop, "on_advance_start"),
    (_FitLoop, "advance"),
    (_FitLoop, "on_advance_end"),
    (_TrainingEpochLoop, "advance"),
    (_TrainingEpochLoop, "on_advance_end"),
    (_EvaluationLoop, "_evaluation_step"),
    (_PredictionLoop, "_predict_step"),
)


def take_for_an_error() -> None:
    """From now on, in this process."""
    for loop, name in _METHODS:
        method = getattr(loop, name)
        if not hasattr(method, "__wrapped__"):
            setattr(loop, name, _strict(method))


def _strict(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def strict(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except StopIteration as error:
            if _is_the_end(error, method.__code__):
                raise
            raise RuntimeError(_in_words(error)) from error

    return strict


def _is_the_end(error: StopIteration, loop: CodeType) -> bool:
    """Whether the loop itself has raised it, or what fetches mini-batches."""
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
        f"{last.line}); Lightning would take it for the end of the epoch. Catch it where it is "
        "raised, or give next() a default"
    )
