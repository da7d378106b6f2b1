"""The summary of a run: printed lines, and ``summary.json`` for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
import torch

from hybridtrain.cli.config_values import resuming
from hybridtrain.cli.exit_status import FAILED
from hybridtrain.cli.telemetry.monitor import STATS_FILE, VALIDATED, RunMonitor, RunStats
from hybridtrain.engine.monitoring.watchdog import Slow, slow_worker, to_stderr
from hybridtrain.lightning.run_context import checkpoints_of
from hybridtrain.report.runs import SUMMARY_FILE, as_json, distinct, with_floats
from hybridtrain.util.files import read_text, short, write_whole
from hybridtrain.util.option_types import is_target
from hybridtrain.util.own_parts import TARGET
from hybridtrain.virtual.advice import Advice

# ---- the checkpoint and metrics that stand for a run --------------------------------------------
# All metrics are of one model, that of the best checkpoint by ``task.monitor``; without a monitor
# or a checkpoint, the model at the end of training. Validation metrics are those of the last
# validation before that checkpoint was written, which
# :class:`hybridtrain.cli.telemetry.monitor.RunMonitor` stores in every checkpoint; if it is missing
# there, those of the last validation. Training metrics are the last that were logged.


def best_checkpoint(trainer: pl.Trainer) -> str | None:
    """Path of the best checkpoint: of a callback that monitors a metric, or else of any."""
    found = sorted(checkpoints_of(trainer), key=lambda x: x.monitor is None)
    paths = [x.best_model_path for x in found]
    return next((path for path in paths if path and Path(path).is_file()), None)


def logged(trainer: pl.Trainer) -> dict[str, float]:
    """The last values logged by module and callbacks, without learning rates."""
    found = trainer.callback_metrics.items()
    return {name: float(value) for name, value in found if not name.startswith("lr-")}


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    """The metrics of a training that has ended (see the module's docstring)."""
    best = best_checkpoint(trainer)
    if best is None:
        return logged(trainer)
    return logged(trainer) | _scores(trainer, best) | validated(best)


def has_validated(trainer: pl.Trainer) -> bool:
    """Whether a training that has ended ran a validation.

    Ranks forked by Lightning do not return the loops' counters; their checkpoints have the metrics.
    """
    if trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready:
        return True
    best = best_checkpoint(trainer)
    return best is not None and bool(validated(best))


def _scores(trainer: pl.Trainer, best: str) -> dict[str, float]:
    """The monitored metric of the callback that chose this checkpoint."""
    return {
        each.monitor: float(each.best_model_score)
        for each in checkpoints_of(trainer)
        if each.best_model_path == best
        if each.monitor is not None and each.best_model_score is not None
    }


def validated(path: str) -> dict[str, float]:
    """The metrics of the last validation before a checkpoint of this run was written."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = content["callbacks"][RunMonitor.__qualname__][VALIDATED]
    # Of an older version, damaged, or with a user's own objects.
    except (KeyError, TypeError, OSError, RuntimeError, UnpicklingError):
        return {}
    if not isinstance(found, Mapping):
        return {}
    return {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)}


@dataclass(kw_only=True)
class Summary(RunStats):
    """The content of ``summary.json``: what was counted since this command began, and more.

    ``exit`` is the exit status; 128 + n after signal n.
    """

    strategy: str
    device: str
    wall_s: float = 0.0  # of everything, start-up and test included
    started: str = ""  # date and time
    cores: int = 0  # that this process may use
    cpu_s: float = 0.0  # processor time of this host's workers, validation included
    slow: dict[str, Any] | None = None  # a slow worker that the others wait for
    advice: dict[str, Any] | None = None  # hybridtrain.virtual.advice.Advice
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    unsaved: dict[str, str] = field(default_factory=dict)  # missing checkpoint -> reason
    resumed: str | None = None  # the checkpoint it resumed from; "": there was none
    exit: int = 0
    error: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.samples = round(self.samples)
        slow = slow_worker(vars(self), self.train_s)
        self.slow = None if slow is None else asdict(slow)


def left_stats(directory: Path) -> RunStats | None:
    """Read and remove the numbers that the monitor wrote to the run directory, if any."""
    path = directory / STATS_FILE
    try:
        stats = RunStats(**json.loads(read_text(path, "the file")))
    except (ValueError, TypeError, RecursionError):
        return None
    with suppress(OSError):  # read-only: the next write will report it
        path.unlink(missing_ok=True)
    return stats


def write(summary: Summary, directory: Path) -> None:
    """Write ``summary.json``; if that fails, so does the run, because programs wait for it."""
    try:
        rounded = with_floats(asdict(summary), lambda x: round(x, 4))
        content = {**rounded, "metrics": summary.metrics}
        write_whole(directory / SUMMARY_FILE, as_json(content).encode())
    except OSError as error:
        to_stderr(f"no {SUMMARY_FILE} ({error.strerror})")
        summary.exit = summary.exit or FAILED
        summary.error = summary.error or f"{SUMMARY_FILE} could not be written ({error.strerror})"


def strategy_of(strategy: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    """The strategy's name; with a policy of the user's own, its class."""
    policy = strategy.get("policy")
    return str(policy[TARGET] if is_target(policy) else choices.get("strategy"))


def lines(summary: Summary, directory: Path, tensorboard: bool) -> list[str]:
    """The summary as aligned text."""
    how = {0: "Finished", 129: "Hung up", 130: "Interrupted", 143: "Terminated"}.get(
        summary.exit, "Failed"
    )
    workers = f"{summary.workers} worker{'s' * (summary.workers != 1)}"
    head = (
        f"{how} after {_duration(summary.wall_s)}: {summary.strategy}, {workers}, {summary.device}"
    )
    waiting = ", ".join(f"{100 * x:.1f}" for x in summary.waiting_share)
    rows = [
        ("updates", f"{summary.updates}{_total(summary, 'updates')}"),
        (
            "samples",
            f"{summary.samples}{_total(summary, 'samples')}, {summary.samples_per_s:.4g} a second",
        ),
        ("per update", _effective_batch(summary)),
        ("waiting", f"{waiting} % of the time, worker by worker" if waiting else ""),
        ("slow", str(Slow(**summary.slow)) if summary.slow and not summary.advice else ""),
        ("advice", str(Advice(**summary.advice)) if summary.advice else ""),
        ("staleness", _staleness(summary)),
        ("lead", _lead(summary)),
        ("dropped", _dropped(summary)),
        ("left out", _left_out(summary)),
        ("handed over", _handed_over(summary)),
        *((f"host {n}", _host(each)) for n, each in enumerate(summary.hosts)),
        ("on device", _device_memory(summary)),
        *((name, f"{summary.metrics[name]:.6g}") for name in distinct(summary.metrics)),
        ("checkpoint", short(summary.checkpoint) if summary.checkpoint else "none"),
        ("not saved", "; ".join(f"{short(k)} ({v})" for k, v in summary.unsaved.items())),
        ("resumed", _resumed(summary)),
        ("to go on", _resume_command(summary, directory)),
        ("logs", short(directory)),
    ]
    if tensorboard:
        rows.append(("TensorBoard", f"tensorboard --logdir {shlex.quote(short(directory))}"))
    width = max(len(name) for name, _ in rows)
    return [head, *(f"  {name.ljust(width)}  {text}" for name, text in rows if text)]


def _total(summary: Summary, what: str) -> str:
    """The total of a resumed run since training began; empty for other runs."""
    return f" (in all {summary.total[what]})" if what in summary.total else ""


def _resumed(summary: Summary) -> str:
    if summary.resumed == "":
        return "from the beginning, there was no whole checkpoint"
    return "" if summary.resumed is None else f"from {short(summary.resumed)}"


def _resume_command(summary: Summary, directory: Path) -> str:
    if summary.exit == 0 or summary.checkpoint is None:
        return ""
    return f"python -m hybridtrain {resuming(short(directory))}"


def _effective_batch(summary: Summary) -> str:
    batch = summary.effective_batch
    return "" if batch is None else f"{batch:.4g} samples on average"


def _staleness(summary: Summary) -> str:
    mean, most = summary.staleness.get("mean", 0.0), summary.staleness.get("max", 0)
    if not most:
        return ""
    text = f"{mean:.2f} updates on average, {most:.0f} at most"
    ages = {int(age): n for age, n in summary.staleness.get("histogram", {}).items()}
    return f"{text} ({_shares(ages)})" if ages else text


def _shares(ages: Mapping[int, int], shown: int = 5) -> str:
    """``0: 12 %, 1: 70 %, more: 18 %``."""
    total = sum(ages.values())
    first = sorted(ages)[:shown]
    parts = [(str(age), ages[age]) for age in first]
    if rest := total - sum(ages[age] for age in first):
        parts.append(("more", rest))
    percents = ((name, 100 * n / total) for name, n in parts)
    return ", ".join(f"{name}: {f'{x:.0f}' if x >= 1 else '<1'} %" for name, x in percents)


def _lead(summary: Summary) -> str:
    most = summary.lead.get("max", [])
    if max(most, default=0) < 2:
        return ""
    return f"at most {', '.join(map(str, most))} contributions before the slowest, worker by worker"


def _dropped(summary: Summary) -> str:
    if not sum(summary.dropped):
        return ""
    total, each = sum(summary.dropped), ", ".join(map(str, summary.dropped))
    return f"{total} contribution{'s' * (total != 1)} that did not count, worker by worker {each}"


def _left_out(summary: Summary) -> str:
    kinds = {"nonfinite": "not finite", "oom": "out of memory"}
    return "; ".join(
        f"{sum(each)} contributions {kinds.get(fault, fault)}, "
        f"worker by worker {', '.join(map(str, each))}"
        for fault, each in summary.left_out.items()
    )


def _handed_over(summary: Summary) -> str:
    sent, saved = (summary.handed_over.get(f"{name}_bytes", 0) for name in ("sent", "saved"))
    if not saved:
        return ""
    return f"{sent} bytes, {saved} saved: {(sent + saved) / max(sent, 1):.1f} times fewer"


def _host(host: Mapping[str, float]) -> str:
    moved = (f"{host[name] / 1e6:.4g} MB {name}" for name in ("sent", "received"))
    return f"{', '.join(moved)}; its workers waited {100 * host['waiting_share']:.1f} %"


def _device_memory(summary: Summary) -> str:
    """Device memory of the workers, without the driver's own per process."""
    needed = summary.device_memory.get("needed_bytes", [])
    if not needed or not all(needed):
        return ""
    total = min(summary.device_memory["total_bytes"])
    each, fit = ", ".join(f"{n / 2**30:.2f}" for n in needed), total // max(needed)
    text = f"{each} GiB needed at most, worker by worker, of a device's {total / 2**30:.2f}"
    return f"{text}; {fit} such worker{'s' * (fit != 1)} fit"


def _duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
