"""One command knows all commands: it runs them, lists them, and refuses what is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridtrain.cli.commands import COMMANDS, TRAIN
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]


def test_each_command_is_a_module_and_each_module_with_a_main_is_a_command() -> None:
    modules = {
        path.stem
        for path in (ROOT / "hybridtrain" / "cli" / "commands").glob("*.py")
        if "def main(" in path.read_text()
    }
    assert modules == COMMANDS.keys() - {TRAIN}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {TRAIN}))
def test_the_help_of_a_command_begins_with_what_it_does(command: Command, name: str) -> None:
    done = command(name, "--help")
    assert done.code == 0, done.err
    assert f"hybridtrain {name}" in done.out


@pytest.mark.parametrize(
    "name", ["compare", "key", "new", "plan", "replay", "transcribe", "vectors"]
)
def test_a_command_that_needs_arguments_is_one_line_without_them(
    command: Command, name: str
) -> None:
    done = command(name)
    assert done.code == 2 and done.out == ""
    assert len(done.err.splitlines()) == 1 and done.err.startswith("error: ")


def test_the_help_lists_all_commands_with_a_line_each() -> None:
    text = OmegaConf.load(ROOT / "conf" / "config.yaml").hydra.help.template
    for name, line in COMMANDS.items():
        assert f"{name:<12}{line}\n" in text


def test_the_name_of_the_training_command_may_be_left_out(command: Command) -> None:
    named, bare = (
        command(TRAIN, "task=parabola", "--cfg", "job"),
        command("task=parabola", "--cfg", "job"),
    )
    assert named.code == bare.code == 0
    assert named.out == bare.out


def test_a_word_that_is_no_command_is_refused_with_the_one_that_was_meant(command: Command) -> None:
    done = command("simualte", "workers=4")
    assert done.code == 2
    assert "'simualte' was given" in done.complaint
    assert "did you mean simulate?" in done.complaint


def test_the_module_and_the_console_script_are_the_same_command() -> None:
    line = [sys.executable, "-m", "hybridtrain", "key", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "hybridtrain key" in done.stdout
    assert 'hybridtrain = "hybridtrain.__main__:main"' in (ROOT / "pyproject.toml").read_text()
