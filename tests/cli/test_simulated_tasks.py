"""`python -m hybridtrain simulate task=...`: real gradients of configured tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtrain.cli.commands.simulate import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_losses_of_several_strategies_are_shown_against_virtual_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    options = ["task=parabola", "optimizer.lr=0.1", "workers=2", "strategy=hybrid,ssp:lead=1"]
    options += ["mini_batches=200", "network.bandwidth=1000", "correction=polynomial"]
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html")}
    options += [f"json={files['json']}", f"html={files['html']}"]
    assert main(options) == 0
    text = capsys.readouterr()
    assert "loss" in text.out and text.err == ""
    rows = json.loads(files["json"].read_text())
    for row in rows:
        times, losses = zip(*row["loss"], strict=True)
        assert list(times) == sorted(times) and len(times) >= 100
        assert losses[-1] < 0.5 * losses[0]
        assert row["network_share"] > 0.03, "16 parameters, 64 bytes, each way"
    assert rows[0]["samples"] == 100 * 50, "the set is divided among the workers"
    page = files["html"].read_text()
    assert "Loss against virtual time" in page
    assert "Loss against what workers have handed over" in page
    assert main([x for x in options if not x.startswith("html")]) == 0
    again = json.loads(files["json"].read_text())
    assert [r["loss"] for r in again] == [r["loss"] for r in rows], "to the bit"


def test_a_task_lasts_as_many_epochs_as_it_wants(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["task=parabola", "trainer.max_epochs=3", "workers=2", f"json={out}"]
    for length, passes in (([], 3), (["mini_batches=10"], 5)):
        assert main([*options, *length]) == 0
        assert [row["samples"] for row in json.loads(out.read_text())] == [passes * 50] * 2


@pytest.mark.parametrize(
    ("workers", "steps"), [(60, 200), pytest.param(200, 800, marks=pytest.mark.slow)]
)
def test_many_workers_learn_in_one_process(workers: int, steps: int, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits need the extra `vision`")
    out = tmp_path / "out.json"
    options = ["task=digits", "data.batch_size=2", f"workers={workers}", "strategy=async"]
    assert main([*options, f"mini_batches={steps}", f"json={out}"]) == 0
    (row,) = json.loads(out.read_text())
    assert row["samples"] == 2 * steps and row["staleness_mean"] > 20


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["task=digitz"], "there is no task 'digitz' (did you mean digits?)"),
        (["task=parabola", "model.hiden=3"], "did you mean hidden?"),
        (
            ["task=parabola", "optimizer.lr=fast"],
            "optimizer.lr=fast was given; it must be a number",
        ),
        (["task=parabola", "batch_size=3"], "the task itself has a batch size (data.batch_size="),
        (["task=parabola", "parameters=3"], "the task itself has a number of parameters"),
        (["task=parabola", "trainer.accumulate_grad_batches=2"], "every mini-batch is pushed"),
        (["task=parabola", "correction=none"], "correction='none' was given"),
        (["correction=polynomial"], "correction=polynomial was given without task="),
        (["task=own", "model._target_=no.such.Module"], "no module 'no'"),
    ],
)
def test_bad_input_is_one_line_on_standard_error(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.slow
def test_without_a_task_nothing_of_lightning_is_imported() -> None:
    code = (
        "import sys; from hybridtrain.cli.commands.simulate import main; "
        "main(['mini_batches=50']); "
        "print({'pytorch_lightning', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip().endswith("set()"), done.stdout + done.stderr


@pytest.mark.slow
def test_an_experiment_says_how_it_is_to_be_simulated(tmp_path: Path) -> None:
    """The notebook's toy in its first minutes; and what is given counts more."""
    out = tmp_path / "out.json"
    options = ["experiment=async_local_sgd", "mini_batches=300", "data.dimensions=16"]
    assert main([*options, f"json={out}"]) == 0
    window, endless = json.loads(out.read_text())
    assert window["workers"] == 4 and window["updates"] == 13
    assert endless["staleness_max"] == 0 and endless["updates"] == 3
    assert endless["seconds"] == pytest.approx(3.33 * 20 * 3 + 0.75 * 20, rel=0.1)
    sent = [n_bytes for n_bytes, _ in endless["loss_over_bytes"]]
    assert sent == sorted(sent) and sent[0] == 0.0 < sent[-1] <= endless["sent_bytes"]
    assert main([*options, "strategy=async", "exchange=null", "update=null", f"json={out}"]) == 0
    assert [row["strategy"] for row in json.loads(out.read_text())] == ["async"]


def test_null_leaves_out_what_an_experiment_says(tmp_path: Path) -> None:
    """Else nothing could be said that contradicts it."""
    out = tmp_path / "out.json"
    options = ["experiment=local_sgd_bytes", "strategy=async", "workers=4", "seconds=8"]
    own = ["compute.mean_s=null", "slower.7=null", "script=null", "network.bandwidth=null"]
    own += ["compute=constant", "compute.seconds_per_step=1,1,1,4"]
    assert main([*options, *own, f"json={out}"]) == 0
    (row,) = json.loads(out.read_text())
    assert row["samples"] == 8 * (7 + 7 + 7 + 1), "8 in a mini-batch, and 10 ms of latency each way"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["data_shards=4"], "data_shards=S and data_visit=N go together"),
        (["data_visit=4", "data_shards=4"], "with task=..., whose data are cut"),
        (["update=sgd:lr=1"], "update=sgd:lr=1 was given without task=..."),
        (["foresight=yes"], "foresight=yes was given; it must be true or false"),
        (["compute.seconds_per_step=1,2", "slower.1=3"], "was given with slower.1"),
        (["compute.seconds_per_step=1,fast"], "compute.seconds_per_step=fast was given"),
        (["compute.seconds_per_step=1,0"], "compute.seconds_per_step=0 was given"),
        (["compute.seconds_per_step=1"], "seconds_per_step=[1] was given with workers=2"),
        (["compute.seconds_per_step=1,2,3"], "seconds_per_step=[1, 2, 3] was given with workers=2"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["workers=2", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
