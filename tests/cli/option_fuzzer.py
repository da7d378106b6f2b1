"""Command lines with one mutated option each, and what becomes of them: a fuzzer of the boundary.

A case is a base command (a task, a strategy) and one mutation of one key or group. It is run by a
fork of this process up to where training would start, or through a tiny training. The seed of a
case is its number, so that a case can be repeated alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli.hydra_config import conf_dir
from tests.cli.composing import get_mode, load_once, parse_all

TASKS = ("digits", "parabola", "clusters", "hogwild", "triplet", "word2vec", "glove", "speech")
GROUPS = ("model", "data", "optimizer", "strategy", "trainer", "callbacks", "logger", "task")
_PATIENCE_S = 100
# What is trained is this small, unless the mutation is of one of these keys.
SMALL = ("trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.limit_val_batches=2")
_ROOM_BYTES = 4 << 30  # of address space, besides what is imported

# Text that Hydra reads as a value of this kind.
WHOLE = ("0", "-1", "7", "2147483648", "-9223372036854775809", "100000000000000000000")
REAL = ("0.5", "-0.5", "1e-320", "1e308", "3.7")
NOT_FINITE = (".nan", "nan", ".inf", "-.inf")
BOOLS = ("true", "false")
WORDS = ("abc", "''", "' '", "'a b'", "ä", "'日本'", "auto", "none", "'\\x00'", "../..", "'%s{}'")
LISTS = ("[]", "[1,2]", "[a,[b]]", "[null]")
MAPPINGS = ("{}", "{a:1}", "{_target_:os.getcwd}", "{name:1}")
NULL = ("null",)
INTERPOLATIONS = ("${nowhere}", "${trainer}", "${oc.env:NOWHERE}", "'${'", "${run_dir}")


@dataclass(frozen=True)
class Case:
    """``arguments``: of the command line; ``senseless``: nobody can mean that."""

    number: int
    arguments: tuple[str, ...]
    senseless: bool

    def __str__(self) -> str:
        return f"{self.number}: {' '.join(self.arguments)[:300]}"


@dataclass(frozen=True)
class Ended:
    """How a case has ended: ``refused``, ``accepted``, or ``traceback``, and what was said."""

    case: Case
    how: str
    said: str

    @property
    def wrong(self) -> bool:
        """Whether the boundary has failed."""
        return self.how == "traceback" or (self.how == "accepted" and self.case.senseless)


# ---- cases ---------------------------------------------------------------------------------------


def cases(numbers: Sequence[int]) -> list[Case]:
    """Those of these numbers."""
    return [_case(number) for number in numbers]


def _case(number: int) -> Case:
    from hybridtrain.cli.hydra_config import groups

    draw = random.Random(number)
    task, strategy = TASKS[number % len(TASKS)], draw.choice(groups()["strategy"])
    base = [f"task={task}", f"strategy={strategy}", "trainer.devices=2", "trainer.accelerator=cpu"]
    if strategy == "switch":
        base.append("strategy.policy.at_update=3")
    if draw.random() < 0.1:
        group = draw.choice([*GROUPS, "experiment"])
        text = draw.choice([*WHOLE, *REAL, *WORDS, *LISTS, *NULL, *MAPPINGS, *INTERPOLATIONS])
        change = draw.choice([f"{group}={text}", f"~{group}", f"+{group}={text}", f"{group}.x=1"])
        return Case(number, (*base, change), change.startswith(f"{group}.x"))
    key, now = draw.choice(keys(tuple(base)))
    change, senseless = _mutated(draw, key, now)
    return Case(number, (*base, change), senseless)


_KEYS: dict[tuple[str, ...], list[tuple[str, Any]]] = {}


def keys(base: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Every key of the configuration with its value; interpolations are values."""
    from hybridtrain.cli.hydra_config import compose_config

    if base not in _KEYS:
        with patch.object(OmegaConf, "load", load_once):
            config = compose_config(base)
        _KEYS[base] = [each for each in _leaves(config, "") if each[0] != "run_dir"]
    return _KEYS[base]


def _leaves(node: DictConfig, path: str) -> Iterator[tuple[str, Any]]:
    for name in map(str, node):
        key = f"{path}.{name}" if path else name
        raw = OmegaConf.to_container(node, resolve=False)
        assert isinstance(raw, dict)
        yield key, raw[name]
        if isinstance(raw[name], dict):
            yield from _leaves(node[name], key)


