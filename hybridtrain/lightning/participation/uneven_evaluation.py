"""Evaluations in which not every worker has something to do, or as much as the others.

A worker takes part in an evaluation if it has a sample in each of its loaders. The others rest:
Lightning skips a loop without mini-batches, and they wait for its end. Meetings of the workers that
take part (a reduced metric, a callback's decision) go on without them. Then they take over what the
evaluation has changed: metrics, a request to stop, callbacks' states. Workers whose shares differ
by one mini-batch wait for each other the same way, so that a reduction within a step is over the
workers that still have a step to make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl

from hybridtrain.lightning.async_training.update_count import precede
from hybridtrain.lightning.hooks.loop_hooks import (
    BEHIND_EVALUATION,
    BEHIND_LOADER,
    evaluation_batches,
    forget_loaders,
    set_evaluation_batches,
)
from hybridtrain.lightning.participation.logged_metrics import StepOutcome
from hybridtrain.lightning.run_context import context_of
from hybridtrain.worker.client import Client


class UnevenEvaluation:
    """One of Lightning's evaluation loops, with workers that may rest.

    Args:
        loop: the loop.
        trainer: of this worker.
        client: to the server.
        begin: what is to be done before loaders are made, for these workers.
    """

    def __init__(
        self,
        loop: Any,
        trainer: pl.Trainer,
        client: Client,
        begin: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._loop, self._client = loop, client
        self._trainer: Any = trainer
        self._begin = begin
        self._roll: list[str] | None = None  # what everybody did in the evaluation under way
        self.before: int | None = None  # mini-batches until it began, if it is not over
        self._shared: tuple[int, ...] = ()  # the workers that share what the loaders have
        self._runs = False
        self._batches: Any = None  # how many this worker has of each loader
        self._shown: Any = None  # the same of a worker that takes part

    def attach(self) -> None:
        """Stand in the loop's way at its beginning and its end."""
        loop = self._loop
        self._run, self._setup_data = loop.run, loop.setup_data
        loop.run, loop.setup_data = self.run, self.setup_data
        if self._predicts:
            precede(loop, "on_run_end", self._end)
        else:
            precede(loop, BEHIND_LOADER, lambda: self._meet("between"))
            precede(loop, "on_run_end", self._end)
            precede(loop, BEHIND_EVALUATION, self._conclude)

    @property
    def _predicts(self) -> bool:
        return self._loop is self._trainer.predict_loop

    def setup_data(self) -> None:
        """Workers without samples are no error; the limit on predictions is one for all workers."""
        module, trainer = self._trainer.lightning_module, self._trainer
        name = "allow_zero_length_dataloader_with_multiple_devices"
        allowed, limit = getattr(module, name), trainer.limit_predict_batches
        known = self._batches
        if known is not None:
            set_evaluation_batches(self._loop, known)
        if (sharing := self._sharing()) != self._shared:
            forget_loaders(self._loop)
            self._shared = sharing
        self._begin(sharing)
        setattr(module, name, True)
        if self._predicts and isinstance(limit, float) and limit > 0:
            trainer.limit_predict_batches = 1.0  # `Dealt` has seen to it
        try:
            self._setup_data()
        finally:
            setattr(module, name, allowed)
            trainer.limit_predict_batches = limit
        if not self._predicts:
            self._show_batches(known)

    def _show_batches(self, known: Any) -> None:
        """Outside of the evaluation a worker that rests looks as if it had mini-batches, too.

        Or callbacks that decide when to save would take it that nothing is validated.
        """
        own = self._batches = evaluation_batches(self._loop)
        if own is not known:  # loaders are new
            found = self._client.gather("mini-batches of an evaluation", own)
            self._shown = own if sum(own) else max(found, key=sum)
        if not self._runs:
            set_evaluation_batches(self._loop, self._shown)

    def _sharing(self) -> tuple[int, ...]:
        """Who shares the samples; where workers may be lost for good, all agree on who is left."""
        client, choice = self._client, context_of(self._trainer).on_failure.choice
        if client.n_workers == 1 or client.solo or choice != "continue":
            return client.there
        client.gather("who evaluates", None)
        return client.met

    def run(self) -> Any:
        """As Lightning's, but all workers come out of it together."""
        total = self._loop.batch_progress.total
        self._roll, self.before = None, total.completed
        if not self._predicts and self._loop.restarted_mid_evaluation:
            total.ready = total.started = total.completed  # Lightning sets the current ones back
        self._runs = True
        result = self._run()
        self._runs = False
        if self._client.n_workers > 1 and self._loop.max_batches:  # nobody has any otherwise
            rests = self._roll is None
            roll = self._rest() if rests else self._roll
            if roll is not None and "end" in roll and "rests" in roll and not self._predicts:
                self._share_outcome(rests)
        self.before = None
        return result

    def _meet(self, what: str) -> list[str]:
        return self._client.gather("steps of an evaluation", what, patient=True)

    def _end(self) -> None:
        self._roll = self._meet("end")

    def _conclude(self) -> None:
        """Callbacks hear of the outcome now, and may save it."""
        self.before = None

    def _rest(self) -> list[str]:
        while "between" in (roll := self._meet("rests")):
            pass  # the others have come to their next loader
        return roll

    def _share_outcome(self, rests: bool) -> None:
        """Those who have rested become as the first who has not (and is not lost on the way)."""
        trainer = self._trainer
        # Both sides have them; the module's own vary.
        at_home = context_of(trainer).callbacks_at_home
        callbacks = trainer.callbacks if at_home is None else at_home
        mine = None if rests else StepOutcome.of(trainer, callbacks, collects=True)
        known = self._client.gather("end of an evaluation", mine, patient=True)
        outcome = next((each for each in known if each is not None), None)
        if rests and outcome is not None:
            outcome.give(trainer, callbacks)
            set_evaluation_batches(self._loop, self._shown)
