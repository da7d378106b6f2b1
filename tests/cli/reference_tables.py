"""The tables of docs/reference*.md: every key that conf/ ships, every option of a command.

A key's default and meaning are those of its file in conf/, or what the class says of its argument;
what is allowed is the class's annotation, or else the type of the default.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

import yaml

from hybridtrain.cli.commands import doctor, ray, replay, simulate_options, transcribe, vectors
from hybridtrain.cli.commands import plan as plan_cli
from hybridtrain.cli.hydra_config import conf_dir
from hybridtrain.cli.sweep.job_launcher import ProcessLauncher
from hybridtrain.cli.sweep.search import OptunaSweeper
from hybridtrain.cli.validation.config_checks import TrainerOptions
from hybridtrain.engine.exchanges.compression import CODECS
from hybridtrain.engine.faults import KINDS, PHASES, Fault
from hybridtrain.engine.options.exchange_options import EXCHANGE_OPTIONS
from hybridtrain.engine.policies import POLICIES
from hybridtrain.engine.updates.named import MERGE_RULES, OURS
from hybridtrain.engine.updates.staleness import CORRECTIONS
from hybridtrain.tasks.speech import datamodule
from hybridtrain.tasks.speech.decoding import DecoderOptions
from hybridtrain.tasks.speech.nets import NETS
from hybridtrain.util.option_types import hints, words
from tests.cli.conf_comments import ConfFile, Key, read

Row = list[str]
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`[~.\w]*?(\w+)`")
_OPTION = re.compile(r"^  ([a-z][\w.]*=\S+(?: [a-z]\w*=\S+)*) +(.*(?:\n {6,}.*)*)", re.MULTILINE)
_MADE_OF = re.compile(r"\$\{([a-z][\w.]*)\}")
GROUPS = ("task", "model", "data", "optimizer", "trainer", "callbacks", "logger", "experiment")
DESCRIBED = {"trainer.": TrainerOptions, "model.decoder": DecoderOptions}
SOURCES = {
    datamodule.csv: datamodule.CsvManifest,
    datamodule.fsdd: datamodule.Fsdd,
    datamodule.librispeech: datamodule.LibriSpeech,
    datamodule.spoken_digits: datamodule.SpokenDigits,
}
COMMANDS = {
    "new": (),
    "key": (),
    "doctor": doctor.OPTIONS,
    "ray": ray.OPTIONS,
    "replay": replay.OPTIONS,
    "compare": ("out",),
    "simulate": (*simulate_options.OPTIONS, "task"),
    "plan": tuple(plan_cli.OPTIONS),
    "transcribe": tuple(transcribe.OPTIONS),
    "vectors": vectors.KNOWN,
    "hybridtrain.tasks.speech.lm": ("text", "order", "out"),
}


def table(head: str, rows: Iterator[Row]) -> str:
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


# ---- cells --------------------------------------------------------------------------------------


def texts(described: Any) -> dict[str, str]:
    """What a docstring says of each argument, in one line."""
    entries = _ENTRY.findall(inspect.cleandoc(described.__doc__ or "").partition("Args:\n")[2])
    return {
        name: _ROLE.sub(r"`\1`", " ".join(text.split())).replace("``", "`")
        for name, text in entries
    }


def allowed(kind: Any) -> str:
    """What a value may be, as a cell."""
    text = words(kind).replace(", or an object", "").replace(", an object", "")
    text = text.replace(", or Tensor", "").replace("Features, ", "").replace(", or Policy", "")
    text = text.replace("Callable", "a mapping").replace(f" from {-sys.float_info.max} on", "")
    return (
        text.replace("text, a mapping", "text or a mapping") if text.endswith("mapping") else text
    )


def default(value: Any) -> str:
    """A default, as a cell."""
    plain = {None: "null", True: "true", False: "false", (): "null"}
    known = value is None or value is True or value is False or value == ()
    return "" if value is inspect.Parameter.empty else f"`{plain[value] if known else value}`"


def prose(text: str) -> str:
    """What a comment says, as a cell: its signs are not Markdown's."""
    parts = text.replace("|", r"\|").split("`")
    for n in range(0, len(parts), 2):
        parts[n] = re.sub(r"([*<]|\b_|_\b)", r"\\\1", parts[n])
    return "`".join(parts)


