"""Repeat a run of the command line from its record, or simulate it under another policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger
from rich.table import Table

from hybridtrain.cli.config_values import changed_keys, literal, placed
from hybridtrain.cli.explain import explain, naming_keys, one_line
from hybridtrain.cli.former_run import FormerRun
from hybridtrain.cli.hydra_config import conf_dir
from hybridtrain.cli.quiet import hush, hush_lightning
from hybridtrain.cli.run import Parts, build, hash_of_checkpoint
from hybridtrain.cli.telemetry.summary import metrics_of
from hybridtrain.engine.recording import Record
from hybridtrain.engine.recording.replayer import Replayed
from hybridtrain.engine.recording.run_description import changes, refuse_changes
from hybridtrain.engine.server.timeline import Timeline
from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.replay_fit import hybrid_strategy_of, rehearse_fit, replay_fit
from hybridtrain.lightning_package import own_name, with_present_targets
from hybridtrain.report.runs import CONFIG_FILE, RESUMED_FROM, read_run
from hybridtrain.util.arguments import part_of
from hybridtrain.util.cleanup import vanishing_directory


def replay(record: Record, anyway: bool) -> Replayed:
    """Repeat the recorded run, in a temporary directory.

    Raises:
        UserError: if code, data or configuration has changed, unless ``anyway``.
    """
    check_same(record, anyway)
    with workplace(record) as folder:
        parts = rebuilt(record, folder, anyway)
        given = fitting(record, parts)
        with _explained(record, parts):
            return replay_fit(record, parts.trainer, parts.module, anyway=True, **given)


@contextmanager
def _explained(record: Record, parts: Parts) -> Iterator[None]:
    """Raise UserError for a mistake in the configuration that shows during training."""
    try:
        with naming_keys(parts.cfg):
            yield
    except Exception as error:
        line = explain(error, [])
        if line is None or isinstance(error, UserError):
            raise
        raise UserError(f"{record.path}: {line}") from error


def fitting(record: Record, parts: Parts) -> dict[str, Any]:
    """The arguments of ``fit`` besides the module."""
    options: dict[str, Any] = {} if parts.data is None else {"datamodule": parts.data}
    if ckpt := _checkpoint(about(record)):
        options |= {"ckpt_path": ckpt, "weights_only": True}
    return options


@contextmanager
def workplace(record: Record) -> Iterator[Path]:
    """A temporary directory in place of the run's own."""
    told = about(record)
    hush()
    hush_lightning()
    talkative = logging.getLogger(own_name("pytorch_lightning"))
    former = talkative.level
    talkative.setLevel(logging.WARNING)
    try:
        with vanishing_directory("hybridtrain-replay-") as folder:
            for name in told["checkpoints"]:  # callbacks choose names that do not exist yet
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            yield folder
    finally:
        talkative.setLevel(former)


def about(record: Record) -> dict[str, Any]:
    """The part of the record's header written by the command line.

    Raises:
        UserError: if the run was not started from the command line.
    """
    told: dict[str, Any] = record.header["about"]
    if "config" not in told:
        raise UserError(
            f"{record.path}: this run was started from Python, so the record does not know how to "
            "make its trainer and module; make them as the script does and call "
            "hybridtrain.replay_fit(record, trainer, module, ...)"
        )
    return told


def own(record: Record) -> dict[str, Any]:
    """As :func:`about`, of a record whose classes may be made.

    Raises:
        UserError: also if another user can have written the record.
    """
    if record.foreign is not None:
        raise UserError(record.foreign)
    return about(record)


