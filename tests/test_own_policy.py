"""docs/own_policy.md: the files and commands of its first section, in their order."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridtrain.engine.recording import find_record, read_record

PAGE = (Path(__file__).parents[1] / "docs" / "own_policy.md").read_text()
SECTION = PAGE.partition("## From the first line to a picture")[2].partition("\n## ")[0]
STEPS = dict(
    zip(
        re.findall(r"^### \d\. (.*)$", SECTION, re.MULTILINE),
        re.split(r"^### .*$", SECTION, flags=re.MULTILINE)[1:],
        strict=True,
    )
)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory, which is the working directory, with all files of the section."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in re.findall(r"```py\n# (\w+\.py)\n(.*?)```", SECTION, re.DOTALL):
        Path(name).write_text(text)
    yield tmp_path
    sys.modules.pop("quorum", None)


def commands(step: str) -> list[list[str]]:
    """The words of each command line of a step."""
    shells = re.findall(r"```sh\n(.*?)```", STEPS[step], re.DOTALL)
    return [shlex.split(line) for text in shells for line in text.splitlines()]


def run(words: list[str]) -> None:
    """A command, in this process."""
    from hybridtrain.cli import entry

    assert words[0] == "python"
    if words[1] != "-m":
        runpy.run_path(words[1], run_name="__main__")
        return
    assert words[2] == "hybridtrain"
    assert entry.main(words[3:]) == 0


@pytest.mark.wide
@pytest.mark.own_process
def test_the_pages_own_policy_is_trained_recorded_replayed_and_drawn(
    fresh: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in commands("Train with it, and replay the run"):
        run(words)
    said = capfd.readouterr().out
    assert said.count("result   equal to the bit") == 1 and "equal to the bit: True" in said
    assert "drawn: run.svg" in said and "<svg" in Path("run.svg").read_text()
    for record in ("run", "recorded"):
        policy = read_record(find_record(record)).header["policy"]
        assert policy == "quorum.Quorum(least=2)"


@pytest.mark.wide
@pytest.mark.own_process
def test_a_hundred_workers_are_simulated_and_drawn(
    fresh: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for words in commands("A hundred workers, in virtual time"):
        run(words)
    said = capfd.readouterr().out
    assert "quorum.Quorum:least=80" in said and "waiting" in said and "loss" in said
    assert "quorum.Quorum:least=80, 100 workers" in Path("hundred.svg").read_text()
    for name in ("hundred.html", "loss.html"):
        assert "quorum.Quorum" in Path(name).read_text()
    assert all("<svg" in Path(f"{least}.svg").read_text() for least in (100, 90, 80))


@pytest.mark.slow
@pytest.mark.own_process
def test_the_pages_own_policy_is_part_of_a_sweep_and_of_a_search(
    fresh: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in commands("Compare, sweep and search"):
        run(words)
    assert "quorum.Quorum" in Path("sweep/comparison.html").read_text()
    assert Path("longer/summary.json").is_file()
    ends = [json.loads(each.read_text()) for each in Path().glob("*/*/summary.json")]
    assert len(ends) == 4 and all(each["exit"] == 0 for each in ends)
    assert sorted(each["strategy"] for each in ends) == ["hybrid", *["quorum.Quorum"] * 3]
    said = capfd.readouterr().out
    assert "strategy.policy._target_=quorum.Quorum" in said and "policy=own" not in said
    assert re.search(r"^quorum\.Quorum:least=3 +1x6 ", said, re.MULTILINE)


def test_all_files_of_the_section_are_used_by_its_commands() -> None:
    files = set(re.findall(r"```py\n# (\w+\.py)\n", SECTION))
    words = {word for step in STEPS for line in commands(step) for word in line}
    assert files - words == {"quorum.py"}
