"""Read runs from disk: figures, curve, configuration, and how they ended.

A run is a folder with ``summary.json``, ``history.csv`` or Hydra's ``.hydra/config.yaml``; if some
are missing or broken, the others are still read. A sweep is a folder of runs; its ``jobs.json``
records the end of jobs that left no summary.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from re import fullmatch, split
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridtrain.errors import UserError
from hybridtrain.report.charts import shortened
from hybridtrain.report.history import HISTORY_FILE, RunCurve, read_history
from hybridtrain.util.files import read_text
from hybridtrain.util.option_types import is_number
from hybridtrain.util.streams import printable, printable_in

SUMMARY_FILE, JOBS_FILE = "summary.json", "jobs.json"
RESUMED_FROM = "resumed_from.ckpt"
CONFIG_FILE, OVERRIDES_FILE = ".hydra/config.yaml", ".hydra/overrides.yaml"
HYDRA_FILE = ".hydra/hydra.yaml"
DEPTH = 4  # of the search for runs below a folder
ABSENT = "–"
FIGURES = ("updates", "samples", "samples_per_s", "effective_batch", "train_s", "wall_s")
IN_HISTORY = {*FIGURES, "staleness_mean", "staleness_max", "dropped", "lead_max"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    ``config`` is flat, with dotted names. ``exit`` is the exit status; None: unfinished or killed.
    ``broken`` names the files that could not be read.
    """

    folder: Path
    overrides: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    curve: RunCurve = field(default_factory=RunCurve)
    exit: int | None = None
    error: str = ""
    broken: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """Name of its task; empty: unknown."""
        return str(self.config.get("task.name") or "")

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics in the summary."""
        found = self.summary.get("metrics")
        return {k: v for k, v in found.items() if is_number(v)} if isinstance(found, dict) else {}

    def figure(self, *names: str) -> float | None:
        """The number at this path in the summary; None: there is none."""
        value = self._at(*names)
        return value if is_number(value) else None

    def figures(self, *names: str) -> list[float]:
        """The numbers in the list at this path in the summary."""
        value = self._at(*names)
        return [x for x in value if is_number(x)] if isinstance(value, list) else []

    @property
    def hosts(self) -> list[dict[str, float]]:
        """The numbers of each host, if there were several."""
        found = self._at("hosts")
        each = [x for x in found if isinstance(x, Mapping)] if isinstance(found, list) else []
        return [{name: x for name, x in host.items() if is_number(x)} for host in each]

    def _at(self, *names: str) -> Any:
        value: Any = self.summary
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def numbers(self) -> dict[str, float | None]:
        """The numbers to compare, by the names of the sheet's columns; None: unknown."""
        shares, dropped = self.figures("waiting_share"), self.figures("dropped")
        return {
            **{name: self.figure(name) for name in FIGURES},
            "waiting_percent": 100 * sum(shares) / len(shares) if shares else None,
            "staleness_mean": self.figure("staleness", "mean"),
            "staleness_max": self.figure("staleness", "max"),
            "dropped": sum(dropped) if dropped else None,
            "lead_max": max(self.figures("lead", "max"), default=None),
            "sent_bytes": self.figure("handed_over", "sent_bytes"),
            "saved_bytes": self.figure("handed_over", "saved_bytes"),
            **self._since_beginning(),
        }

    def _since_beginning(self) -> dict[str, float | None]:
        """The numbers of a resumed run, as its history has them; empty for other runs."""
        columns = self.curve.columns
        if not self.summary.get("resumed") or not columns.get("updates"):
            return {}
        last = {name: values[-1] for name, values in columns.items() if not math.isnan(values[-1])}
        whole: dict[str, float | None] = {name: last[name] for name in IN_HISTORY & last.keys()}
        if last.get("train_s"):
            whole["samples_per_s"] = last["samples"] / last["train_s"]
        if "waiting_share" in last:
            whole["waiting_percent"] = 100 * last["waiting_share"]
        return whole | dict.fromkeys(("sent_bytes", "saved_bytes"))  # known of its last part alone

    @property
    def status(self) -> str:
        """How the run ended, in a word."""
        known = {None: "unfinished", 0: "finished"} | dict.fromkeys((129, 130, 143), "interrupted")
        return known.get(self.exit, "failed")

    @property
    def reason(self) -> str:
        """Why the run did not finish, as far as it is known."""
        if self.exit is None:
            return "it runs still, or was killed"
        return shortened(self.error, 300)

    @property
    def ended_well(self) -> bool:
        return self.exit == 0


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders of all runs in and below these, each once, in natural order (2 before 10).

    Raises:
        UserError: naming a folder that does not exist or holds no run.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give the folder of a run or of a sweep")
        runs = list(_below(folder, DEPTH))
        if not runs:
            raise UserError(
                f"{folder} holds no run: nowhere in it is there a {SUMMARY_FILE}, {HISTORY_FILE} "
                f"or {CONFIG_FILE}; give the folder of a run or of a sweep"
            )
        found |= {run.resolve(): run for run in runs}
    return list(found.values())


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if any((folder / x).is_file() for x in (SUMMARY_FILE, HISTORY_FILE, CONFIG_FILE)):
        yield folder
    elif depth > 0:
        inside = [x for x in folder.iterdir() if x.is_dir() and not x.name.startswith(".")]
        for each in sorted(inside, key=_natural):
            yield from _below(each, depth - 1)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    parts = [x for x in split(r"(\d+)", path.name) if x]
    return [(not x.isdecimal(), int(x) if x.isdecimal() else 0, x) for x in parts]