def rebuilt(
    record: Record,
    folder: Path,
    anyway: bool = False,
    change: Callable[[DictConfig], None] = lambda cfg: None,
) -> Parts:
    """Build trainer, module and data as at the run's start; they write to ``folder``."""
    told = own(record)
    content = told["config"]
    if anyway and (edited := _edited(told)) is not None:
        content = edited
    mute = {"_target_": f"{__name__}.Mute", "save_dir": str(folder)}
    try:
        plain = literal(placed(content, folder))  # it is resolved
        cfg: DictConfig = OmegaConf.create(with_present_targets(plain))
        cfg.trainer.enable_progress_bar, cfg.ckpt = False, _checkpoint(told)
        if record.n_hosts > 1:
            # One host has the workers of all, on devices of the same numbers.
            cfg.trainer.num_nodes = 1
            cfg.strategy["min_hosts"] = None
            cfg.strategy.workers_per_device *= record.n_hosts
        cfg.strategy.record, cfg.profile, cfg.advice = None, False, False
        cfg.logger = {name: mute for name, node in (cfg.logger or {}).items() if node is not None}
        change(cfg)
        parts = build(cfg, [], told["drawn_seed"])
        strategy = hybrid_strategy_of(parts.trainer)
    except UserError:
        raise
    except Exception as error:  # of the classes that the record names
        raise UserError(
            f"{record.path}: the configuration in this record makes no run: {one_line(error)}"
        ) from error

    def elsewhere(checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Callbacks delete old files: they must not know those of the run."""
        moved = placed(checkpoint.get("callbacks", {}), folder, told["run_dir"])
        return {**checkpoint, "callbacks": moved}

    strategy.change_loaded(elsewhere)
    return parts


class _Sink:
    """An experiment of a logger that takes any call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Sink()

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class Mute(Logger):
    """A logger that writes nothing, in place of the run's own.

    Args:
        save_dir: for callbacks that write beside the logs.
    """

    name, version = "mute", "0"
    experiment = _Sink()

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._save_dir = save_dir

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def log_dir(self) -> str:
        """Loggers that write files have one."""
        return self._save_dir

    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


# ---- changes since the run ----------------------------------------------------------------------


def check_same(record: Record, anyway: bool = False) -> None:
    """Refuse a run whose code, versions, configuration or checkpoint changed, unless ``anyway``.

    Raises:
        UserError: naming the changes, and the option to replay nevertheless.
    """
    told = own(record)
    refuse_changes([*changes(record), *_changed_inputs(told)], anyway)


def _changed_inputs(told: Mapping[str, Any]) -> Iterator[str]:
    if (edited := _edited(told)) is not None:
        for key, before, now in changed_keys(told["config"], edited):
            yield f"configuration: {key}={now} in .hydra/config.yaml, {before} in the run"
    if ckpt := _checkpoint(told):
        now = _hash(Path(ckpt), _stamp(Path(ckpt)))
        if now != told.get("ckpt"):
            yield f"checkpoint: {ckpt} {'has changed' if now else 'is not there'}"


def _checkpoint(told: Mapping[str, Any]) -> str | None:
    """The checkpoint that the run resumed from: the one it has kept, else the one it was given."""
    given: str | None = told["config"]["ckpt"]
    kept = Path(told["run_dir"]) / RESUMED_FROM
    is_same = given and kept.is_file() and _hash(kept, _stamp(kept)) == told.get("ckpt")
    return str(kept) if is_same else given


@cache
def _hash(checkpoint: Path, stamp: tuple[int, ...]) -> str:
    """Read a file once, however often it is asked for; ``stamp``: of this state of it."""
    return hash_of_checkpoint(checkpoint)


def _stamp(file: Path) -> tuple[int, ...]:
    """Size and time of the last change; empty: there is no such file."""
    try:
        known = file.stat()
    except OSError:
        return ()
    return known.st_size, known.st_mtime_ns


def _edited(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration now in the run's directory; None: there is none."""
    run = FormerRun.read(Path(told["run_dir"]), "replay")
    return run.configuration() if CONFIG_FILE in run.texts else None


# ---- another policy -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedCourse:
    """Statistics and metrics of a run. Seconds are of training; virtual if it was simulated."""

    name: str
    stats: Mapping[str, Any]
    metrics: Mapping[str, float]


def asked_for(given: Mapping[str, str]) -> dict[str, Any]:
    """The options of the strategy to change.

    Args:
        given: ``policy``, ``policy.k`` and so on; or ``strategy``, a file of ``conf/strategy``.

    Raises:
        UserError: if the strategy cannot be simulated.
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
        former = None if own[name] == "null" else part_of(name, own[name])
        former = {"name": former} if isinstance(former, str) else former
    elif isinstance(former, str):
        former = {"name": former}
    if parameters and former is None:
        raise UserError(f"{name}.{next(iter(parameters))} was given without {name}=NAME")
    return None if former is None else {**former, **parameters}


def simulated(
    record: Record, options: Mapping[str, Any], name: str, timeline: Timeline | None = None
) -> RecordedCourse:
    """Train again in virtual time, each worker as fast as it was.

    Args:
        options: options of the strategy to change.
        name: for the table.
        timeline: to be filled.

    Raises:
        UserError: if the run cannot be simulated with them.
    """
    with workplace(record) as folder:

        def change(cfg: DictConfig) -> None:
            OmegaConf.set_struct(cfg, False)
            for key, value in options.items():
                cfg.strategy[key] = value

        parts = rebuilt(record, folder, change=change)
        given = fitting(record, parts)
        with _explained(record, parts):
            stats = rehearse_fit(record, parts.trainer, parts.module, timeline, **given)
        return RecordedCourse(name, stats, metrics_of(parts.trainer))


def recorded(record: Record) -> RecordedCourse:
    """Statistics and metrics of the run itself."""
    metrics = read_run(Path(about(record)["run_dir"])).metrics
    return RecordedCourse("recorded", record.told.get("end", {}).get("stats", {}), metrics)


def table(courses: list[RecordedCourse]) -> Table:
    """A row for each figure, a column for each run."""
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
