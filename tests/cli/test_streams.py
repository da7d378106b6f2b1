"""Standard streams that are closed, full, or read by nobody: training goes on, its end is told."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from hybridtrain.cli import quiet
from hybridtrain.cli.commands import compare, replay, transcribe, vectors
from hybridtrain.cli.commands import plan as plan_cli
from hybridtrain.cli.commands import simulate as simulate_cli
from hybridtrain.cli.entry import main
from hybridtrain.cli.explain import explain
from hybridtrain.engine.memory.arena import Arena
from hybridtrain.engine.worlds.worker_main import WorkerStart
from hybridtrain.tasks.speech import lm
from hybridtrain.util import arguments, streams
from hybridtrain.util.streams import say
from tests.cli.conftest import Command, summary
from tests.cli.tiny import TINY, TinyModule
from tests.picking import by_default

RUN = [sys.executable, "-m", "hybridtrain", *TINY, "trainer.devices=2", "hydra.run.dir=run"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def shell(script: str) -> subprocess.CompletedProcess[str]:
    """``"$@"`` is the command."""
    line = ["bash", "-c", script, "-", *RUN]
    return subprocess.run(
        line, capture_output=True, text=True, env=ENVIRONMENT, timeout=100, check=False
    )


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "status", "line"),
    by_default(
        [
            ('"$@" >&- 2>&- <&-', 0, ""),
            ('"$@" >&-', 0, ""),
            ('"$@" 2>&-', 0, ""),
            ('"$@" <&-', 0, ""),
            ('"$@" 2>/dev/full', 0, ""),
            ('"$@" >/dev/full', 1, "the summary could not be printed (No space left on device)"),
            ('"$@" | head -1 >&2; exit ${PIPESTATUS[0]}', 141, ""),
        ],
        ('"$@" >&- 2>&- <&-', 0, ""),
    ),
)
def test_a_run_does_not_depend_on_who_listens(script: str, status: int, line: str) -> None:
    done = shell(script)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert line in done.stderr and "Error executing job" not in done.stderr
    assert summary("run")["updates"] == 12 and list(Path("run/checkpoints").iterdir())


def test_closed_streams_take_nothing_that_is_opened_later(tmp_path: Path) -> None:
    code = (
        "from hybridtrain.util.streams import hold_standard_streams as hold; hold()\n"
        f"file = open({str(tmp_path / 'x')!r}, 'w'); assert file.fileno() > 2\n"
        "print('said'); input if input else 0; import sys; print('said', file=sys.stderr)"
    )
    line = ["bash", "-c", '"$@" >&- 2>&- <&-', "-", sys.executable, "-c", code]
    assert subprocess.run(line, env=ENVIRONMENT, timeout=60, check=False).returncode == 0
    assert (tmp_path / "x").read_bytes() == b""


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        assert main(["task=digits"]) == 2
    finally:
        os.chdir(tmp_path)
    assert "the working directory has been deleted" in capsys.readouterr().err


def test_a_disk_without_inodes_is_named_though_the_system_names_no_file() -> None:
    def run_job() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError) as error:
        run_job()
    line = explain(error.value, [])
    assert line is not None and "None" not in line and "(a file in it: No space left" in line


def test_a_limit_of_file_sizes_is_named_with_the_way_out() -> None:
    script = (
        "import resource\nfrom hybridtrain.engine.memory.arena import Arena\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: Arena.create(1 << 17)\nexcept ValueError as error: print(error)"
    )
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stdout.startswith("0.1 MiB of shared host memory") and "ulimit -f" in done.stdout
    Arena.create(1 << 17)


# ---- characters that a stream lacks --------------------------------------------------------------


@contextmanager
def ascii_streams(folder: Path) -> Iterator[Path]:
    """Standard output and error of this process go to a file that takes ASCII alone."""
    name = folder / "printed"
    with name.open("a", encoding="ascii") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        yield name


def small_commands() -> dict[str, tuple[Callable[[list[str]], int], list[str], int]]:
    """By name: the command, its arguments, its exit status; files are named in other letters."""
    return {
        "vectors": (vectors.main, ["wörter.txt", "most_similar=größe"], 0),
        "no vector": (vectors.main, ["wörter.txt", "most_similar=日本"], 2),
        "no file": (vectors.main, ["日本.txt", "most_similar=a"], 2),
        "lm": (lm.main, ["text=sätze.txt", "out=größe.arpa"], 0),
        "transcribe": (transcribe.main, ["ckpt=größe.ckpt", "日本.wav"], 2),
        "compare": (compare.main, ["größe"], 2),
        "plan": (plan_cli.main, ["run=größe"], 2),
        "replay": (replay.main, ["run=größe"], 2),
        "simulate": (simulate_cli.main, ["strategy=größe"], 2),
        "new": (main, ["new", "größe-日本/mine"], 0),
        "key": (main, ["key", "schlüssel"], 0),
        "run": (main, ["task='größe'"], 2),
        "not quoted": (main, ["task=größe"], 2),
        "explained": (main, ["hydra.run.dir=größe"], 2),
    }


@pytest.mark.parametrize("name", small_commands())
def test_a_command_prints_what_a_stream_lacks_as_escapes(name: str, tmp_path: Path) -> None:
    Path("wörter.txt").write_text("2 2\ngröße 1 0\nüber 0.5 1\n", encoding="utf-8")
    Path("sätze.txt").write_text("die größe\n", encoding="utf-8")
    called, arguments, status = small_commands()[name]
    with ascii_streams(tmp_path) as printed:
        assert called(arguments) == status
    text = printed.read_text("ascii")
    assert re.search(r"\\(xf6|xfc|u65e5)", text) and "Traceback" not in text


def test_a_value_in_other_letters_is_refused_with_the_quotes_that_it_needs(
    command: Command,
) -> None:
    line = command("task=own", "hydra.run.dir=größe").complaint
    assert line.endswith("""quotes around other letters than a to z: "hydra.run.dir='größe'\"""")


