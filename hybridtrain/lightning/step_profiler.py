"""``Trainer(profiler=StepProfiler("folder"))``: where a step's time goes, in every worker.

Lightning calls its profiler around the actions of its loops; inside them, methods of this package's
objects are timed (:func:`hybridtrain.engine.profiling.timed`). Each worker writes its measurements
to a file when it ends, in whatever way; the calling process makes a table, ``profile.json`` and
``timeline.json`` of them. Under Lightning's own strategies worker 0 does that after all have ended.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning.profilers import Profiler
from pytorch_lightning.strategies import Strategy
from rich.console import Console

from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.engine.profiling import Phase, Track, follow, timed
from hybridtrain.engine.profiling.profile_report import Report
from hybridtrain.engine.profiling.time_spans import LIMIT, ServerWatch, phase_of, short_name
from hybridtrain.engine.worker.client import Client
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.hooks.trainer_hooks import MODULE
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.util.attributes import temporarily
from hybridtrain.util.cleanup import removed_in_the_end
from hybridtrain.util.option_types import Positive, typed

_EPOCH, _BATCH = "run_training_epoch", "run_training_batch"
_PARTS = ".profile-"


class StepProfiler(Profiler):
    """Measures the steps of a fit.

    Args:
        dirpath: where ``profile.json`` and ``timeline.json`` go; by default Lightning's log
            directory.
        limit: spans in the timeline, of all workers together; if there are more, it shows every
            second step, every fourth, and so on. Sums are of all steps.
        quiet: print no table.

    Raises:
        UserError: if ``limit`` is no positive number.
    """

    @typed("")
    def __init__(
        self, dirpath: str | Path | None = None, limit: Positive = LIMIT, quiet: bool = False
    ) -> None:
        super().__init__(dirpath=dirpath)
        self.limit, self.quiet = limit, quiet
        self._parts: Path | None = None  # folder of the workers' measurements
        self._track: Track | None = None
        self._kinds: dict[str, int | None] = {}
        self._epoch_begun = self._watched = False

    # ---- called by Lightning --------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """An action begins."""
        track = self._track
        if track is None:
            return
        kind = self._kinds.get(action_name, -1)
        if kind == -1:
            kind = self._learn(action_name)
        if kind is not None:
            track.begin(kind)
        elif action_name == _BATCH:
            track.next_step(track.step + 1)
        elif action_name == _EPOCH and not self._epoch_begun:
            self._epoch_begun = True
            track.end_open()
            track.restart()

    def stop(self, action_name: str) -> None:
        """An action ends."""
        kind = self._kinds.get(action_name)
        if kind is not None and self._track is not None:
            self._track.end_all(kind)

    def _learn(self, action: str) -> int | None:
        phase = phase_of(action)
        if phase is None and action.endswith(".optimizer_step") and not self._watched:
            phase = Phase.UPDATE  # of which no part is timed
        assert self._track is not None, "something is measured"
        kind = None if phase is None else self._track.kind_of(short_name(action), phase)
        self._kinds[action] = kind
        return kind

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin to measure a worker."""
        super().setup(stage, local_rank, log_dir)
        if stage == "fit" and self._track is None:
            self._begin(self._trainer.world_size)

    @property
    def _trainer(self) -> Any:
        return vars(self)[MODULE].trainer  # set by Lightning

    def _begin(self, n_workers: int) -> Track:
        """Everything until the first epoch is one span."""
        track = self._track = Track("", share_of(self.limit, n_workers))
        self._kinds, self._epoch_begun = {}, False
        track.begin(track.kind_of("start-up", Phase.LOOP))
        return track

    def describe(self) -> None:
        """At the end, in every worker: write the files; under our strategies the launcher does."""
        if self._track is None or self._watched:
            return
        trainer = self._trainer
        folder = Path(self.dirpath or trainer.default_root_dir)
        parts = folder / _PARTS
        self.leave(parts, trainer.global_rank)
        strategy_of(trainer).barrier("profile")
        if trainer.is_global_zero:
            conclude(self, folder, parts, trainer.world_size)

    # ---- a worker's part ------------------------------------------------------------------------

    def watch(
        self, trainer: Any, client: Client, strategy: Strategy, session: Callable[[], object]
    ) -> None:
        """Under a strategy of this package: time its methods and its session, once it trains."""
        self._watched = True
        if self._parts is None:  # on a further host, which writes nothing
            return
        track = self._begin(client.n_workers)
        timed(track, client, "gather", Phase.WAIT, "meeting")
        timed(track, client.queue, "draw", Phase.DATA, "ticket")
        for method, name in (("average", "mean of all"), ("begin", "turn"), ("pull", "pull")):
            timed(track, client, method, Phase.WAIT, name)
        timed(track, client.snapshots, "take", Phase.CHECKPOINT, "snapshot")
        around(Point.EVALUATION, trainer.fit_loop.epoch_loop.val_loop, self.validate)
        timed(track, client.line, "send", Phase.PUSH)  # apart from waiting
        timed(track, client.pushes, "await_release", Phase.WAIT, "wait for the release")
        follow(client.pushes, "await_release", lambda: track.mark(client.steps.version))
        follow(strategy, "on_train_start", lambda: self._watch_session(session(), client))

    def validate(self, proceed: Callable[[], Any]) -> Any:
        """Measure a validation."""
        track = self._track
        if track is None:
            return proceed()
        track.begin(track.kind_of("run", Phase.VALIDATION))
        try:
            return proceed()
        finally:
            track.end()

    def _watch_session(self, session: Any, client: Client) -> None:
        """Time the session's parts; the user may replace optimizers later."""
        track = self._track
        if track is None or session is None:
            return
        timed(track, session.replica, "collect", Phase.PUSH, "collect gradients")
        timed(track, session.replica, "writes", Phase.PUSH, "look for written parameters")
        timed(track, session.replica, "refresh", Phase.PULL)
        for owner, method, name in client.steps.maker.timed():
            timed(track, owner, method, Phase.UPDATE, name)
        timed(track, session.guard, "accepts", Phase.PUSH, "are gradients finite")
        self._watch_steps(track, session)
        follow(session, "_install_optimizers", lambda: self._watch_steps(track, session))

    def _watch_steps(self, track: Track, session: Any) -> None:
        for step in session.steps:
            for phase, owner, method, name in step.timed():
                timed(track, owner, method, phase, name)

    def leave(self, parts: Path | None = None, worker: int = 0) -> None:
        """Write this worker's measurements."""
        place = parts or self._parts
        if self._track is None or place is None:
            return
        self._track.rename(f"worker {worker}")
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{worker}.json").write_text(json.dumps(self._track.packed()))
        except OSError as error:  # a profile must not fail the run
            to_stderr(f"no profile of worker {worker} ({error.strerror})")
        self._track = None


