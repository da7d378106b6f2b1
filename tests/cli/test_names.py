"""Directories and files of any name: kept as they are, or one line before anything starts."""

from __future__ import annotations

import json
import os
from contextlib import chdir
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridtrain.cli import claim
from hybridtrain.cli.config_values import literal, parse, quoted
from hybridtrain.cli.hydra_config import complete_overrides, compose_config
from hybridtrain.cli.resume import expanded
from hybridtrain.engine.recording import read_record
from hybridtrain.engine.recording.record_file import Writer
from tests.cli.conftest import Command
from tests.cli.tiny import TINY

FAILING = [*TINY, "trainer.devices=1", "model.fail_at=2", "logger=none"]
KEPT = ["new\nline", "sp ace", "100%", 'it\'s "q"', "back\\slash", "com,ma=x", "$HOME", "b{r}a[c]e"]
KEPT += ["ümläut", "#hash", "~tilde", "??? ", "a;b&c|d*", "\x1b[31mred", "-dash", "p(a)r", "$ {x}"]
REFUSED = ["a ${now:x} b", "${oc.env:HOME}", "${x", "\\${x}"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KEPT)
def test_a_run_in_a_directory_of_any_name_is_found_again(name: str, command: Command) -> None:
    Path(name).mkdir()
    with chdir(name):
        assert command(*FAILING).code == 1
        (summary,) = Path("outputs").glob("*/*/summary.json")
        found = expanded(complete_overrides([*FAILING, "resume=auto"]))
        claim.release_all()
        composed = compose_config([x for x in found if not x.startswith("hydra.")])
        assert Path(composed.resume) == summary.parent.absolute()
        assert Path(composed.ckpt) == summary.parent.absolute() / "interrupted.ckpt"
    assert [x.name for x in Path().iterdir()] == [name], "nothing is written elsewhere"


@pytest.mark.parametrize("name", [*map(os.fsencode, REFUSED), b"bad\xff\xfe"])
def test_a_working_directory_that_hydra_or_yaml_cannot_keep_is_one_line(
    name: bytes, command: Command
) -> None:
    os.mkdir(name)  # noqa: PTH102  (of bytes)
    with chdir(name):
        for more in ([], ["resume=auto"], ["ckpt=last"]):
            result = command(*FAILING, *more)
            assert result.code == 2 and "the working directory" in result.complaint
            assert "rename it" in result.complaint
        assert command("-m", *TINY, "model.width=1,2").code == 2
        assert os.listdir() == [], "nothing has been written"  # noqa: PTH208
    assert os.listdir(b".") == [name]  # noqa: PTH208


@pytest.mark.parametrize(
    "options",
    [
        ["hydra.run.dir='a\\${x}'"],
        ["-m", "model.width=1,2", "hydra.sweep.dir='a\\${x}'"],
    ],
)
def test_a_run_directory_with_an_interpolation_in_its_name_is_one_line(
    options: list[str], command: Command
) -> None:
    result = command(*TINY, *options)
    assert result.code == 2
    assert "a${x} has ${ in its name, which Hydra would replace" in result.complaint
    assert not list(Path().iterdir())


@pytest.mark.parametrize("option", ["ckpt", "resume", "hydra.run.dir", "model.diary"])
def test_an_argument_that_is_not_utf8_is_one_line(option: str, command: Command) -> None:
    result = command(*TINY, f"{option}=x\udcff")
    assert result.code == 2
    assert rf"the argument {option}=x\udcff is not UTF-8" in result.complaint


@pytest.mark.parametrize("text", [*KEPT, *REFUSED, "\\\\${x}", "'", "a\\", "\\'", "${${a}}"])
def test_a_quoted_value_means_itself(text: str) -> None:
    (override,) = parse([quoted("ckpt", text)])
    assert OmegaConf.create({"ckpt": override.value()}).ckpt == text
    assert literal({"a": [text, 1, None]})["a"][1:] == [1, None]


def test_a_record_keeps_names_that_are_no_text(tmp_path: Path) -> None:
    told = {"header": json.loads(HEADER)}
    told["header"]["code"] = {os.fsdecode(b"bad\xff.py"): "1"}
    writer = Writer(tmp_path / "record.bin", ["Push"])
    writer.tell(told)
    writer.close()
    assert read_record(tmp_path / "record.bin").told == told


HEADER = """{"kinds": ["Push"], "workers": 1, "threads": 1, "server_threads": 1, "policy": "all",
"requirements": {"parameters": "masters"}, "versions": {}, "code": {}, "about": {}}"""
