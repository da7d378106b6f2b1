"""What observes a run does not act: with it and without it, the same is trained.

The run without is made once for all its observers. To the bit where runs repeat: parameters, states
of optimizers and schedules, every count. Elsewhere what is known beforehand: samples, updates.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.metamorphic import strategies
from tests.lightning.metamorphic.comparing import differences, lasting, miscounted
from tests.lightning.metamorphic.playing import BARE, Run, begin, play
from tests.lightning.metamorphic.relations import BY_NAME, GROUPS, RELATIONS
from tests.picking import by_default, rotated


class Bases:
    """Runs without an observer, each made once.

    Args:
        folder: which the processes of one session share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def left(self, run: Run) -> dict[str, Any]:
        """What it has left."""
        folder = self.folder / run.name
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if run.begun and not (folder / "begin").exists():
                begin(run, folder / "begin")
            if not (folder / "bare" / "left.pt").exists():
                play(run, BARE, folder / "bare")
        return dict(torch.load(folder / "bare" / "left.pt", weights_only=False))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def bases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    base = tmp_path_factory.getbasetemp()
    return Bases((base.parent if hasattr(request.config, "workerinput") else base) / "observed")


# ---- which ones ---------------------------------------------------------------------------------

PARTS = [name for name in GROUPS if name != "all"]


def _cells() -> list[Any]:
    """By default all observers at once under each strategy, some in a run that goes on."""
    wide = [*_wide(begun=False), *_wide(begun=True)[::10]]
    chosen = [(run, name) for run, name in wide if "," not in run.strategy]
    chosen.append((Run("sandblaster", 1, "whole", "uneven"), "all"))
    return [
        pytest.param(
            *(run, name),
            marks=() if (run, name) in chosen else pytest.mark.slow,
            id=f"{run.name}-{name}",
        )
        for run, name in dict.fromkeys((*chosen, *_all_cells()))
    ]


def _wide(begun: bool) -> list[tuple[Run, str]]:
    """Each strategy with some number of workers, in one way."""
    found = []
    for number, strategy in enumerate(strategies.OBSERVED):
        workers = 1 + number % 3
        ways = strategies.kinds(strategy, workers)
        run = Run(strategy, workers, ways[number % len(ways)], "uneven", begun)
        found.append((run, "all"))
    return found


def _each_under_one() -> Iterator[tuple[Run, str]]:
    """Each observer, each time with another strategy."""
    for number, (name, relation) in enumerate(RELATIONS.items()):
        workers = 3 - number % 2
        for strategy in rotated(strategies.NAMES, 5 * number):
            ways = rotated(strategies.kinds(strategy, workers), number)
            fitting = [way for way in ways if relation.suits(strategy, way)]
            if fitting:
                yield Run(strategy, workers, fitting[0], "uneven"), name
                break


def _all_cells() -> Iterator[tuple[Run, str]]:
    """All observers in all ways of training; each observer under every fourth strategy.

    Observers whose effects cancel each other would be seen in a group; the groups take turns.
    """
    for row, strategy in enumerate(strategies.OBSERVED):
        for workers in (1, 2, 3):
            for number, kind in enumerate(strategies.kinds(strategy, workers)):
                run = Run(strategy, workers, kind, ("uneven", "even")[(number + workers) % 2])
                yield from _suiting(run, rotated(PARTS, row + workers + number)[:1])
                yield run, "all"
        for number, name in list(enumerate(RELATIONS))[row % 4 :: 4]:
            workers = 2 + number % 2
            ways = strategies.kinds(strategy, workers)
            yield from _suiting(Run(strategy, workers, ways[number % len(ways)], "uneven"), [name])
    yield from _wide(begun=True)
    yield from _each_under_one()


def _suiting(run: Run, names: Iterable[str]) -> Iterator[tuple[Run, str]]:
    yield from ((run, name) for name in names if BY_NAME[name].suits(run.strategy, run.kind))


@pytest.mark.wide
@pytest.mark.sampled(50)
@pytest.mark.few(4)
@pytest.mark.parametrize(("run", "name"), _cells())
def test_training_is_the_same_with_and_without_an_observer(
    bases: Bases, run: Run, name: str
) -> None:
    bare = bases.left(run)
    left = play(run, BY_NAME[name], bases.folder / run.name / name.replace("/", " "))
    assert not (wrong := miscounted(run, left)), wrong
    changed = list(differences(lasting(run, bare), lasting(run, left)))
    assert not changed, "\n".join(changed[:20])


@pytest.mark.parametrize("name", by_default(RELATIONS, "validation", "CSVLogger"))
def test_observers_do_not_change_training_without_our_strategy_either(
    bases: Bases, name: str
) -> None:
    """Or a relation would ask for more than Lightning itself gives."""
    if BY_NAME[name].suits("auto", "automatic"):
        test_training_is_the_same_with_and_without_an_observer(
            bases, Run("auto", 1, "automatic", "even"), name
        )