def share_of(limit: int, n_workers: int) -> int:
    """The number of spans for each worker and the server."""
    return max(1, limit // (n_workers + 1))


# ---- in the calling process ---------------------------------------------------------------------


@contextmanager
def profiled(trainer: Any, server: Any, n_workers: int) -> Iterator[None]:
    """Around a run: if a profile is wanted, measure the server, and at the end write the files.

    Raises:
        UserError: if the folder cannot be written.
    """
    profiler = trainer.profiler
    if not isinstance(profiler, StepProfiler) or trainer.state.fn != "fit":
        yield
        return
    folder = Path(profiler.dirpath or trainer.default_root_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        parts = Path(tempfile.mkdtemp(prefix=_PARTS, dir=folder))
    except OSError as error:
        raise UserError(
            f"the profile cannot be written to {folder} ({error.strerror}); choose another dirpath"
        ) from error
    watch = ServerWatch(server, share_of(profiler.limit, n_workers))
    with removed_in_the_end(parts):
        try:
            with temporarily(profiler, _parts=parts):
                yield
        finally:
            hosts = server.statistics.stats().get("hosts", ())
            conclude(profiler, folder, parts, n_workers, watch.tracks, hosts)


def conclude(
    profiler: StepProfiler,
    folder: Path,
    parts: Path,
    n_workers: int,
    server: Sequence[Track] = (),
    hosts: Sequence[Mapping[str, float]] = (),
) -> None:
    """Write the files and print the table, if there are measurements."""
    found = {int(p.stem): Track.unpacked(json.loads(p.read_text())) for p in parts.glob("*.json")}
    shutil.rmtree(parts, ignore_errors=True)
    workers = {worker: track for worker, track in found.items() if track.n_steps}
    if not workers:
        return
    for track in server:
        track.end_open()
    report = Report(workers, server, n_workers, hosts)
    written: Path | None = folder
    try:
        report.write(folder)
    except OSError as error:
        to_stderr(f"no files of the profile in {folder} ({error.strerror})")
        written = None
    if not profiler.quiet:
        report.show(Console(), written)


def watch_worker(
    trainer: Any, client: Client, strategy: Strategy, session: Callable[[], object]
) -> None:
    """In a worker, at the start of a run; see :meth:`StepProfiler.watch`."""
    if isinstance(trainer.profiler, StepProfiler):
        trainer.profiler.watch(trainer, client, strategy, session)


def leave_profile(trainer: Any, worker: int) -> None:
    """In a worker, at its end."""
    if isinstance(trainer.profiler, StepProfiler):
        trainer.profiler.leave(worker=worker)
