"""Record a user's view: help, configuration, files, errors, names that can be imported."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from goldens import bad_inputs, public
from goldens.calls import ROOT, call, fresh, python
from goldens.case import Case, Findings
from goldens.trainings import RUN, STRATEGIES, command, keys_of, losses, state, succeed

COMMANDS = ("", ".simulate", ".replay", ".compare", ".transcribe", ".tasks.speech.lm")
GROUPS = ("task", "data", "optimizer", "callbacks", "logger", "experiment", "model", "trainer")


def cases() -> Iterator[Case]:
    """All of this file."""
    yield Case("shown", "–", "help", helps)
    yield Case("shown", "–", "errors", errors)
    for row in rows_of("strategy"):
        yield configured(f"strategy={row}", "task=digits")
    for group in GROUPS:
        for row in rows_of(group):
            if f"{group}={row}" != "experiment=compare":
                yield configured(f"{group}={row}")
    yield Case("shown", "–", "names", names, names_then)
    for strategy in STRATEGIES:
        yield files_of(strategy, STRATEGIES[strategy])
    yield files_of("ddp", ("strategy=ddp",))
    yield files_of("hybrid", (*STRATEGIES["hybrid"], "profile=true"), "profile")
    yield files_of("hybrid", (*STRATEGIES["hybrid"], "logger=both"), "loggers")
    yield Case("shown", "hybrid, ddp", "sweep", swept)
    yield Case("shown", "hybrid, async", "old runs compared", paged, two_runs)
    yield Case("python", "hybrid", "readme", python_api)
    yield Case("python", "own policy", "regression", own_policy)
    yield Case("fresh", "hybrid", "digits", fresh_run)
    yield Case("fresh", "hybrid, spawned", "transformer", fresh_spawn)
    yield Case("fresh", "–", "commands", fresh_commands)


def rows_of(group: str) -> list[str]:
    """The files of a folder of ``conf``."""
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


# ---- what is printed -----------------------------------------------------------------------------


def helps(kept: Path, folder: Path) -> Findings:
    """``--help`` of every command."""
    found = {}
    for name in COMMANDS:
        said = call(f"hybridtrain{name}", "--help", folder=folder)
        found[f"hybridtrain{name}"] = said.well | {"text": said.out.splitlines()}
    return found


def errors(kept: Path, folder: Path) -> Findings:
    """Status and number of lines; the text may become another."""
    found = {}
    lines = [f"hybridtrain task=digits trainer.accelerator=cpu {x}" for x in bad_inputs.RUNS]
    for line in (*lines, *bad_inputs.OTHERS):
        module, *arguments = line.split()
        said = call(module, *arguments, folder=folder)
        # Lightning's own greeting comes only where it was imported before the command began.
        kept_lines = [x for x in said.err.splitlines() if x.strip() and "GPU available" not in x]
        found[line] = {
            "status": said.status,
            "lines": len(kept_lines),
            "traceback": "Traceback" in said.err + said.out,
            "printed": len(said.out.splitlines()),
            "left": said.left,
        }
    return found


def configured(*overrides: str) -> Case:
    """``--cfg job``, key by key; classes of the package by their last name, as they may move."""

    def look(kept: Path, folder: Path) -> Findings:
        said = call("hybridtrain", *overrides, "--cfg", "job", folder=folder)
        return said.well | {"job": flat(yaml.safe_load(said.out)) if not said.status else None}

    return Case("configuration", overrides[0], "–", look)


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Keys with dots, and the values' texts."""
    if isinstance(value, dict) and value:
        inner = [flat(each, f"{path}.{key}" if path else str(key)) for key, each in value.items()]
        return {key: text for each in inner for key, text in each.items()}
    text = json.dumps(value)
    if path.endswith("_target_") and text.startswith('"hybridtrain.'):
        text = '"hybridtrain.….' + text.rpartition(".")[2]
    return {path: text}


# ---- what is left --------------------------------------------------------------------------------


def files_of(strategy: str, options: Sequence[str], what: str = "files") -> Case:
    """The run's directory, and the keys of what lies in it."""

    def look(kept: Path, folder: Path) -> Findings:
        line = command(options, "digits", 2)
        line = [x for x in line if strategy != "ddp" or "threads_per_worker" not in x]
        if what == "loggers":
            line.remove("logger=csv")
        said = call("hybridtrain", *line, folder=folder)
        return said.well | seen(folder / RUN) | {"labels": labels(said.out)}

    return Case("shown", strategy, what, look)


def seen(run: Path) -> Findings:
    """Names of files without numbers; keys of summary and checkpoint; headers of tables."""
    paths = sorted(path for path in run.rglob("*") if path.is_file())
    found: Findings = {"files": sorted({nameless(path.relative_to(run)) for path in paths})}
    for path in paths:
        if path.suffix == ".json":
            found[path.name] = plain_keys(json.loads(path.read_text()))
        if path.name in ("history.csv", "curves.csv", "comparison.csv"):
            found[path.name] = sorted(path.read_text().partition("\n")[0].split(","))
    last = run / "checkpoints" / "last.ckpt"
    if last.is_file():
        content = torch.load(last, weights_only=True)
        found["checkpoint"] = {key: keys_of(value) for key, value in content.items()}
        found["callbacks"] = sorted(content["callbacks"])
    return found