def _mutated(draw: random.Random, key: str, now: Any) -> tuple[str, bool]:
    kind = draw.random()
    if kind < 0.05:
        return f"~{key}", False
    if kind < 0.10:
        return f"+{key}_{draw.choice(['x', 'ä', '0'])}={draw.choice(WHOLE)}", True
    if kind < 0.13:
        return f"{key}={draw.choice('ab') * draw.choice([300, 3000])}", type(now) in (int, bool)
    if kind < 0.16:
        return f"{key}_={draw.choice(WHOLE)}", True
    every = (WHOLE, REAL, NOT_FINITE, BOOLS, WORDS, LISTS, MAPPINGS, NULL, INTERPOLATIONS)
    values = draw.choice(every)
    return f"{key}={draw.choice(values)}", _senseless(key, now, values)


# Numbers that may also be something else, and the other way round.
_FREE = ("seed", "trainer.devices", "trainer.overfit_batches", "trainer.fast_dev_run")
_OR_MORE = ("every", "dropout", "lag", "k", "compress", "precision", "window_s", "gamma")


def _senseless(key: str, now: Any, values: Sequence[str]) -> bool:
    """Whether none of these kinds of values can be meant, as far as the present one tells."""
    if values is NOT_FINITE and type(now) is int:
        return True
    if key in _FREE or key.rsplit(".", 1)[-1] in _OR_MORE or values in (NULL, INTERPOLATIONS):
        return False
    match now:
        case bool():
            return values is not BOOLS
        case int():
            return values not in (WHOLE,)
        case float():
            return values not in (WHOLE, REAL, NOT_FINITE)
        case dict():
            return values is not MAPPINGS
        case list():
            return values is not LISTS
    return False


# ---- runs ----------------------------------------------------------------------------------------


def run(chosen: Sequence[Case], trains: bool = False, at_a_time: int = 20) -> list[Ended]:
    """Each case in a fork; several, one after another, in the same one. In the order given."""
    parse_all(conf_dir())  # once for all forks
    found: list[Ended] = []
    while len(found) < len(chosen):
        found += _in_fork(chosen[len(found) :][: 1 if trains else at_a_time], trains)
    return found


def _in_fork(chosen: Sequence[Case], trains: bool) -> list[Ended]:
    """As many as the fork has come to; one that kills it ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        if (pid := os.fork()) == 0:
            _child(chosen, Path(folder), trains)
        _, status = os.waitpid(pid, 0)
        done = sorted(Path(folder).glob("*.how"), key=lambda path: int(path.stem))
        texts = [path.read_text(errors="replace").partition("\n") for path in done]
        found = [Ended(c, t[0], t[2]) for c, t in zip(chosen, texts, strict=False)]
        if len(found) < len(chosen):
            found.append(Ended(chosen[len(found)], "traceback", f"died, status {status}"))
        return found


def _child(chosen: Sequence[Case], folder: Path, trains: bool) -> None:
    try:
        os.setsid()
        room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (room + _ROOM_BYTES, room + _ROOM_BYTES))
        os.chdir(folder)
        OmegaConf.load, Hydra.get_mode = load_once, get_mode  # type: ignore[assignment]
        for number, case in enumerate(chosen):
            signal.alarm(_PATIENCE_S)  # which ends this process
            how, said = _one(case, trains)
            Path(f"{number}.part").write_text(f"{how}\n{said}", errors="replace")
            Path(f"{number}.part").rename(f"{number}.how")
    finally:
        os._exit(0)


def _one(case: Case, trains: bool) -> tuple[str, str]:
    from hybridtrain.cli import entry
    from hybridtrain.cli import run as one_run

    if not trains:
        one_run.execute = _only_built  # type: ignore[assignment]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        *base, change = case.arguments
        small = SMALL if trains else ()
        status = entry.main([*base, *small, change, f"hydra.run.dir=run{case.number}"])
    text = said.getvalue()
    lines = [line for line in text.splitlines() if line.startswith("hybridtrain: ")]
    if status == 0:
        return "accepted", text
    fine = status == 2 and len(lines) == 1 and "Traceback" not in text
    return ("refused" if fine else "traceback"), text


def _only_built(cfg: DictConfig) -> Any:
    from hydra.core.hydra_config import HydraConfig

    from hybridtrain.cli.exit_status import CommandOutcome, guarded
    from hybridtrain.cli.run import build

    overrides = [str(x) for x in HydraConfig.get().overrides.task]

    def build_it() -> CommandOutcome:
        build(cfg, overrides)
        return CommandOutcome()

    return guarded(build_it, overrides)


def main(first: int, last: int, trains: bool = False) -> None:
    """Print what is wrong, and how many ended how."""
    import collections
    import time

    import hybridtrain.cli.run  # noqa: F401

    began = time.time()
    ended = run(cases(range(first, last)), trains)
    for each in ended:
        if each.wrong:
            print(f"=== {each.how} {each.case}\n    {each.said[-400:].strip()}")
    counts = collections.Counter((each.how, each.wrong) for each in ended)
    print(counts, f"{time.time() - began:.1f} s")


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3)
