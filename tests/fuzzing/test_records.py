"""Records with right checksums that make no sense: replay refuses them in one line, or parts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.commands import replay
from hybridtrain.engine.recording import Record, read_record
from hybridtrain.engine.recording.observed import observed_in
from hybridtrain.engine.recording.record_file import Writer
from hybridtrain.engine.recording.record_reader import times_of
from tests.cli.tiny import TINY
from tests.cli.zygote import Zygote
from tests.fuzzing.mutations import EXTREMES, damaged, faults, swapped
from tests.support.headers import header


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small run, in another process: threads of torch's do not survive forks."""
    folder, zygote = tmp_path_factory.mktemp("recorded"), Zygote()
    try:
        options = ["trainer.devices=2", "hydra.run.dir=run", "logger=none", "test=false"]
        assert zygote.start(folder, *TINY, *options).status() == 0
    finally:
        zygote.close()
    return folder / "run"


STATS = {
    "updates": 12,
    "training_s": 0.25,
    "samples_per_s": 186.5,
    "waiting_share": [0.25, 0.0],
    "dropped": [0, 0],
    "staleness": {"mean": 0.0, "max": 0},
}
TOLD = {
    "header": header(2),
    "data 0": {"kind": "TensorDataset", "length": 24, "items": "a9"},
    "begin": {"parameters": "fa"},
    "end": {"parameters": "61", "optimizers": "bf", "stats": STATS},
}


def written(path: Path, told: dict[str, Any], cells: list[list[Any]]) -> None:
    """With right checksums."""
    path.unlink(missing_ok=True)
    writer = Writer(path, [str(n) for n in range(255)])
    for name, said in told.items():
        writer.tell({name: said})
    for kind, worker, print, at_s, own_s, samples in cells:
        writer.event(str(kind), worker, print, at_s, own_s, samples)
    writer.close()


def cells_of(record: Record) -> list[list[Any]]:
    names = ("kind", "worker", "print", "at_s", "own_s", "samples")
    return [[cell[name].item() for name in names] for cell in record.cells]


def with_another_event(cells: list[list[Any]], draw: random.Random) -> list[list[Any]]:
    """One is another, missing, or there twice."""
    place = draw.randrange(len(cells))
    cell = list(cells[place])
    column = draw.randrange(6)
    others = (range(26), (0, 1, 2, 65535), (0, 1, 2**32 - 1), (-1.0, float("nan"), 1e300))
    cell[column] = draw.choice([*others[min(column, 3)]])
    if column > 3:
        cell[column] = draw.choice((-1.0, float("nan"), 1e30, 0.0))
    new = draw.choice(([cell], [], [cell, cells[place]]))
    return [*cells[:place], *new, *cells[place + 1 :]]


@pytest.mark.parametrize(
    "n", [50, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_record_is_read_or_refused_in_one_line(n: int, tmp_path: Path) -> None:
    path = tmp_path / "record.bin"
    written(path, TOLD, [[4, k % 2, k, 0.25 * k, 0.5, 16.0] for k in range(40)])
    record = read_record(path)
    cells, content = cells_of(record), record.path.read_bytes()

    def case(draw: random.Random, number: int) -> None:
        if number % 2:
            path.write_bytes(damaged(content, draw))
        else:
            _, told = swapped(record.told, draw, EXTREMES)
            written(path, told, with_another_event(cells, draw))
        found = read_record(path)
        list(found.events())
        times_of(found)
        observed_in(found)

    ends, found = faults(case, n, "records")
    assert not found, f"{dict(ends)}\n" + "\n".join(found[:3])


def _is_endless(told: Any) -> bool:
    """The configuration says so: tried under another policy, the run would not end."""
    try:
        return bool(told["header"]["about"]["config"]["trainer"]["max_epochs"] == -1)
    except (KeyError, TypeError, IndexError):
        return False


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(20))
def test_a_replay_parts_or_is_refused_in_one_line(part: int, run: Path, tmp_path: Path) -> None:
    """100 in each part."""
    record, path = read_record(run / "record.bin"), tmp_path / "record.bin"
    cells = cells_of(record)

    def case(draw: random.Random, number: int) -> None:
        changed = cells
        told = record.told
        if number % 3:
            _, told = swapped(told, draw, EXTREMES)
        else:
            changed = with_another_event(cells, draw)
        written(path, told, changed)
        if _is_endless(told):
            return
        asked = draw.choice(([], ["anyway=true"], ["anyway=true", "policy=async"]))
        try:
            replay.run([f"run={path}", *asked])
        except SystemExit as stop:
            assert stop.code == 1, "parted"

    ends, found = faults(case, 100, f"replays {part}")
    assert not found, f"{dict(ends)}\n" + "\n".join(found[:3])
