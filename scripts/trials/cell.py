"""One cell of the fault matrix: a run in which one thing goes wrong, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybridtrain.engine.faults import KINDS, PHASES
from hybridtrain.engine.updates.flat import flat_update
from hybridtrain.engine.updates.kernels.kernel import Kernel
from trials import work
from trials.apart import Ending, run_apart
from trials.tap import Tap, farthest, same, state_in, tapped

POLICIES = ("stop", "continue", "restart")
STEP = 3  # of the worker that fails, of about 8 in an epoch
TOGETHER = [(k, p) for k in ("kill", "exception") for p in ("compute", "push", "validation")]
RARE = ("validation", "checkpoint", "teardown")  # in hooks, where an epoch or the run ends
SIZE = work.Size(step_s=0.005)  # or a worker that runs freely might make no step at all
HANG_S, GRACE_S, LIMIT_S = 5.0, 10.0, 90.0
CLOSE = 1e-4  # float32, after some tens of updates; one update more or less is a hundred times that

States = list[dict[str, list[torch.Tensor]]]


@dataclass(frozen=True)
class Case:
    """A case to try. Without a kind: nothing goes wrong."""

    strategy: str
    policy: str = "stop"
    kind: str = ""
    phase: str = ""
    worker: int = 1
    at_once: int = 1  # so many workers, this one and those behind it, in the same step of each

    @property
    def workers(self) -> list[int]:
        """Whom it happens to."""
        return sorted((self.worker + n) % SIZE.workers for n in range(self.at_once))


@dataclass
class Row:
    """The outcome of a case."""

    case: Case
    outcome: str = "hung"
    error: str = ""
    detected_s: float | None = None
    wall_s: float = 0.0
    updates: int = 0
    lost: int = 0  # samples that should have been in an update and were not
    doubled: int = 0  # samples that were in one more often than once in an epoch
    left: list[str] = field(default_factory=list)
    checkpoints: int = 0
    torn: int = 0  # checkpoints that are not the state of one completed update
    difference: float | None = None  # from plain torch with the same mini-batches
    as_undisturbed: bool | None = None  # to the bit, update for update, as far as it went
    home: bool | None = None  # the module came home as the last update has left it

    @property
    def complaints(self) -> list[str]:
        """List the faults of the outcome."""
        found = list(self.left)
        if self.outcome in ("hung", "crashed", "never came"):
            found.append(self.outcome)
        if self.outcome == "stopped" and not self.checkpoints:
            found.append("no checkpoint")
        if self.torn:
            found.append(f"{self.torn} torn checkpoints")
        if self.doubled:
            found.append(f"{self.doubled} samples twice")
        if self.lost and self.case.kind != "nan":
            found.append(f"{self.lost} samples lost")
        far = self.difference is not None and not self.difference < CLOSE
        if far and self.case.kind != "corrupt_gradient":
            found.append(f"{self.difference:.1e} from plain torch")
        if self.home is False:
            found.append("other parameters came home")
        if self._should_be_undisturbed and self.as_undisturbed is False:
            found.append("other bits than the undisturbed run")
        return found

    @property
    def _should_be_undisturbed(self) -> bool:
        """Return whether the case must end with the bits of an undisturbed run, as in lock-step.

        A hook that a fault interrupts is repeated, and may draw other random numbers.
        """
        ended = self.case.policy in ("stop", "restart") and self.case.phase not in RARE
        harmless = self.case.kind in ("", "slow") or ended
        return self.case.strategy == "hybrid" and harmless and not self._poisons

    @property
    def _poisons(self) -> bool:
        left_out = self.case.kind == "nan" and self.case.policy != "stop"
        return left_out or self.case.kind == "corrupt_gradient"


def cases(
    strategies: Sequence[str], policies: Sequence[str], at_once: Sequence[int] = (1,)
) -> list[Case]:
    """All of them: in worker 1, or 0, which writes checkpoints; under ``stop`` in both.

    ``at_once``: in so many workers; in several what ends them, in a step or an evaluation.
    """
    return [
        Case(strategy, policy, kind, phase, worker, n)
        for strategy in strategies
        for policy in policies
        for n in at_once
        for kind, phases in KINDS.items()
        for phase in PHASES
        if phase in phases and (n == 1 or (kind, phase) in TOGETHER)
        if (strategy, phase) != ("hogwild", "update")  # there workers make updates themselves
        for worker in (_whom(policy, phase) if n == 1 else (1,))
    ]


def _whom(policy: str, phase: str) -> tuple[int, ...]:
    if phase == "checkpoint":
        return (0,)
    return (1, 0) if policy == "stop" else (1,)


def try_out(case: Case, undisturbed: States | None = None, limit_s: float = LIMIT_S) -> Row:
    """Run it, in processes of its own."""
    ending = run_apart(lambda folder: _trial(case, undisturbed, folder), limit_s)
    row = ending.result[0] if ending.result else _without_result(case, ending)
    row.left, row.wall_s = ending.left, round(ending.wall_s, 2)
    return row


def undisturbed_states(strategy: str) -> States:
    """After every update of a run in which nothing goes wrong."""
    ending = run_apart(lambda folder: _trial(Case(strategy), None, folder), LIMIT_S)
    assert ending.result is not None, ending.output
    row, states = ending.result
    assert row.outcome == "finished", f"{row} {ending.output}"
    made: States = states
    return made


def _without_result(case: Case, ending: Ending) -> Row:
    last = ending.output.strip().splitlines()[-1:] or [""]
    return Row(case, "hung" if ending.status is None else "crashed", last[0])


def _trial(case: Case, undisturbed: States | None, folder: Path) -> tuple[Row, States]:
    in_small_chunks()
    tap: list[Tap] = []
    error = _run(case, folder, tap)
    observed = work.OBSERVED[-1]
    row = Row(case)
    _judge_outcome(row, tap[0], error, observed.strategy.run_stats())
    _judge_samples(row, tap[0], error)
    if case.strategy == "hogwild":
        _judge_count(row, error, observed.strategy.run_stats())
    _judge_states(row, tap[0], folder, undisturbed)
    if error is None and tap[0].states:
        home = [p.detach() for p in observed.module.net.parameters()]
        row.home = same({"p": home}, {"p": tap[0].states[-1]["parameters"]})
    return row, tap[0].states


def in_small_chunks() -> None:
    """So that there is a middle of an update."""
    torch.set_num_threads(1)
    flat_update._ALONE, Kernel.chunk = 0, 64


def _run(case: Case, folder: Path, taps: list[Tap]) -> BaseException | None:
    options: dict[str, Any] = {"on_failure": case.policy, "checkpoint": "background"}
    options |= {"stop_grace_s": GRACE_S, "hang_timeout_s": HANG_S}
    if case.kind:
        step = 0 if case.phase in RARE else STEP
        fault = {"kind": case.kind, "step": step, "phase": case.phase}
        options["faults"] = [fault | {"worker": worker} for worker in case.workers]
    if case.kind == "nan" and case.policy != "stop":
        options["on_nonfinite"] = "drop"
    readers = 1 if case.kind == "lose_data_loader" else 0
    keeps = case.strategy != "hogwild"  # where what was counted is not yet what was stepped
    lockstep = case.strategy == "hybrid"
    work.LISTENERS.append(lambda diary: taps.append(tapped(lockstep, diary, keeps)))
    try:
        work.train(case.strategy, SIZE, folder, readers, **options)
    except BaseException as error:
        return error
    return None


def _judge_outcome(row: Row, tap: Tap, error: BaseException | None, stats: dict[str, Any]) -> None:
    happened = stats.get("faults", [])
    row.error = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
    if row.case.kind and not happened:
        row.outcome = "never came"
    elif error is not None:
        row.outcome = "stopped"
    else:
        verdict = tap.verdicts[0] if tap.verdicts else ""
        row.outcome = {"GoOn": "went on", "Replace": "restarted"}.get(verdict, "finished")
    if happened:
        later = [at - happened[0]["last_s"] for at in tap.noticed_s]
        later = [seconds for seconds in later if seconds >= 0]
        row.detected_s = round(min(later), 4) if later else None
    row.updates = len(tap.parts)


def _judge_samples(row: Row, tap: Tap, error: BaseException | None) -> None:
    used = tap.used()
    row.doubled = sum((used - Counter(dict.fromkeys(range(SIZE.samples), SIZE.epochs))).values())
    if error is None:
        row.lost = sum((Counter(dict.fromkeys(range(SIZE.samples), SIZE.epochs)) - used).values())


def _judge_count(row: Row, error: BaseException | None, stats: dict[str, Any]) -> None:
    """Judge lost and doubled samples by the run's own count, which knows of repeated steps."""
    more = int(stats.get("samples", 0)) - SIZE.samples * SIZE.epochs
    row.doubled, row.updates = max(0, more), int(stats.get("updates", 0))
    row.lost = max(0, -more) if error is None else 0


def _judge_states(row: Row, tap: Tap, folder: Path, undisturbed: States | None) -> None:
    row.difference = farthest(tap, SIZE.samples) if tap.states else None
    if undisturbed is not None and row.case.strategy == "hybrid":
        pairs = zip(tap.states, undisturbed, strict=False)
        row.as_undisturbed = all(same(mine, theirs) for mine, theirs in pairs)
        if not row.error:
            row.as_undisturbed &= len(tap.states) == len(undisturbed)
    for path in folder.rglob("*.ckpt"):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state, step = state_in(checkpoint), checkpoint["global_step"]
        row.checkpoints += 1
        known = not tap.keeps or (step < len(tap.states) and same(state, tap.states[step]))
        row.torn += not known
