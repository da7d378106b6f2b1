"""`python -m hybridtrain transcribe`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from hybridtrain.cli.commands import transcribe
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.lm import estimate
from tests.tasks.speech.speech_batches import Batches, batch_of, tiny_module, trainer


def tone(path: Path, rate: int = 16000) -> str:
    t = np.arange(rate) / rate
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * 440 * t * (1 + t)), rate)
    return str(path)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint as training writes it; it says "e" most of the time."""
    module = tiny_module()
    run = trainer(max_epochs=1)
    run.fit(module, Batches([batch_of(["abc"])]))
    with torch.no_grad():
        module.net.output.bias[Alphabet().encode("e")] = 50.0  # type: ignore[union-attr]
    path = tmp_path_factory.mktemp("ckpt") / "speech.ckpt"
    run.save_checkpoint(path)
    return str(path)


def test_one_file_prints_its_text_only(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert transcribe.main([f"ckpt={ckpt}", tone(tmp_path / "a.wav")]) == 0
    assert capsys.readouterr().out == "e\n"


def test_several_files_of_any_rate_and_format_are_named(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tone(tmp_path / "a.wav", 8000), tone(tmp_path / "b=c.flac", 44100)]
    assert (
        transcribe.main([files[0], f"ckpt={ckpt}", "decoder=beam", "beam_width=8", files[1]]) == 0
    )
    assert capsys.readouterr().out == f"{files[0]}: e\n{files[1]}: e\n"


def test_a_bad_file_is_a_line_and_the_others_are_transcribed(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = Path(tone(tmp_path / "cut.wav"))
    cut.write_bytes(cut.read_bytes()[:900])
    (tmp_path / "noise.wav").write_bytes(os.urandom(2000))
    good = [tone(tmp_path / "a.wav"), tone(tmp_path / "z.wav")]
    bad = [str(tmp_path / "gone.wav"), str(cut), str(tmp_path / "noise.wav"), str(tmp_path)]
    assert transcribe.main([f"ckpt={ckpt}", bad[0], good[0], *bad[1:], good[1]]) == 2
    said = capsys.readouterr()
    assert said.out == f"{good[0]}: e\n{good[1]}: e\n"
    lines = said.err.splitlines()
    assert len(lines) == len(bad)
    for line, name in zip(lines, bad, strict=True):
        assert line.startswith("error: ") and name in line


def test_a_language_model_chooses_words(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flashlight.lib.text", reason="needs the extra lm (Python below 3.13)")
    estimate([["he", "me"]]).write(tmp_path / "words.arpa")
    arguments = [f"ckpt={ckpt}", "decoder=beam", f"lm={tmp_path / 'words.arpa'}", "lm_beta=0"]
    assert transcribe.main([*arguments, tone(tmp_path / "a.wav")]) == 0
    assert set(capsys.readouterr().out.split()) <= {"he", "me"}


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}=" in printed for name in transcribe.OPTIONS)


class Exploit:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploited",)


def with_code(path: Path, ckpt: str) -> None:
    torch.save({**torch.load(ckpt, weights_only=True), "callbacks": Exploit()}, path)


def old_pickle(path: Path, ckpt: str) -> None:
    path.write_bytes(pickle.dumps(Exploit()))


def half(path: Path, ckpt: str) -> None:
    content = Path(ckpt).read_bytes()
    path.write_bytes(content[: len(content) // 2])


def noise(path: Path, ckpt: str) -> None:
    path.write_bytes(b"RIFF this is no checkpoint")


def empty(path: Path, ckpt: str) -> None:
    path.touch()


def of_another_task(path: Path, ckpt: str) -> None:
    torch.save({"state_dict": {"weight": torch.ones(1)}, "hyper_parameters": {"width": 3}}, path)


def of_another_width(path: Path, ckpt: str) -> None:
    content = torch.load(ckpt, weights_only=True)
    content["hyper_parameters"]["net"]["width"] = 25
    torch.save(content, path)


def of_unknown_net(path: Path, ckpt: str) -> None:
    content = torch.load(ckpt, weights_only=True)
    content["hyper_parameters"]["net"]["kind"] = "transformer"
    torch.save(content, path)


def of_a_huge_net(path: Path, ckpt: str) -> None:
    content = torch.load(ckpt, weights_only=True)
    content["hyper_parameters"]["net"]["width"] = 2**20
    torch.save(content, path)


def of_endless_windows(path: Path, ckpt: str) -> None:
    content = torch.load(ckpt, weights_only=True)
    content["hyper_parameters"]["features"]["window_s"] = 3600.0
    torch.save(content, path)


def without_weights(path: Path, ckpt: str) -> None:
    content = torch.load(ckpt, weights_only=True)
    del content["state_dict"]
    torch.save(content, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_code, "contains code"),
        (old_pickle, "contains code"),
        (half, "corrupt"),
        (noise, "corrupt"),
        (empty, "corrupt"),
        (of_another_task, "not the checkpoint of a speech model"),
        (of_another_width, "does not fit"),
        (of_a_huge_net, r"in the file, and (1048576,"),
        (of_endless_windows, "a window has at most 1 s and 64 steps"),
        (of_unknown_net, "transformer"),
        (without_weights, "does not fit"),
    ],
)
def test_a_bad_checkpoint_is_one_line_and_never_run(
    spoil: Any,
    message: str,
    ckpt: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    spoil(tmp_path / "bad.ckpt", ckpt)
    assert transcribe.main(["ckpt=bad.ckpt", tone(tmp_path / "a.wav")]) == 2
    printed = capfd.readouterr()
    assert message in printed.err
    assert "bad.ckpt" in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not Path("exploited").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.wav"], "ckpt=FILE is missing"),
        (["ckpt={ckpt}"], "no sound file"),
        (["ckpt=nowhere.ckpt", "a.wav"], "nowhere.ckpt"),
        (["ckpt={ckpt}", "missing.wav"], "missing.wav"),
        (["ckpt={ckpt}", "a.wav", "colour=red"], "unknown option 'colour'"),
        (["ckpt={ckpt}", "a.wav", "decoder=best"], "greedy or beam"),
        (["ckpt={ckpt}", "a.wav", "decoder=beam", "beam_width=many"], "a whole number"),
        (["ckpt={ckpt}", "a.wav", "lm=x.arpa"], "decoder=beam"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str],
    message: str,
    ckpt: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tone(tmp_path / "a.wav")
    assert transcribe.main([argument.format(ckpt=ckpt) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_runs_as_a_module(ckpt: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybridtrain", "transcribe", f"ckpt={ckpt}"]
    done = subprocess.run(
        [*command, tone(tmp_path / "a.wav")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert (done.returncode, done.stdout) == (0, "e\n")