def read_run(folder: Path) -> Run:
    """Read a run; missing and broken files are left out. It may be another user's."""
    broken: list[str] = []
    summary = printable_in(read_mapping(folder / SUMMARY_FILE, broken))
    done = summary.get("exit") == 0
    ended = {} if done else printable_in(_ending(folder))  # resumed behind its sweep, perhaps
    curve = read_history(folder)
    if curve.bad:
        broken.append(f"{HISTORY_FILE} ({curve.bad} rows)")
    status = ended.get("exit", summary.get("exit"))
    plain = (_yaml(folder / x, broken) for x in (OVERRIDES_FILE, CONFIG_FILE))
    overrides, config = map(printable_in, plain)
    flat = dict(_flat(config)) if isinstance(config, dict) else {}
    flat.pop("run_dir", None)  # every run has another one
    return Run(
        folder=folder,
        overrides=tuple(map(str, overrides)) if isinstance(overrides, list) else (),
        config=flat,
        summary=summary,
        curve=curve,
        exit=status if isinstance(status, int) else None,
        error=str(ended.get("error") or summary.get("error") or ""),
        broken=tuple(broken),
    )


def read_mapping(path: Path, broken: list[str]) -> dict[str, Any]:
    """A JSON object; empty where there is none, or a broken one, whose name is appended."""
    try:
        content = mapping_in(read_text(path, "the file")) if os.path.lexists(path) else {}
    except UserError:
        content = None
    if content is None:
        broken.append(path.name)
        return {}
    return content


def mapping_in(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; ``None``: it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _ending(folder: Path) -> dict[str, Any]:
    """The entry of this job in its sweep's ``jobs.json``; empty: there is none."""
    for sweep in folder.parents[:DEPTH]:
        ending = read_mapping(sweep / JOBS_FILE, []).get(folder.relative_to(sweep).as_posix())
        if isinstance(ending, dict):
            return ending
    return {}


def _yaml(path: Path, broken: list[str]) -> Any:
    try:
        return read_yaml(path) if os.path.lexists(path) else None
    except UserError:
        broken.append(f".hydra/{path.name}")
        return None


def read_yaml(path: Path) -> Any:
    """A file of ``.hydra`` as plain values, unresolved.

    Raises:
        UserError: if it cannot be read.
    """
    return yaml_in(read_text(path, "the run's"), path)


def yaml_in(text: str, path: Path) -> Any:
    """The plain values that a file's text means, unresolved. Raises UserError if it is damaged."""
    try:
        return OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)
    except Exception as error:  # PyYAML's, OmegaConf's
        raise UserError(
            f"{path} is damaged and cannot be read ({type(error).__name__}); restore it, "
            "or begin anew"
        ) from error


def _flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict | DictConfig) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_json(value: Any) -> str:
    """JSON text, with null for numbers that are not finite."""
    finite = with_floats(value, lambda x: x if math.isfinite(x) else None)
    return json.dumps(finite, indent=2) + "\n"


