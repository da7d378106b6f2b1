"""Every mistake is one line that says what is allowed, status 2, and no process is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Command, summary
from tests.cli.tiny import TINY, TinyModule
from tests.picking import by_default

CASES = [
    ("seed='${seed}'", ["seed='${seed}' was given", "cannot be resolved", "Recursive"]),
    ("seed='${oc.env:NOPE}'", ["seed='${oc.env:NOPE}' was given", "cannot be resolved", "'NOPE'"]),
    ("trainer.devices='${nope}'", ["trainer.devices=", "cannot be resolved", "'nope' not found"]),
    *(
        (f"{option}={10**21}", [f"{option}={10**21} was given", "a whole number from"])
        for option in ("trainer.devices", "trainer.max_steps", "strategy.workers_per_device")
    ),
    ("strategy.threads_per_worker=3000000000", ["a whole number from 1 to 1024, or auto"]),
    ("strategy=backup strategy.policy.k=3 trainer.devices=2", ["k=3", "2 workers", "1 to 2"]),
    ("strategy=backup strategy.policy.k=0", ["k=0", "from 1"]),
    ("strategy=diloco strategy.inside=async", ["inside", "known are hybrid, local_sgd"]),
    ("strategy=diloco strategy.inside={name:local_sgd,every:0}", ["every=0", "from 1"]),
    ("strategy=diloco strategy.inside={name:hybrid,every:2}", ["takes no parameters"]),
    ("strategy=backup strategy.policy.k=some", ["k=some", "auto"]),
    ("strategy=backup strategy.policy.c=3", ["c=3", "k=auto"]),
    ("strategy=backup strategy.policy.k=auto strategy.policy.c=-1", ["c=-1", "from 0"]),
    ("strategy=k_batch_async strategy.policy.k=-1", ["k=-1", "from 1"]),
    ("strategy=softsync strategy.policy.n=5 trainer.devices=4", ["n=5", "1 to 4"]),
    ("strategy=ssp strategy.policy.lead=-1", ["lead=-1", "from 0 on, or null"]),
    ("strategy=ssp strategy.policy.lead=0.5", ["lead=0.5"]),
    ("strategy=switch strategy.policy.at_update=0", ["at_update=0", "from 1"]),
    ("strategy=switch strategy.policy.at_update=5 strategy.policy.patience=9", ["either"]),
    (
        "strategy=switch strategy.policy.at_update=5 strategy.policy.then=synchronous",
        ["then=RoundRobin()", "cannot be a part"],
    ),
    ("strategy=switch strategy.policy.at_update=5 strategy.policy.then=asink", ["mean async?"]),
    ("strategy=hybrid strategy.policy=backupp", ["backupp", "mean backup?"]),
    (
        "strategy=hybird",
        ["no strategy 'hybird'", "mean hybrid?", "backup, ddp, diloco, downpour"],
    ),
    ("task=digit", ["no task 'digit'", "mean digits?", "parabola", "speech"]),
    ("trainer.devces=2", ["no key 'devces' in trainer", "mean devices?", "max_epochs"]),
    ("devices=2", ["mean trainer.devices?"]),
    ("optimizer.lrr=1", ["no key 'lrr' in optimizer", "mean lr?", "betas"]),
    ("+optimizer.lrr=1", ["torch.optim.Adam takes no argument 'lrr'", "mean lr?"]),
    ("model.hidden.x=1", ["model.hidden is a single value"]),
    (
        "strategy.policy.k=3",
        [
            "strategy.policy.k=3: strategy=hybrid takes no policy.k",
            "backup, k_async, k_batch_async, k_batch_sync do",
            "as in strategy=backup strategy.policy.k=3",
        ],
    ),
    (
        "strategy=ssp strategy.policy.k=3",
        ["strategy=ssp takes no policy.k", "as in strategy=backup"],
    ),
    (
        "optimizer=adam optimizer.momentum=0.9",
        ["optimizer=adam takes no momentum", "nesterov, rmsprop, sgd, sparse_momentum do"],
    ),
    ("trainer.strategy=ddp", ["write strategy="]),
    ("trainer.devices=0", ["trainer.devices=0", "from 1 to 4096", "auto"]),
    ("trainer.devices=-1", ["trainer.devices=-1", "from 1 to 4096", "all GPUs is auto"]),
    ("trainer.devices=eight", ["trainer.devices=eight", "from 1 to 4096"]),
    ("trainer.devices=MIG-1f2e", ["trainer.devices=MIG-1f2e", "CUDA_VISIBLE_DEVICES names"]),
    ("trainer.devices=[GPU-89ab]", ["trainer.devices=['GPU-89ab']", "CUDA_VISIBLE_DEVICES"]),
    ("trainer.devices=1.5", ["trainer.devices=1.5", "from 1 to 4096"]),
    ("trainer.devices=[0,1]", ["a list chooses GPUs"]),
    ("trainer.devices", ["cannot read 'trainer.devices'", "key=value"]),
    ("trainer.max_epochs=many", ["trainer.max_epochs=many", "whole number"]),
    ("trainer.max_epochs=-5", ["trainer.max_epochs=-5", "from -1 on"]),
    ("trainer.accelerator=tpu", ["auto, cpu, gpu or cuda"]),
    ("trainer.precision=33", ["16-mixed"]),
    ("trainer.profiler=magic", ["trainer.profiler=magic", "simple"]),
    ("trainer.enable_progress_bar=7", ["true, false or null"]),
    ("optimizer.lr=fast", ["optimizer.lr=fast", "must be a number"]),
    ("optimizer.lr=-1", ["torch.optim.Adam refused", "-1"]),
    ("optimizer.lr=inf", ["optimizer.lr=inf", "must be a number that is finite"]),
    (
        "trainer.num_nodes=3:1 strategy=async strategy.on_failure=continue",
        ["trainer.num_nodes=3:1 was given", "FROM:TO, for example 1:4"],
    ),
    (
        "model._target_=tests.cli.tiny.TinyModule optimizer.lr=0.5",
        ["optimizer.lr=0.5 was given", "nothing of the model refers to it", "${optimizer.lr}"],
    ),
    ("optimizer.eps=-.inf", ["optimizer.eps='-.inf'", "must be a number that is finite"]),
    ("model.hidden=0", ["model.hidden=0", "from 1 on"]),
    ("model.channels=[]", ["model.channels=[]", "(two)"]),
    ("callbacks.progress.line_every_s=-1", ["line_every_s=-1", "from 0 on"]),
    ("callbacks.monitor.log_every_s=-5", ["log_every_s=-5", "from 0 on"]),
    ("model.channels=3", ["must be a list"]),
    ("seed=lucky", ["seed=lucky", "whole number"]),
    ("data.batch_size=0", ["data.batch_size=0", "from 1 on"]),
    ("model._target_=nowhere.Module", ["no module 'nowhere'"]),
    ("model._target_=torch.nn.NoSuch", ["torch.nn.NoSuch", "cannot be imported"]),
    ("model._target_=torch.nn.Linear", ["also needs model.in_features"]),
    ("model._target_=torch.nn.ReLU", ["is no LightningModule"]),
    ("test_only=true", ["ckpt=PATH"]),
    ("ckpt=nowhere.ckpt", ["no such file"]),
    ("strategy.workers_per_device=0", ["workers_per_device"]),
    ("strategy.policy=sometimes", ["sometimes", "hybrid"]),
    ("--frobnicate", ["--frobnicate", "--help"]),
]


# One of each kind of check; the others go the same ways.
BY_DEFAULT = [
    *("strategy=backup strategy.policy.k=3 trainer.devices=2", "strategy=hybird"),
    *("trainer.devces=2", "+optimizer.lrr=1"),
    *("strategy.policy.k=3", "trainer.strategy=ddp", "trainer.devices=0"),
    "trainer.devices=MIG-1f2e",
    *("trainer.max_epochs=many", "trainer.precision=33", "optimizer.lr=-1", "seed=lucky"),
    *("model._target_=nowhere.Module", "model._target_=torch.nn.Linear", "ckpt=nowhere.ckpt"),
    *("strategy.workers_per_device=0", "--frobnicate", "seed='${seed}'"),
    "strategy.threads_per_worker=3000000000",
]


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("argument", "fragments"),
    by_default(CASES, *(case for case in CASES if case[0] in BY_DEFAULT)),
    ids=[x for x, _ in CASES],
)
def test_a_mistake_is_one_line_that_names_what_is_allowed(
    command: Command, argument: str, fragments: list[str]
) -> None:
    result = command("task=digits", "trainer.accelerator=cpu", *argument.split())
    assert result.code == 2
    assert result.complaint.startswith("hybridtrain: ")
    for fragment in fragments:
        assert fragment in result.complaint
    assert "Traceback" not in result.out


@pytest.mark.parametrize(
    "argument",
    by_default(
        ["task=own", "model=own task=digits", "-m task=own seed=1,2"], "-m task=own seed=1,2"
    ),
)
def test_task_own_or_model_own_without_a_class_says_how_to_name_one(
    command: Command, argument: str
) -> None:
    result = command(*argument.split())
    assert result.code == 2
    assert "model._target_=package.Class" in result.complaint
    assert "data._target_=package.Class" in result.complaint


def test_a_group_without_keys_says_so(command: Command) -> None:
    assert "There are none." in command("task=digits", "data=own", "data.x=1").complaint


def test_the_exit_status_reaches_the_shell() -> None:
    line = [sys.executable, "-m", "hybridtrain", "strategy=hybird"]
    done = subprocess.run(line, capture_output=True, text=True, env=_environment(), timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def test_more_gpus_than_exist_names_the_choices(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtrain.cli.validation.host_checks.count_gpus", lambda: 1)
    line = command("task=digits", "trainer.devices=4").complaint
    assert "this machine has 1 GPU;" in line
    assert "at most 1" in line
    assert "strategy.workers_per_device=N" in line
    assert "trainer.accelerator=cpu" in line
    listed = command("task=digits", "strategy=ddp", "trainer.devices=[0,3]").complaint
    assert "this machine has 1 GPU;" in listed
    assert "workers_per_device" not in listed


def test_a_gpu_that_does_not_exist_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtrain.cli.validation.host_checks.count_gpus", lambda: 0)
    line = command("task=digits", "trainer.accelerator=gpu").complaint
    assert "no usable CUDA device" in line
    assert "auto" in line


@pytest.mark.parametrize("sweep", [False, True])
def test_a_run_directory_that_cannot_be_written_is_refused_in_one_line(
    command: Command, tmp_path: Path, sweep: bool
) -> None:
    (tmp_path / "file").write_text("in the way")
    where = ("-m", "hydra.sweep.dir=file/x") if sweep else ("hydra.run.dir=file/x",)
    result = command(*where, "task=digits", "trainer.accelerator=cpu")
    assert result.code == 2
    assert "cannot be written" in result.complaint


class Explosive:
    """Unpickled, it would create a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