class Umlauts(TinyModule):
    """Logs and prints in other letters."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        print("日本")
        self.log("größe", 1.0, prog_bar=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.few(1)
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_run_prints_metrics_and_folders_in_other_letters_on_an_ascii_terminal(
    start_method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # of spawned workers
    umlauts = [x.replace("tiny.TinyModule", "test_streams.Umlauts") for x in TINY]
    with ascii_streams(tmp_path) as printed:
        options = ["trainer.devices=2", "hydra.run.dir='fürth'", "trainer.max_epochs=1"]
        assert main([*umlauts, *options, f"strategy.start_method={start_method}"]) == 0
    text = printed.read_text("ascii") + capfd.readouterr().out
    assert r"gr\xf6\xdfe 1" in text, "progress"
    assert re.search(r"gr\\xf6\\xdfe +1\n", text) and r"logs " in text and r"f\xfcrth" in text
    assert r"\u65e5\u672c" in text and summary("fürth")["metrics"]["größe"] == 1.0


@pytest.mark.parametrize("error", [False, True])
def test_what_training_prints_raises_nothing_whatever_the_stream_is(
    error: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "stderr" if error else "stdout"
    for encoding, shown in (("ascii", rb"gr\xf6\xdfe"), ("latin-1", "größe".encode("latin-1"))):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
        monkeypatch.setattr(sys, name, stream)
        say("größe", error=error)
        assert stream.buffer.getvalue() == shown + b"\n"  # type: ignore[attr-defined]
    stream.close()
    say("größe", error=error)
    for other in (None, io.StringIO(), open("/dev/full", "w")):  # noqa: PTH123, SIM115
        monkeypatch.setattr(sys, name, other)
        say("größe", error=error)


# ---- warnings ------------------------------------------------------------------------------------


class Warns(TinyModule):
    """Warns where it is made, and in each worker."""

    def __init__(self) -> None:
        super().__init__()
        warnings.warn("made in\ntwo lines", stacklevel=1)

    def on_train_start(self) -> None:
        warnings.warn(f"worker {self.global_rank} warns", RuntimeWarning, stacklevel=1)
        message = "Checkpoint directory x exists and is not empty."  # Lightning's, and needless
        warnings.warn(message, stacklevel=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_warnings_of_a_run_are_sentences_without_file_line_and_code(
    command: Command, start_method: str
) -> None:
    options = ["trainer.devices=2", f"strategy.start_method={start_method}"]
    own = [x.replace("tiny.TinyModule", "test_streams.Warns") for x in TINY]
    done = command(*own, *options, "trainer.max_epochs=1")
    lines = {line for line in done.err.splitlines() if "warn" in line.lower()}
    expected = {"warning: made in two lines", *(f"warning: worker {n} warns" for n in (0, 1))}
    assert done.code == 0 and expected <= lines, done.err
    assert ".py:" not in done.err and "is not empty" not in done.err


def test_warnings_of_a_small_command_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    def warns(arguments: Sequence[str]) -> None:
        warnings.warn("so it is", stacklevel=1)

    before = warnings.showwarning
    assert arguments.command(warns, "", []) == 0
    assert capsys.readouterr().err == "warning: so it is\n"
    assert warnings.showwarning is before, "of a script that calls it they are as Python's"


def test_a_spawned_worker_shows_warnings_as_its_command_and_not_as_a_script() -> None:
    begins = WorkerStart(0, 1, 1, None)
    assert pickle.loads(pickle.dumps(begins)) == begins
    before = warnings.showwarning
    with streams.warnings_shown_by(quiet.show_warning):
        sent = pickle.dumps(begins)
    assert warnings.showwarning is before
    try:
        assert pickle.loads(sent) == begins
        assert warnings.showwarning is quiet.show_warning
    finally:
        warnings.showwarning = before
