"""A run in which workers are killed or raise at random moments, and perhaps a signal ends it.

Each sample has a coordinate of its own, which moves by 1 whenever the sample is in an update,
whatever the weight, so parameters say which samples are behind them.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.recovery import failure_policy
from hybridtrain.engine.recovery.failure_policy import Replace
from hybridtrain.engine.recovery.roster import LAST, THERE, Roster
from hybridtrain.engine.server.rounds import Rounds
from hybridtrain.util.files import interrupted_in
from trials import work
from trials.apart import Ending, members, run_apart
from trials.tap import Tap, tapped

WORKERS, SAMPLES, BATCH, EPOCHS = 3, 96, 4, 3
GRACE_S, LIMIT_S, PROMPT_S = 20.0, 60.0, 8.0  # the last under the load of others
HOOKS = ("start", "end", "validation", "save")


@dataclass(frozen=True)
class Plan:
    """A schedule of faults: each of ``blows`` has seconds after the one before, kind and worker."""

    policy: str
    blows: tuple[tuple[float, str, int], ...]
    step_s: float
    after_s: float  # a callback takes so long after each mini-batch
    max_restarts: int | None
    back_off_s: float
    looks: bool  # at gradients before a step, so that all wait for their mean
    on_failure: str = "restart"
    alone: bool = False  # workers make updates without the server, which is only told

    @property
    def samples(self) -> int:
        """The samples of an epoch."""
        return 8 * SAMPLES if self.alone else SAMPLES

    @property
    def workers(self) -> int:
        """More where each may be lost."""
        return 2 * WORKERS if self.alone and self.on_failure == "continue" else WORKERS


def drawn(policy: str, seed: int) -> Plan:
    """The same for the same seed."""
    rng = random.Random(f"{policy} {seed}")
    kinds = ["kill"] * 4 + ["raise"] * 2
    blows = [
        (rng.choice([0.0, 0.01, 0.1, 0.3, 0.6, 0.9]), rng.choice(kinds), rng.choice([1, 1, 2, 3]))
        for _ in range(rng.randint(1, 4))
    ]
    if rng.random() < 0.4:
        blows.append((rng.random() * 1.5, rng.choice(["SIGINT", "SIGTERM"]), 1))
    slow = rng.choice([0.0, 0.0, 0.3])
    most = rng.choice([None, None, 8, 2])
    step_s = rng.choice([0.01, 0.05, 0.2])
    return Plan(policy, tuple(blows), step_s, slow, most, 0.3, rng.random() < 0.5)


def drawn_alone(policy: str, seed: int, on_failure: str) -> Plan:
    """Kills only, while workers compute nothing but updates; one worker is left in any case."""
    rng = random.Random(f"{policy} {seed} {on_failure}")
    most = 2 * WORKERS - 1 if on_failure == "continue" else 12
    blows = [(rng.random() / 2, "kill", 1) for _ in range(most)]
    return Plan(policy, tuple(blows), 0.0, 0.0, None, 0.1, False, on_failure, True)


@dataclass
class Seen:
    """The outcome of a schedule."""

    plan: Plan
    outcome: str = "hung"
    error: str = ""
    interrupted_by: int | None = None
    announced: int = 0
    struck: int = 0
    started: int = 0
    called_off: int = 0
    missing: int = 0
    twice: int = 0
    updates: int = 0
    saved_at: int | None = None  # the version of the last checkpoint
    torn: bool = False
    stopped_s: float | None = None  # from the signal to the end
    nobody: bool = False  # the last blow has hit all who were there, or who knew where training is
    output: str = ""
    left: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """List the faults of the outcome."""
        found = list(self.left)
        if self.outcome in ("hung", "crashed"):
            found.append(self.outcome)
        if self.outcome == "finished":
            last = self.saved_at == self.updates
            if not last and self.plan.on_failure != "continue":  # no other one writes it, there
                found.append(f"the last checkpoint is of {self.saved_at}")
            found += [f"{self.missing} missing"] * bool(self.missing)
            if self.announced > self.started + self.called_off:
                found.append(f"{self.announced} restarts announced, {self.started} made")
        if self.outcome == "ended" and "The run ends, because" not in self.error:
            found.append(f"no reason: {self.error}")
        could = self.updates > 1 and not self.nobody
        if self.outcome in ("ended", "interrupted") and self.saved_at is None and could:
            found.append(f"no checkpoint after {self.updates} updates")
        found += [f"{self.twice} twice"] * bool(self.twice) + ["torn checkpoint"] * self.torn
        if self.stopped_s is not None and self.stopped_s > PROMPT_S:
            found.append(f"{self.stopped_s:.0f} s to stop")
        return found


class Count(pl.LightningModule):
    """Adds to the coordinates of the samples of each mini-batch."""

    def __init__(self, diary: torch.Tensor, step_s: float, samples: int = SAMPLES) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(samples))
        self.diary, self.step_s = diary, step_s

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        page = self.diary[self.global_rank]
        page[1 : 1 + len(ids)] = ids
        page[0] = len(ids)
        if self.step_s:
            time.sleep(self.step_s)
        return -self.counts[ids].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.step_s)
        self.log("n", float(len(batch[0])), sync_dist=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1.0, betas=(0.0, 0.0))


class Looking(Count):
    """The same, but every worker needs the mean of all gradients before it pushes."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class Fragile(pl.Callback):
    """Raises where it is asked to, and takes its time."""

    def __init__(self, folder: Path, after_s: float, where: str) -> None:
        self.folder, self.after_s, self.where = folder, after_s, where

    def _come(self, where: str, pid: int) -> None:
        mark = self.folder / f".raise-{pid}"
        if where == self.where and mark.exists():
            mark.unlink()
            raise RuntimeError(f"on purpose, in {where}")

    def on_train_batch_start(self, *_: Any) -> None:
        self._come("start", os.getpid())

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.after_s)
        self._come("end", os.getpid())

    def on_validation_start(self, *_: Any) -> None:
        self._come("validation", os.getpid())

    def on_save_checkpoint(self, *_: Any) -> None:
        self._come("save", os.getpid())


