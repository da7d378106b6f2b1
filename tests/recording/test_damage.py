"""Whatever has happened to a record, reading it is right or one line that says where."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.commands import replay
from hybridtrain.engine.recording import Record, read_record
from hybridtrain.engine.recording.record_file import CELL_BYTES, CRC_BYTES, NOBODY, TELLS, Writer
from hybridtrain.engine.recording.record_reader import times_of
from hybridtrain.engine.recording.recorder import KINDS
from hybridtrain.errors import UserError
from tests.support.headers import header

HEADER = header(2)
Event = tuple[str, int, int, float, float, float]


def events(n: int = 24) -> Iterator[Event]:
    chance = random.Random(0)
    for number in range(n):
        print = chance.getrandbits(32)
        yield ("Push", number % 2, print, 0.25 * number, chance.random(), 16.0)
    yield ("Woke", NOBODY, 0, 0.25 * n, 0.0, 0.0)


SEEDS = [(False, "seed is False"), (-1, "seed is -1"), (2**32, "seed is 4294967296")]


def configured(seed: Any) -> dict[str, Any]:
    """What the header says of a run that the command line has started, with this seed."""
    return {
        "config": {"seed": seed, "ckpt": None, "trainer": {}, "strategy": {}, "logger": None},
        "drawn_seed": None,
        "checkpoints": [],
        "directory": "run",
        "run_dir": "run",
    }


def written(path: Path, header: Any = HEADER) -> bytes:
    """A record of some events."""
    path.unlink(missing_ok=True)
    writer = Writer(path, KINDS)
    writer.tell({"header": header})
    for event in events():
        writer.event(*event)
    writer.tell({"end": {"parameters": "f" * 32, "optimizers": "0" * 32}})
    writer.close()
    return path.read_bytes()


def reading(path: Path, content: bytes) -> Record | str:
    """The record, or the line."""
    path.write_bytes(content)
    try:
        record = read_record(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return str(error)
    assert all(event.worker < 2 or event.kind == "Woke" for event in record.events())
    with suppress(UserError):  # of a worker that has pushed nothing
        times_of(record)
    return record


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_every_bit_that_flips_is_damage_and_its_place_is_named(tmp_path: Path) -> None:
    content = written(tmp_path / "x.bin")
    for bit in range(0, 8 * len(content), 11):
        line = reading(tmp_path / "x.bin", flipped(content, bit))
        assert isinstance(line, str), f"bit {bit} may flip"
        assert "the record is damaged at byte" in line
        at = int(line.partition("at byte ")[2].partition(":")[0])
        assert at <= bit // 8, "what lies before it is as it was written"


def test_cells_that_are_lost_repeated_or_exchanged_are_damage(tmp_path: Path) -> None:
    content = written(tmp_path / "x.bin")
    cells = [content[at : at + CELL_BYTES] for at in range(0, len(content), CELL_BYTES)]
    half = len(cells) // 2
    for changed in (
        [*cells[:half], *cells[half + 1 :]],
        [*cells[:half], cells[half], *cells[half:]],
        [*cells[:half], cells[half + 1], cells[half], *cells[half + 2 :]],
        [*cells[:half], bytes(CELL_BYTES), *cells[half + 1 :]],
    ):
        line = reading(tmp_path / "x.bin", b"".join(changed))
        assert isinstance(line, str) and "damaged at byte" in line


@pytest.mark.parametrize("hosts", [[0], [0, 1, 1], ["x", 0], 3])
def test_a_record_whose_hosts_are_not_those_of_its_workers_is_damaged(
    tmp_path: Path, hosts: Any
) -> None:
    line = reading(tmp_path / "x.bin", written(tmp_path / "x.bin", HEADER | {"hosts": hosts}))
    assert isinstance(line, str) and "damaged at byte" in line and "hosts" in line


def test_what_is_cut_short_is_still_a_record_of_the_beginning(tmp_path: Path) -> None:
    content = written(tmp_path / "x.bin")
    for length in range(1, len(content), 3):
        found = reading(tmp_path / "x.bin", content[:length])
        assert isinstance(found, Record) or "ends before it has said" in found


@pytest.mark.parametrize(
    ("header", "what"),
    [
        *(({**HEADER, "about": configured(seed)}, what) for seed, what in SEEDS),
        ([1], "record.header is of type list"),
        (HEADER | {"workers": 10**9}, "workers is 1000000000"),
        (HEADER | {"workers": 1}, "a worker that there was not"),
        (HEADER | {"kinds": "Push"}, "kinds is 'Push'"),
        (HEADER | {"kinds": ["Push"]}, "unknown kind"),
        (HEADER | {"about": None}, "about"),
        (HEADER | {"server_threads": "many"}, "server_threads"),
    ],
)
def test_a_record_that_makes_no_sense_is_damaged(tmp_path: Path, header: Any, what: str) -> None:
    line = reading(tmp_path / "x.bin", written(tmp_path / "x.bin", header))
    assert isinstance(line, str) and "damaged at byte" in line and what in line


@pytest.mark.parametrize("seed", [None, 0, 2**32 - 1])
def test_a_seed_that_a_run_may_have_is_read(tmp_path: Path, seed: int | None) -> None:
    written(tmp_path / "x.bin", {**HEADER, "about": configured(seed)})
    assert read_record(tmp_path / "x.bin").told["header"]["about"]["config"]["seed"] == seed


def test_deeply_nested_json_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested = b'{"header": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    title = written(tmp_path / "x.bin")[:CELL_BYTES]
    text = zlib.compress(nested)
    text += bytes(-len(text) % CELL_BYTES)
    cell = struct.pack("<BxHII12x", TELLS, NOBODY, len(text), zlib.crc32(text))
    crc = zlib.crc32(cell, *struct.unpack_from("<I", title, CELL_BYTES - CRC_BYTES))
    line = reading(tmp_path / "x.bin", title + cell + struct.pack("<I", crc) + text)
    assert isinstance(line, str) and f"damaged at byte {CELL_BYTES}" in line
    assert replay.main([f"run={tmp_path / 'x.bin'}"]) == 2
    assert capsys.readouterr().err.strip().endswith(line)
