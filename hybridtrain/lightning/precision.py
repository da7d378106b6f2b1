"""What a precision plugin may still do, where the gradient that counts is not the worker's own."""

from __future__ import annotations

from typing import Any

from hybridtrain.lightning.step.session import Session
from hybridtrain.protocol.messages import Clip


def take_over(session: Session, plugin: Any) -> None:
    """Where nobody looks, the server clips what it has merged; else all get the mean first.

    A lone or free-running worker that looks needs neither: its own gradient is what counts.
    """

    def record_clip(
        optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if clip_val and clip_val > 0:
            algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
            for step in session.steps:
                step.clip = Clip(algorithm, float(clip_val))

    if session.final:
        plugin.clip_gradients = record_clip
    if not session.averages:
        return
    backward = plugin.backward

    def backward_and_average(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if session.steps and not session.accumulates():
            session.average()

    plugin.backward = backward_and_average
