"""Trainings: done again, replayed from an old record, gone on with from an old directory."""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from goldens.calls import call
from goldens.case import Case, Findings

STRATEGIES: dict[str, tuple[str, ...]] = {
    "synchronous": ("strategy=synchronous",),
    "hybrid": ("strategy=hybrid",),
    "backup": ("strategy=backup",),
    "backup_auto": ("strategy=backup", "strategy.policy.k=auto"),
    "k_async": ("strategy=k_async",),
    "k_batch_sync": ("strategy=k_batch_sync",),
    "k_batch_async": ("strategy=k_batch_async",),
    "softsync": ("strategy=softsync",),
    "ssp": ("strategy=ssp", "strategy.policy.lead=1"),
    "async": ("strategy=async",),
    "async_dc_asgd": ("strategy=async", "strategy.correction=dc_asgd_adaptive"),
    "switch": ("strategy=switch", "strategy.policy.at_update=8"),
    "hogwild": ("strategy=hogwild",),
}
LOCKSTEP = ("synchronous", "hybrid")
# Limits that equal hybrid.
LIMITS = {
    "ssp_lead_0": ("strategy=ssp", "strategy.policy.lead=0"),
    "backup_k_2": ("strategy=backup", "strategy.policy.k=2"),
    "k_async_k_2": ("strategy=k_async", "strategy.policy.k=2"),
    "hybrid_bf16": ("strategy=hybrid", "strategy.transport_dtype=bf16"),
    "hybrid_uneven": ("strategy=hybrid", "strategy.batch_size_per_worker=[40,20]"),
}
_WORDS = ("data._target_=goldens.tasks.Words", "trainer.max_epochs=3")
TASKS: dict[str, tuple[str, ...]] = {
    "digits": ("task=digits", "trainer.max_epochs=2"),
    "parabola": (
        *("task=parabola", "trainer.max_epochs=30", "callbacks.checkpoint.every_n_epochs=15"),
    ),
    "transformer": (
        "model._target_=goldens.tasks.Transformer",
        *_WORDS,
        "trainer.gradient_clip_val=0.5",
    ),
    "batch_norm": ("model._target_=goldens.tasks.Normed", *_WORDS),
    "sparse": ("model._target_=goldens.tasks.Sparse", *_WORDS),
}
COMMON = (
    *("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "logger=csv"),
    *("trainer.log_every_n_steps=1", "strategy.threads_per_worker=1"),
)
RUN = "run"


def cases() -> Iterator[Case]:
    """All of this file."""
    for task in TASKS:
        for strategy in LOCKSTEP:
            yield bits(strategy, STRATEGIES[strategy], task, 2)
        yield bits("hogwild", STRATEGIES["hogwild"], task, 1)
    yield bits("async", STRATEGIES["async"], "digits", 1)
    for strategy, options in LIMITS.items():
        yield bits(strategy, options, "digits", 2)
    for task in TASKS:
        for strategy in STRATEGIES:
            if strategy != "hogwild":
                yield replayed(strategy, task)
    for strategy, task, workers in RESUMED:
        yield resumed(strategy, task, workers)
    for task in ("digits", "transformer"):
        yield from_checkpoint(task)


def command(options: Sequence[str], task: str, workers: int, run_dir: str = RUN) -> list[str]:
    """Return the arguments for ``python -m hybridtrain``."""
    return [
        *TASKS[task],
        *options,
        *COMMON,
        f"trainer.devices={workers}",
        f"hydra.run.dir={run_dir}",
    ]


# ---- to the bit ----------------------------------------------------------------------------------


def bits(strategy: str, options: Sequence[str], task: str, workers: int) -> Case:
    """A run whose every number is determined."""

    def look(kept: Path, folder: Path) -> Findings:
        said = call("hybridtrain", *command(options, task, workers), folder=folder)
        return said.well | (state(folder / RUN) if said.status == 0 else {})

    return Case("bits", f"{strategy}, {workers} workers", task, look)


def state(run: Path) -> Findings:
    """Losses step by step, and what training has come to."""
    checkpoint = torch.load(newest(run), weights_only=True)
    return {
        "global_step": checkpoint["global_step"],
        "losses": losses(run / "csv" / "metrics.csv"),
        "parameters and buffers": dict(checkpoint["state_dict"]),
        "optimizers": checkpoint["optimizer_states"],
        "schedulers": checkpoint["lr_schedulers"],
        "loops": checkpoint["loops"],
        "dice": checkpoint["hybridtrain"].get("dice"),
        "metrics": json.loads((run / "summary.json").read_text())["metrics"],
    }


def newest(run: Path) -> Path:
    """In a directory that was moved Lightning writes ``last-v1.ckpt`` beside ``last.ckpt``."""
    return max((run / "checkpoints").glob("last*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def losses(path: Path) -> list[dict[str, float]]:
    """Read the values that the module has logged, and learning rates."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    own = ("train/", "val/", "test/", "lr-", "step")
    kept = [{k: float(v) for k, v in row.items() if v and k.startswith(own)} for row in rows]
    return [row for row in kept if len(row) > 1]


# ---- replays of an old record --------------------------------------------------------------------


def replayed(strategy: str, task: str) -> Case:
    """The record of a run by the old code, played by the new."""

    def make(kept: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            line = command(STRATEGIES[strategy], task, 2)
            succeed(call("hybridtrain", *line, folder=Path(folder)), line)
            shutil.copy(Path(folder, RUN, "record.bin"), kept)

    def look(kept: Path, folder: Path) -> Findings:
        arguments = (f"run={kept / 'record.bin'}", "anyway=true")
        said = call("hybridtrain", "replay", *arguments, folder=folder)
        lines = [line for line in said.out.splitlines() if not line.startswith("record ")]
        return said.well | {"said": lines, "empty": not list(folder.iterdir())}

    return Case("replay", strategy, task, look, make)


def succeed(said: Any, line: Sequence[str], status: int = 0) -> None:
    """Nothing can be recorded of what fails.

    Raises:
        RuntimeError: with what was said.
    """
    if said.status != status:
        raise RuntimeError(f"{' '.join(line)}: status {said.status}\n{said.out}\n{said.err}")


# ---- old directories and checkpoints -------------------------------------------------------------

ALL_KILLED = ("synchronous", "switch")  # else one worker, and the others leave interrupted.ckpt
RESUMED = (
    *(("hybrid", task, 2) for task in TASKS if task != "parabola"),
    ("synchronous", "digits", 2),
    ("synchronous", "transformer", 2),
    ("async", "digits", 1),
    ("hogwild", "sparse", 1),
    ("async", "digits", 2),
    ("switch", "transformer", 2),
)


def resumed(strategy: str, task: str, workers: int) -> Case:
    """A run of the old code that was killed in mid-epoch goes on in its directory."""
    options = (*STRATEGIES[strategy], "callbacks.periodic.every_updates=7")
    free = workers > 1 and strategy not in LOCKSTEP

    def make(kept: Path) -> None:
        line = command(options, task, workers)
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            succeed(call("hybridtrain", *line, folder=Path(folder)), line)
            torch.save(finals(Path(folder, RUN)), kept / "uninterrupted.pt")
        fault = f"{{worker: {workers - 1}, step: 17, kind: kill}}"
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            line.append(f"faults=[{fault}]")
            succeed(call("hybridtrain", *line, folder=Path(folder)), line, 1)
            shutil.copytree(Path(folder, RUN), kept / RUN)
            if strategy in ALL_KILLED:
                (kept / RUN / "interrupted.ckpt").unlink()

    def look(kept: Path, folder: Path) -> Findings:
        shutil.copytree(kept / RUN, folder / RUN)
        said = call("hybridtrain", f"resume={RUN}", folder=folder)
        if said.status:
            return said.well
        now = finals(folder / RUN)
        if free:
            return said.well | {"keys": keys_of(now), "first line": said.out.splitlines()[0]}
        then = torch.load(kept / "uninterrupted.pt", weights_only=True)
        from goldens.difference import differences

        parted = [each.path for each in differences(then, now)]
        return said.well | now | {"differs from the uninterrupted run": parted}

    return Case("resume", f"{strategy}, {workers} workers", task, look, make)


def finals(run: Path) -> Findings:
    """Return the part of a state that must not depend on an interruption."""
    names = ("global_step", "parameters and buffers", "optimizers", "schedulers")
    found = state(run)
    return {name: found[name] for name in names}


def keys_of(value: Any) -> Any:
    """The same without what it is."""
    match value:
        case dict():
            names = {key: "a path" if str(key).endswith(".ckpt") else str(key) for key in value}
            return {names[key]: keys_of(each) for key, each in value.items()}
        case list() | tuple():
            return [keys_of(value[0])] if value else []
    return type(value).__name__


def from_checkpoint(task: str) -> Case:
    """An old checkpoint is tested, and begun from by another number of workers."""

    def make(kept: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            line = command(STRATEGIES["hybrid"], task, 2)
            succeed(call("hybridtrain", *line, folder=Path(folder)), line)
            shutil.copy(Path(folder, RUN, "checkpoints", "last.ckpt"), kept)

    def look(kept: Path, folder: Path) -> Findings:
        found: Findings = {}
        begin = partial(command, STRATEGIES["synchronous"], task, 1)
        ckpt = f"ckpt={kept / 'last.ckpt'}"
        if task == "digits":
            said = call("hybridtrain", *begin("tested"), ckpt, "test_only=true", folder=folder)
            found["tested"] = said.well | metrics(folder / "tested")
        said = call("hybridtrain", *begin("on"), ckpt, "trainer.max_epochs=4", folder=folder)
        found["gone on with"] = said.well | (state(folder / "on") if not said.status else {})
        return found

    return Case("checkpoint", "hybrid", task, look, make)


def metrics(run: Path) -> Findings:
    """Read the metrics of the summary."""
    path = run / "summary.json"
    return json.loads(path.read_text())["metrics"] if path.is_file() else {}