# ---- parts of a strategy ------------------------------------------------------------------------


def arguments_of(make: Callable[..., Any]) -> dict[str, Row]:
    """Default, what is allowed and meaning of each argument of a function or class."""
    kinds = hints(make)
    said = texts(kinds.get("return")) | texts(make)
    return {
        name: [default(each.default), allowed(kinds.get(name, Any)), said.get(name, "")]
        for name, each in inspect.signature(make).parameters.items()
        if name != "params"
    }


def part_rows(known: Mapping[str, Callable[..., Any]], of_files: str = "") -> Iterator[Row]:
    """``of_files``: the part whose comments in conf/strategy say what its parameters mean."""
    for part, make in known.items():
        file = conf_dir() / "strategy" / f"{part}.yaml"
        keys = conf_file(file).keys if of_files else {}
        for name, (value, kind, meaning) in arguments_of(make).items():
            if of_files:
                meaning = prose(keys[f"{of_files}.{name}"].meaning)
            yield [f"`{part}`", f"`{name}`", value, kind, meaning]


# ---- files of conf/ -----------------------------------------------------------------------------


@cache
def conf_file(path: Any) -> ConfFile:
    """A file of conf/, read once."""
    return read(path)


def kinds_of(target: str) -> dict[str, Any]:
    """The types that a class or function declares."""
    if target in ("", "???", "null"):
        return {}
    made = pkgutil.resolve_name(target)
    return hints(SOURCES.get(made, made))


def key_rows(file: ConfFile, group: str) -> Iterator[Row]:
    """Key, default, what is allowed, meaning; ``group``: what stands before the keys."""
    for name, key in file.keys.items():
        parent, _, last = name.rpartition(".")
        if last.startswith("_") or name.startswith("defaults"):
            continue
        if key.value or key.meaning:
            value = f"`{key.value}`" if key.value and key.value[0] not in "|>" else ""
            kind = [] if file.is_global else [_kind(file, group, parent, last, key)]
            yield [f"`{group}{name}`", value, *kind, prose(meaning(key))]


def meaning(key: Key) -> str:
    """What a comment says; of a value without one that is another key's, which key."""
    made_of = _MADE_OF.search(key.value)
    return key.meaning or (f"follows `{made_of[1]}`" if made_of else "")


def _kind(file: ConfFile, group: str, parent: str, name: str, key: Key) -> str:
    path = f"{group}{parent}"
    target = file.keys.get(f"{parent}.{'_target_'}".lstrip("."), Key("")).value
    if path == "model.net":
        kinds = {"kind": Literal[*NETS], **hints(NETS[file.path.stem])}
    else:
        kinds = hints(DESCRIBED[path]) if path in DESCRIBED else kinds_of(target)
    if file.path.stem == "common" and not parent:
        kinds = hints(datamodule.SpeechDataModule)
    if name in kinds:
        return allowed(kinds[name]).replace("|", r"\|")
    if not key.value:
        return "a mapping, or null"
    if "${" in key.value:
        return ""
    value = yaml.safe_load(key.value)
    plain = (kind for kind in (bool, int, float, str, list, dict) if isinstance(value, kind))
    return allowed(next(plain, Any))