def nameless(path: Path) -> str:
    """Remove dates, hosts, processes and steps from a path."""
    return re.sub(r"\d+", "N", re.sub(r"tfevents.*", "tfevents", str(path)))


def plain_keys(value: Any) -> Any:
    """Keys of JSON; where keys are numbers or names of events they are left out."""
    if isinstance(value, dict):
        if all(key.isdecimal() for key in value):
            return {}
        return {key: plain_keys(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain_keys(value[0])] if value and isinstance(value[0], dict) else []
    return ""


def labels(text: str) -> list[str]:
    """First words of the summary's lines; not those that are there by chance."""
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    found = dict.fromkeys(line[2:14].strip() for line in lines)
    by_chance = ("slow", "staleness", "dropped")
    return [x for x in found if re.fullmatch(r"[a-z/ ]+", x) and x not in by_chance]


def swept(kept: Path, folder: Path) -> Findings:
    """A sweep of two jobs."""
    options = ("trainer.max_epochs=1", "trainer.accelerator=cpu", "trainer.devices=2")
    line = ("-m", "task=digits", "strategy=hybrid,ddp", *options, "hydra.sweep.dir=swept")
    said = call("hybridtrain", *line, folder=folder)
    paths = [path for path in (folder / "swept").rglob("*") if path.is_file()]
    names = sorted({nameless(path.relative_to(folder)) for path in paths})
    return said.well | {"files": names, "table": curve_headers(folder / "swept")}


def curve_headers(folder: Path) -> Findings:
    """Return the column names of the sheets that a comparison writes."""
    found = {}
    for name in ("comparison.csv", "curves.csv"):
        path = folder / name
        found[name] = path.read_text().splitlines()[0].split(",") if path.is_file() else None
    return found


def two_runs(kept: Path) -> None:
    """Keep the folders of two runs of the old code."""
    for strategy in ("hybrid", "async"):
        line = command(STRATEGIES[strategy], "parabola", 2)
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            succeed(call("hybridtrain", *line, folder=Path(folder)), line)
            shutil.copytree(Path(folder, RUN), kept / strategy)


def paged(kept: Path, folder: Path) -> Findings:
    """Sheets made of old directories are determined."""
    said = call("hybridtrain", "compare", str(kept), "out=.", folder=folder)
    found = {"files": sorted(path.name for path in folder.iterdir())}
    sheets = {
        path.name: path.read_text().replace(str(kept), "KEPT").splitlines()
        for path in folder.glob("*.csv")
    }
    return said.well | found | sheets


# ---- from Python ---------------------------------------------------------------------------------


def names_then(kept: Path) -> None:
    """Keep the names that are documented now."""
    (kept / "names.json").write_text(json.dumps(public.documented()))


def names(kept: Path, folder: Path) -> Findings:
    """Compare the names that could be imported, and their arguments."""
    then = json.loads((kept / "names.json").read_text())
    said = python(lambda: public.write_names(then), folder)
    return said.well | json.loads((folder / "names.json").read_text())


def python_api(kept: Path, folder: Path) -> Findings:
    """The README's example, a profile, a record, and its replay."""
    said = python(public.train_as_documented, folder)
    path = folder / "python.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    return said.well | {"labels": labels(said.out)} | found


def own_policy(kept: Path, folder: Path) -> Findings:
    """An object with two methods."""
    said = python(public.train_with_own_policy, folder)
    path = folder / "weights.pt"
    return said.well | {"weights": torch.load(path, weights_only=True) if path.is_file() else None}


# ---- with nothing imported before ----------------------------------------------------------------


def fresh_run(kept: Path, folder: Path) -> Findings:
    """Run and replay."""
    line = command(STRATEGIES["hybrid"], "digits", 2)
    said = fresh("-m", "hybridtrain", *line, folder=folder)
    again = fresh("-m", "hybridtrain", "replay", f"run={RUN}", folder=folder)
    found = {"run": said.well, "replay": again.well | {"said": again.out.splitlines()}}
    return found | {"losses": losses(folder / RUN / "csv" / "metrics.csv")}


def fresh_spawn(kept: Path, folder: Path) -> Findings:
    """Workers that import everything themselves."""
    options = (*STRATEGIES["hybrid"], "strategy.start_method=spawn")
    said = fresh("-m", "hybridtrain", *command(options, "transformer", 2), folder=folder)
    return said.well | (state(folder / RUN) if said.status == 0 else {})


def fresh_commands(kept: Path, folder: Path) -> Findings:
    """Run commands that must start quickly, and import names in fresh processes."""
    found = {}
    for name in ("", ".simulate"):
        said = fresh("-m", f"hybridtrain{name}", "--help", folder=folder)
        found[f"hybridtrain{name}"] = said.well | {"lines": len(said.out.splitlines())}
    heavy = "[x for x in ('torch', 'pytorch_lightning') if x in sys.modules]"
    line = "import hybridtrain.cli.entry"
    found[line] = fresh("-c", f"import sys; {line}; print({heavy})", folder=folder).out
    line = "import pytorch_lightning, hybridtrain; print(hybridtrain.StepProfiler.__name__)"
    found["after Lightning"] = fresh("-c", line, folder=folder).out
    line = "import hybridtrain; print(hybridtrain.HybridStrategy.__name__)"
    found["HybridStrategy"] = fresh("-c", line, folder=folder).out
    return found