def test_a_checkpoint_with_code_is_refused_and_the_code_not_run(
    command: Command, tmp_path: Path
) -> None:
    torch.save({"state_dict": {}, "extra": Explosive()}, "bad.ckpt")
    result = command(*TINY, "ckpt=bad.ckpt")
    assert result.code == 2
    assert "contains code" in result.complaint
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content",
    by_default([b"", b"no checkpoint at all", b"PK\x03\x04 cut short"], b"PK\x03\x04 cut short"),
)
def test_a_corrupt_checkpoint_is_refused_in_one_line(
    command: Command, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "bad.ckpt").write_bytes(content)
    result = command(*TINY, "ckpt=bad.ckpt")
    assert result.code == 2
    assert "corrupt" in result.complaint


def test_a_checkpoint_cut_short_is_corrupt(command: Command, tmp_path: Path) -> None:
    torch.save({"state_dict": TinyModule().state_dict()}, "bad.ckpt")
    whole = (tmp_path / "bad.ckpt").read_bytes()
    (tmp_path / "bad.ckpt").write_bytes(whole[: len(whole) // 2])
    assert "corrupt" in command(*TINY, "ckpt=bad.ckpt").complaint


def test_a_checkpoint_of_another_model_names_the_differences(command: Command) -> None:
    torch.save({"state_dict": TinyModule(width=3).state_dict()}, "other.ckpt")
    result = command(*TINY, "ckpt=other.ckpt")
    assert result.code == 2
    assert "another model" in result.complaint
    assert "net.0.weight has shape (3, 1) instead of shape (1, 1)" in result.complaint


def test_a_file_without_weights_is_no_checkpoint(command: Command) -> None:
    torch.save({"weights": torch.zeros(2)}, "other.ckpt")
    assert "no Lightning checkpoint" in command(*TINY, "ckpt=other.ckpt").complaint


def test_a_metric_that_was_never_logged_lists_those_that_were(command: Command) -> None:
    result = command(*TINY, "task.metric=test/wer", "strategy=ddp")
    assert result.code == 2
    assert "test/wer" in result.complaint
    assert "train/loss" in result.complaint


def test_there_is_no_summary_of_a_run_that_never_began(command: Command) -> None:
    """The trainer is there already: what it is asked for is found out when it begins to fit."""
    asked = ["strategy=hogwild", "strategy.transport_dtype=bf16"]
    result = command(*TINY, *asked, "trainer.devices=2", "hydra.run.dir=here")
    assert result.code == 2 and "send no gradients" in result.complaint
    assert result.out == ""
    assert summary("here")["exit"] == 2


def test_a_missing_extra_says_how_to_get_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = command("task=digits", "trainer.accelerator=cpu")
    assert result.code == 2
    assert "pip install 'hybridtrain[vision]'" in result.complaint


class Declared(TinyModule):
    def __init__(self, dim: int = 8, rate: float | None = 0.1, name: str = "x") -> None:
        super().__init__(width=dim)


class Undeclared(TinyModule):
    def __init__(self, dim=8, choice=1) -> None:  # type: ignore[no-untyped-def]
        super().__init__(width=dim)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("Declared model.dim=eight", "model.dim=eight was given; it must be a whole number"),
        ("Declared model.dim=1.5", "model.dim=1.5 was given; it must be a whole number"),
        ("Declared model.rate=fast", "model.rate=fast was given; it must be a number, or null"),
        ("Undeclared model.dim=eight", "model.dim=eight was given, whose default is 8: "),
    ],
)
def test_text_for_a_number_of_the_users_class_is_one_line(
    command: Command, given: str, said: str
) -> None:
    result = command(*TINY[1:], *f"model._target_={__name__}.{given}".split(), "logger=none")
    assert result.code == 2 and said in result.complaint


@pytest.mark.parametrize(
    "given", ["Declared model.rate=null model.name=3", "Undeclared model.choice=auto"]
)
def test_what_the_users_class_takes_is_given_to_it(command: Command, given: str) -> None:
    options = f"model._target_={__name__}.{given} trainer.max_epochs=1 test=false".split()
    assert command(*TINY[1:], *options, "trainer.devices=1", "logger=none").code == 0