def try_schedule(policy: str, seed: int) -> Seen:
    """One run, in processes of its own."""
    return try_plan(drawn(policy, seed), seed)


def try_plan(plan: Plan, seed: int) -> Seen:
    """The same, of this plan."""
    hand = _Hand(plan, random.Random(seed))
    limit_s = 4 * LIMIT_S if plan.alone else LIMIT_S
    ending = run_apart(lambda folder: _trial(plan, seed, folder), limit_s, hand, _forget_marks)
    seen: Seen = ending.result or _without_result(plan, ending)
    seen.left = [name for name in ending.left if ".raise-" not in name]
    seen.struck = hand.struck
    seen.output, seen.nobody = ending.output[-6000:], seen.nobody or hand.nobody
    if seen.outcome == "interrupted" and hand.signalled_s is not None:
        seen.stopped_s = time.monotonic() - hand.signalled_s
    return seen


def _forget_marks(folder: Path) -> None:
    for mark in folder.glob(".raise-*"):
        mark.unlink()


def _without_result(plan: Plan, ending: Ending) -> Seen:
    last = ending.output.strip().splitlines()[-1:] or [""]
    return Seen(plan, "hung" if ending.status is None else "crashed", last[0])


class _Hand:
    """Deals the blows, from outside."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self._blows, self._rng = list(plan.blows), rng
        # Where one is hit after the other, who was hit before comes back first.
        self._least = plan.workers if plan.alone and plan.on_failure == "restart" else 0
        self._next_s: float | None = None
        self.signalled_s: float | None = None
        self.struck = 0  # workers that were killed
        self.nobody = False

    def __call__(self, session: int, folder: Path) -> bool:
        now_s = time.monotonic()
        if self._next_s is None:
            if (folder / "begun").exists() and self._blows:
                self._next_s = now_s + self._blows[0][0]
        elif self._blows and now_s >= self._next_s:
            if len(members(session)) - 1 < self._least:
                self._next_s = now_s + self._blows[0][0]
                return True
            _, kind, n = self._blows.pop(0)
            self._strike(session, folder, kind, n)
            self._next_s = now_s + (self._blows[0][0] if self._blows else 0.0)
        return True

    def _strike(self, session: int, folder: Path, kind: str, n: int) -> None:
        if kind.startswith("SIG"):
            with suppress(ProcessLookupError):
                os.kill(session, signal.Signals[kind])
                self.signalled_s = time.monotonic()
            return
        there = sorted(set(members(session)) - {session})
        self.nobody = kind == "kill" and n >= len(there)
        for pid in self._rng.sample(there, min(n, len(there))):
            if kind == "kill":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.struck += 1
            else:
                (folder / f".raise-{pid}").touch()


# ---- the trial's process ------------------------------------------------------------------------


def _trial(plan: Plan, seed: int, folder: Path) -> Seen:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failure_policy._FIRST_DELAY_S, failure_policy._LONGEST_DELAY_S = plan.back_off_s, 1.0
    seen, diary = Seen(plan), work.blank_diary(plan.workers)
    tap = None if plan.alone else tapped(plan.policy == "hybrid", diary, keeps=False)
    states = _listen(seen, folder, tap)
    most = {"max_restarts": plan.max_restarts} if plan.on_failure == "restart" else {}
    strategy: Any = HybridStrategy(
        plan.policy, on_failure=plan.on_failure, stop_grace_s=GRACE_S, **most
    )
    counts: torch.Tensor | None = None
    try:
        counts = _fit(strategy, plan, seed, folder, diary)
        seen.outcome = "finished"
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        seen.outcome, seen.error = "ended", f"{type(error).__name__}: {error} {notes}"[-2000:]
        if strategy.interrupted_by is not None:
            seen.outcome, seen.interrupted_by = "interrupted", strategy.interrupted_by
    if tap is not None:
        _judge(seen, tap, states, folder)
    elif counts is not None:
        _judge_counts(seen, counts, strategy.run_stats(), folder)
    return seen


def _fit(strategy: Any, plan: Plan, seed: int, folder: Path, diary: torch.Tensor) -> torch.Tensor:
    """How often each sample is in an update."""
    where = random.Random(seed).choice(HOOKS)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=plan.workers,
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[
            ModelCheckpoint(folder, filename="any", monitor=None),
            Fragile(folder, plan.after_s, where),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = TensorDataset(torch.arange(plan.samples))
    training = DataLoader(data, BATCH, shuffle=True)
    kind = Looking if plan.looks else Count
    module = kind(diary, plan.step_s, plan.samples)
    trainer.fit(module, training, DataLoader(data, plan.samples // 6))
    return module.counts.detach()


def _listen(seen: Seen, folder: Path, tap: Tap | None) -> list[torch.Tensor]:
    """The parameters after every update; which restarts are announced, and which are made."""
    states: list[torch.Tensor] = []
    rounds: Any = Rounds
    roster: Any = Roster
    apply, failed, started, advance = rounds._apply, roster.failed, roster.started, roster.advance

    def applying(self: Any, workers: tuple[int, ...]) -> None:
        (slot,) = self.store.layout.slots
        if not states:
            states.append(self.store.master(slot).clone())
            (folder / "begun").touch()
        before = self._statistics.version
        apply(self, workers)
        if self._statistics.version > before:
            states.append(self.store.master(slot).clone())

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        verdict = failed(self, *args, **kwargs)
        seen.nobody = not (self.kept or self.those(*THERE, *LAST))
        seen.announced += isinstance(verdict, Replace)
        if isinstance(verdict, Replace) and verdict.anew:  # what has been trained is forgotten
            seen.announced = seen.started + seen.called_off
            states.clear()
            if tap is not None:
                tap.count.clear()
        return verdict

    def starting(self: Any, worker: int) -> None:
        seen.started += 1
        started(self, worker)

    def advancing(self: Any, *args: Any) -> Any:
        acts = advance(self, *args)
        seen.called_off += sum("is not restarted" in getattr(act, "text", "") for act in acts)
        return acts

    rounds._apply = applying
    roster.failed, roster.started, roster.advance = failing, starting, advancing
    return states


def _judge(seen: Seen, tap: Tap, states: list[torch.Tensor], folder: Path) -> None:
    wanted = Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    used = tap.used()
    seen.missing, seen.twice = (wanted - used).total(), (used - wanted).total()
    seen.updates = max(0, len(states) - 1)
    interrupted = interrupted_in(folder)
    for path in (*folder.glob("*.ckpt"), *interrupted.parent.glob(interrupted.name)):
        checkpoint = torch.load(path, weights_only=True)
        step, made = checkpoint["global_step"], checkpoint["state_dict"]["counts"]
        seen.torn |= not (step < len(states) and torch.equal(made, states[step]))
        if seen.outcome == "finished" or path == interrupted:
            seen.saved_at = max(step, seen.saved_at or 0)


def _judge_counts(seen: Seen, counts: torch.Tensor, stats: dict[str, Any], folder: Path) -> None:
    """Nobody has seen each update: parameters, the run's own figures and the checkpoint say it."""
    used, wanted = counts.round(), torch.full_like(counts, EPOCHS)
    more = int(stats["samples"]) - int(wanted.sum())
    if seen.plan.policy == "hogwild":  # what was stepped and not counted is done again
        seen.missing, seen.twice = max(0, -more), max(0, more)
    else:
        seen.torn = not torch.allclose(counts, used, atol=1e-3)
        seen.missing = int((wanted - used).clamp(min=0).sum())
        seen.twice = int((used - wanted).clamp(min=0).sum()) + abs(more)
    seen.updates = int(stats["updates"])
    (path,) = folder.glob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    seen.saved_at = checkpoint["global_step"]
    made = checkpoint["state_dict"]["counts"]
    at_end = seen.saved_at == seen.updates
    seen.torn |= not torch.equal(made, counts if at_end else made.round())
