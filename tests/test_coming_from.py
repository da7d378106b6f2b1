"""The programs of docs/coming_from/ run, and end alike where their page says so."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.test_readme import ENVIRONMENT, ROOT, blocks

PAGES = {page.stem: page.read_text() for page in (ROOT / "docs" / "coming_from").glob("*.md")}
_SPAN = re.compile(r"`([^`]+)`")
_OVERRIDE = re.compile(r"[+~]?[\w.]+=\S+|~[\w.]+")


def programs(page: str, *changes: tuple[str, str]) -> list[str]:
    """Its Python blocks, in order, with words of them replaced."""
    found = blocks("python", PAGES[page])
    for old, new in changes:
        assert any(old in block for block in found), old
        found = [block.replace(old, new) for block in found]
    return found


def saved(program: str, name: str) -> dict[str, torch.Tensor]:
    """Run it in this process; what it has left in the file ``name``."""
    Path("program.py").write_text(program)
    runpy.run_path("program.py")
    return torch.load(name)


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.own_process
def test_a_ddp_program_ends_with_the_same_bits_under_hybrid(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    before, after = programs("ddp", ('strategy="ddp"', 'strategy="ddp_fork"'))
    assert_same_bits(saved(before, "net.pt"), saved(after, "net.pt"))


def test_a_data_module_of_the_script_is_set_up_by_hand_after_training() -> None:
    class Data(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.rows = regression_data(8)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.rows, 4)

        predict_dataloader = train_dataloader

    dm = Data()
    make_trainer("hybrid", 2, max_epochs=1).fit(Regression(), datamodule=dm)
    with pytest.raises(AttributeError, match="rows"):
        dm.predict_dataloader()
    dm.setup("predict")
    assert len(dm.predict_dataloader()) == 2


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_both_ddp_programs_are_scripts_that_run(tmp_path: Path) -> None:
    states = []
    for program in programs("ddp"):
        (tmp_path / "program.py").write_text(program)
        subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=ENVIRONMENT, check=True)
        states.append(torch.load(tmp_path / "net.pt"))
    assert_same_bits(*states)


@pytest.mark.own_process
def test_hogwild_by_hand_ends_with_the_same_bits_where_one_process_trains(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    before, after = programs("hogwild", ("PROCESSES, EPOCHS = 2, 2", "PROCESSES, EPOCHS = 1, 2"))
    state = saved(before, "model.pt")
    prefixed = {name.removeprefix("model."): value for name, value in state.items()}
    assert_same_bits(prefixed, saved(after, "model.pt"))


@pytest.mark.own_process
def test_several_hogwild_processes_learn(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    for program in programs("hogwild"):
        namespace = runpy.run_path(str(_written(program)))
        x, y = namespace["data"].tensors
        namespace["model"].load_state_dict(torch.load("model.pt"))
        error = torch.nn.functional.mse_loss(namespace["model"](x), y)
        assert float(error) < 0.5 * float(y.var())


@pytest.mark.own_process
def test_the_program_in_place_of_tensorflows_makes_as_many_updates(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.chdir(tmp_path)
    (program,) = programs("tensorflow")
    saved(program, "net.pt")
    said = capfd.readouterr().out
    assert re.search(r"^32 \{", said, re.MULTILINE), said


def _written(program: str) -> Path:
    (path := Path("program.py")).write_text(program)
    return path


# ---- the speech command, and its flags ----------------------------------------------------------


def overrides(text: str) -> list[str]:
    """Those named in the right column of the tables."""
    cells = [row.split("|")[2] for row in text.splitlines() if row.startswith("| ")]
    spans = [span for cell in cells for span in _SPAN.findall(cell)]
    return [word for span in spans for word in shlex.split(span) if _OVERRIDE.fullmatch(word)]


def test_every_key_beside_a_flag_exists_and_takes_that_value() -> None:
    from hybridtrain.cli.hydra_config import compose_config
    from hybridtrain.cli.validation.config_checks import check_config
    from hybridtrain.cli.validation.target_checks import check_targets

    found = [word for word in overrides(PAGES["deepspeech"]) if word != "model.scheduler=null"]
    assert len(found) > 50
    last = {word.partition("=")[0].lstrip("+~"): word for word in found}  # of several values
    given = [*last.values(), "++run_dir=somewhere"]
    cfg = compose_config(given)
    check_config(cfg, given)
    check_targets(cfg)


def corpus(folder: Path) -> None:
    """Manifests, an alphabet, and tones that have a length."""
    soundfile = pytest.importorskip("soundfile")
    (folder / "alphabet.txt").write_text("\n".join(["# letters", " ", *"abcdefgh", ""]))
    for name, rows in (("train", 16), ("dev", 4), ("test", 4)):
        lines = ["wav_filename,wav_filesize,transcript"]
        for row in range(rows):
            time = np.arange(8000 + 400 * row) / 16000
            soundfile.write(folder / f"{name}{row}.wav", 0.3 * np.sin(2000 * time), 16000)
            lines.append(f"{name}{row}.wav,{2 * len(time)},{'abcdefgh'[row % 8]} a")
        (folder / f"{name}.csv").write_text("\n".join(lines))


@pytest.mark.wide
@pytest.mark.own_process
def test_the_command_in_place_of_coquis_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from hybridtrain.cli.entry import main

    os.chdir(tmp_path)
    corpus(tmp_path)
    (block,) = blocks("bash", PAGES["deepspeech"])
    words = shlex.split(block.replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "hybridtrain"]
    assert main(words[3:]) == 0
    assert "test/wer" in capfd.readouterr().out
    assert Path("run/summary.json").is_file()
