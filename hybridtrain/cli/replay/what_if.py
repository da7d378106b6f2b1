"""What another policy would have made of a recorded run: its workers, as fast as they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from hybridtrain.cli.best_checkpoint import metrics_of
from hybridtrain.cli.hydra_config import conf_dir
from hybridtrain.cli.replay.replay_run import about, fitting, rebuilt, workplace
from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.rehearse_fit import rehearse_fit
from hybridtrain.recording import Record


@dataclass(frozen=True)
class RecordedCourse:
    """How one run went. Seconds are those of training, virtual where it was simulated."""

    name: str
    stats: Mapping[str, Any]
    metrics: Mapping[str, float]


def asked_for(given: Mapping[str, str]) -> dict[str, Any]:
    """The strategy's options that are to be others than in the run.

    Args:
        given: ``policy`` and ``policy.k`` and so on; or ``strategy``, a row of ``conf/strategy``.

    Raises:
        UserError: if that cannot be simulated.
    """
    options = _row(given["strategy"]) if "strategy" in given else {}
    for name in ("policy", "correction"):
        own = {key: value for key, value in given.items() if key.partition(".")[0] == name}
        if own:
            options[name] = _spec(name, own, options.get(name))
    return options


def _row(strategy: str) -> dict[str, Any]:
    path = conf_dir() / "strategy" / f"{strategy}.yaml"
    names = sorted(each.stem for each in path.parent.glob("*.yaml"))
    if strategy not in names:
        raise UserError(f"strategy={strategy} was given; known are {', '.join(names)}")
    content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if "policy" not in content:
        raise UserError(
            f"strategy={strategy} was given, which is Lightning's own; only strategies with a "
            "policy can be simulated"
        )
    parts = {name: content.get(name) for name in ("exchange", "update")}  # null: with the policy
    return parts | {name: content[name] for name in ("policy", "correction") if name in content}


def _spec(name: str, own: Mapping[str, str], former: Any) -> Any:
    """``policy=backup``, ``policy.k=3`` as a mapping."""
    node = OmegaConf.from_dotlist([f"{key}={value}" for key, value in own.items() if "." in key])
    parameters: Any = OmegaConf.to_container(node)[name] if node else {}  # type: ignore[index,call-overload]
    if name in own:
        former = None if own[name] == "null" else {"name": own[name]}
    elif isinstance(former, str):
        former = {"name": former}
    if parameters and former is None:
        raise UserError(f"{name}.{next(iter(parameters))} was given without {name}=NAME")
    return None if former is None else {**former, **parameters}


def simulated(record: Record, options: Mapping[str, Any], name: str) -> RecordedCourse:
    """Train once more, in virtual time.

    Args:
        options: of the strategy, others than in the run.
        name: for the table.

    Raises:
        UserError: if that cannot be simulated.
    """
    with workplace(record) as folder:

        def change(cfg: DictConfig) -> None:
            OmegaConf.set_struct(cfg, False)
            for key, value in options.items():
                cfg.strategy[key] = value

        parts = rebuilt(record, folder, change=change)
        stats = rehearse_fit(record, parts.trainer, parts.module, **fitting(record, parts))
        return RecordedCourse(name, stats, metrics_of(parts.trainer))


def recorded(record: Record) -> RecordedCourse:
    """The run itself."""
    try:
        text = (Path(about(record)["run_dir"]) / "summary.json").read_text()
        metrics: dict[str, float] = json.loads(text)["metrics"]
    except (OSError, ValueError, KeyError):
        metrics = {}
    return RecordedCourse("recorded", record.told.get("end", {}).get("stats", {}), metrics)


def table(courses: list[RecordedCourse]) -> Table:
    """A line for each figure, a column for each run."""
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("", *(course.name for course in courses)):
        made.add_column(head, justify="right" if head else "left", overflow="fold")
    rows = [_figures(course) for course in courses]
    last = [name for name in courses[-1].metrics if not name.startswith("test/")]
    for course, row in zip(courses, rows, strict=True):
        row.update({name: _short(course.metrics.get(name)) for name in last})
    for name in rows[-1]:
        made.add_row(name, *(row.get(name, "-") for row in rows))
    return made


def _figures(course: RecordedCourse) -> dict[str, str]:
    stats = course.stats
    if not stats:
        return {}
    seconds, waiting = stats["training_s"], stats["waiting_share"]
    age = stats["staleness"]
    return {
        "seconds of training": _short(seconds),
        "updates": str(stats["updates"]),
        "updates/s": _short(stats["updates"] / seconds if seconds else 0.0),
        "samples/s": _short(stats["samples_per_s"]),
        "waiting": f"{100 * sum(waiting) / len(waiting):.1f} %",
        "staleness": f"{_short(age['mean'])}, at most {age['max']}",
        "dropped": str(sum(stats["dropped"])),
    }


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