def with_floats(value: Any, change: Callable[[float], Any]) -> Any:
    """A copy of plain values in which each float is what ``change`` makes of it."""
    if isinstance(value, dict):
        return {k: with_floats(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [with_floats(v, change) for v in value]
    return change(value) if isinstance(value, float) else value


MARK = "\ufeff"  # Excel needs it to recognise UTF-8


def sheet(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """CSV for spreadsheets: UTF-8 with a byte order mark, numbers with a decimal point."""
    text = StringIO()
    writer = csv.writer(text)
    columns = list(columns)
    writer.writerow(_cell(c) for c in columns)
    writer.writerows([_cell(row.get(c)) for c in columns] for row in rows)
    return MARK + text.getvalue()


def _cell(value: Any) -> str:
    """The cell's text; an apostrophe precedes what a spreadsheet would take for a formula.

    Characters that would steer a terminal are escaped.
    """
    match value:
        case None:
            return ""
        case float():
            if value.is_integer() and abs(value) < 2**53:  # counts, also of a file's
                return str(int(value))
            return f"{value:.7g}" if math.isfinite(value) else ""
    text = "" if value is ABSENT else str(value)
    formula = text[:1] in ("=", "+", "-", "@", "\t", "\r") and not isinstance(value, int)
    return printable(f"'{text}" if formula else text)


# ---- differences --------------------------------------------------------------------------------


def common_overrides(runs: Sequence[Run]) -> list[str]:
    """The overrides that all runs share, apart from runs whose overrides are unknown."""
    known = [run.overrides for run in runs if run.overrides]
    return [x for x in known[0] if all(x in each for each in known)] if known else []


def labels(runs: Sequence[Run], without: Collection[str] = ()) -> list[str]:
    """A short unique name for each run, made of the overrides that not all runs share.

    ``strategy=async trainer.devices=2`` becomes ``async devices=2``; in a sweep the number of the
    job comes first. Control characters are shown as escapes. ``without``: keys that are left out.
    """
    return [_in_one_line(name) for name in _labels(runs, without)]


def _in_one_line(name: str) -> str:
    return printable(name.replace("\n", "\\n").replace("\t", "\\t"))


def _labels(runs: Sequence[Run], without: Collection[str]) -> list[str]:
    common = set(common_overrides(runs))
    last = [{key_of(x): x for x in run.overrides}.values() for run in runs]
    each = [[x for x in own if x not in common] for own in last]
    named = [" ".join(_briefer(x) for x in own if key_of(x) not in without) for own in each]
    folders = [run.folder.name for run in runs]
    if all(x.isdecimal() for x in folders) and len({*folders}) == len(folders):
        return [f"{x}: {name}" if name else x for x, name in zip(folders, named, strict=True)]
    named = [name or x for x, name in zip(folders, named, strict=True)]
    result = list(named)
    for n_parts in (1, 2, 0):  # of the path; 0: all
        twice = {x for x in result if result.count(x) > 1}
        ends = [Path(*run.folder.parts[-n_parts:]) for run in runs]
        result = [
            f"{name} ({end})" if now in twice else now
            for name, end, now in zip(named, ends, result, strict=True)
        ]
    return result


def brief(override: str) -> str:
    """An override for tables: without ``++``, and with at most four significant digits."""
    key, separator, value = override.lstrip("+").partition("=")
    return f"{key}{separator}{rounded(value)}"


def rounded(value: str) -> str:
    """A number with many digits is cut to four significant ones; any other text is unchanged."""
    long = len(value) > 6 and fullmatch(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", value)
    return f"{float(value):.4g}" if long and not value.isdecimal() else value


def key_of(override: str) -> str:
    """The key of an override, without its prefix."""
    return override.partition("=")[0].lstrip("+~")


def _briefer(override: str) -> str:
    key, separator, value = brief(override).partition("=")
    if not separator:
        return key
    return (
        value if "." not in key and not value.isdecimal() else f"{key.rpartition('.')[2]}={value}"
    )


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Configuration values that differ, by name: one for each run; ``ABSENT``: it has none.

    Where runs chose different files of a group (``strategy=async``), the choice is one row. The
    values that came with it have no rows, unless they differ within a choice or were given.
    """
    configs = [_by_name(run.config) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name, ABSENT) for config in configs] for name in names}
    found = {k: v for k, v in values.items() if len({_comparable(x) for x in v}) > 1}
    given = {key_of(x) for run in runs for x in run.overrides}
    chosen = _choices(runs, names)
    for group, choices in chosen.items():
        for name in [x for x in found if x.startswith(f"{group}.")]:
            pairs = {
                (choice, _comparable(x)) for choice, x in zip(choices, found[name], strict=True)
            }
            was_given = any(f"{name}.".startswith(f"{key}.") for key in given if "." in key)
            if len(pairs) == len({*choices}) and not was_given:
                del found[name]
    return chosen | found


def _by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a strategy by their name or class, alone or in a mapping with options."""
    parts = {x for x in config if fullmatch(r"strategy\.\w+\.(name|_target_)", x)}
    return {key.rpartition(".")[0] if key in parts else key: x for key, x in config.items()}


def _comparable(value: Any) -> str:
    """Return a value's text for comparison; a missing value equals null."""
    return repr(None if value is ABSENT else value)


def _choices(runs: Sequence[Run], names: Iterable[str]) -> dict[str, list[Any]]:
    """List each run's choices of the groups in which the runs differ."""
    groups = {"strategy": None} | {x.partition(".")[0]: None for x in names if "." in x}
    own = [dict(x.lstrip("+").partition("=")[::2] for x in run.overrides) for run in runs]
    chosen: dict[str, list[Any]] = {
        group: [
            given.get(group, run.summary.get("strategy", ABSENT) if group == "strategy" else ABSENT)
            for run, given in zip(runs, own, strict=True)
        ]
        for group in groups
    }
    return {group: each for group, each in chosen.items() if len({*map(str, each)}) > 1}


def distinct(metrics: Iterable[str]) -> list[str]:
    """The metrics without the forms that Lightning adds to one that is logged in two ways.

    ``loss`` is the same as ``loss_epoch``, and ``loss_step`` is of the last mini-batch alone.
    """
    names = dict.fromkeys(metrics)
    ends = ("_epoch", "_step")
    return [x for x in names if not any(x.endswith(e) and x.removesuffix(e) in names for e in ends)]
