"""Gradient clipping and backward of the precision plugin, where the merged gradient counts."""

from __future__ import annotations

from typing import Any

from hybridtrain.lightning.step.session import Session
from hybridtrain.protocol.messages import Clip


def take_over(session: Session, plugin: Any) -> None:
    """If no user code reads gradients, the server clips the mean; else all workers get it first.

    A lone or free-running worker needs neither: its own gradient counts.
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