def group_section(group: str) -> str:
    """A group: each of its files with a table of its keys."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    more = sorted((conf_dir() / group).glob("*/*.yaml"))
    parts = []
    for path in [*files, *more]:
        file = conf_file(path)
        prefix = "" if file.is_global else f"{group}."
        head = "### " + (f"`{group}={path.stem}`" if path in files else f"All of `{group}/speech`")
        target = file.keys.get("_target_", Key("")).value
        made = f" Makes `{target}`." if target not in ("", "???", "null") else ""
        parts.append(f"{head}\n\n{prose(file.description)}{made}")
        columns = "| key | value | why |" if file.is_global else HEAD
        if rows := list(key_rows(file, prefix)):
            parts.append(table(columns, iter(rows)))
    return "\n" + "\n\n".join(parts) + "\n"


HEAD = "| key | default | allowed | meaning |"


def hydra_rows() -> Iterator[Row]:
    """What conf/config.yaml sets of Hydra, and what our launcher takes."""
    file = conf_file(conf_dir() / "config.yaml")
    for name, key in file.keys.items():
        if name.startswith("hydra.") and (key.value or key.meaning) and "_target_" not in name:
            value = f"`{key.value}`" if key.value and key.value[0] != "|" else ""
            yield [f"`{name}`", value, prose(key.meaning)]
    for name, (value, kind, said) in arguments_of(ProcessLauncher).items():
        yield [f"`hydra.launcher.{name}`", value, f"{said} ({kind})"]
    for name, (value, kind, said) in arguments_of(OptunaSweeper).items():
        yield [f"`hydra.sweeper.{name}`", value, f"`hydra/sweeper=optuna`: {said} ({kind})"]
    for path in sorted((conf_dir() / "hydra").rglob("*.yaml")):
        choice = f"hydra/{path.parent.name}={path.stem}"
        yield [f"`{choice}`", "", conf_file(path).description]


# ---- commands -----------------------------------------------------------------------------------


def usage(name: str) -> str:
    """The docstring that ``--help`` prints."""
    module = name if "." in name else f"hybridtrain.cli.commands.{name}"
    return str(importlib.import_module(module).__doc__)


def command_options(name: str) -> dict[str, str]:
    """What follows each ``name=VALUE`` in the docstring of a command."""
    return {given: " ".join(text.split()) for given, text in _OPTION.findall(usage(name))}


def command_section(name: str) -> str:
    typed = name if "." in name else f"hybridtrain {name}"
    what, _, rest = usage(name).partition("\n")
    lines = [line.strip() for line in rest.splitlines() if f"python -m {typed}" in line]
    calls = "\n".join(["```text", *lines, "```"])
    rows = [[f"`{given}`", prose(text)] for given, text in command_options(name).items()]
    options = [table("| option | meaning |", iter(rows))] if rows else []
    return "\n\n".join([f"## {typed}", what, calls, *options])


# ---- all of them --------------------------------------------------------------------------------

PART = "| {} | parameter | default | allowed | meaning |"


@cache
def tables() -> dict[str, str]:
    """By the name that stands in their markers."""
    words_of = {"kind": ", ".join(KINDS), "phase": ", ".join(PHASES)}
    fault = (
        [f"`{name}`", value, words_of.get(name, kind), said]
        for name, (value, kind, said) in arguments_of(Fault).items()
    )
    ddp = key_rows(conf_file(conf_dir() / "strategy" / "ddp.yaml"), "strategy.")
    return {
        "policy": table(PART.format("policy"), part_rows(POLICIES, "policy")),
        "exchange": table(PART.format("exchange"), part_rows(EXCHANGE_OPTIONS)),
        "compression": table(PART.format("compress"), part_rows(CODECS)),
        "correction": table(PART.format("correction"), part_rows(CORRECTIONS)),
        "update": table(PART.format("update"), part_rows({**MERGE_RULES, **OURS})),
        "ddp": table(HEAD, ddp),
        "fault": table(HEAD, fault),
        "hydra": table("| key | default | meaning |", hydra_rows()),
        **{group: group_section(group) for group in GROUPS},
        "commands": "\n" + "\n\n".join(map(command_section, COMMANDS)) + "\n",
    }
