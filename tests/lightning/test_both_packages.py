"""Trainers, modules and data of both of Lightning's packages; one of them in each process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtrain.lightning_package import (
    VARIABLE,
    decide,
    told_to_children,
    with_present_targets,
)

ROOT = Path(__file__).parents[2]
LIGHTNING = "import lightning as L"
OPTIONS = (
    "dict(accelerator='cpu', devices=2, max_epochs=1, limit_train_batches=4, logger=False,"
    "limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False,"
    "enable_model_summary=False)"
)
MODULE = """
import torch
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Data(L.LightningDataModule):
    def train_dataloader(self):
        set_ = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4))
        return torch.utils.data.DataLoader(set_, batch_size=2)
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = {key: each for key, each in os.environ.items() if key != VARIABLE}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**names, "OMP_NUM_THREADS": "1", **environment},
    )


def fits(before: str, strategy: str = "'hybrid'") -> str:
    fit = f"L.Trainer(strategy={strategy}, **{OPTIONS}).fit(Net(), datamodule=Data())"
    return f"{before}{MODULE}\n{fit}\n"


SAME = """
import pytorch_lightning, pytorch_lightning.callbacks.timer, lightning_fabric.utilities.seed
import lightning.pytorch, lightning.fabric, sys
assert pytorch_lightning is lightning.pytorch and lightning_fabric is lightning.fabric
assert pytorch_lightning.callbacks.timer is sys.modules["lightning.pytorch.callbacks.timer"]
assert pytorch_lightning.__spec__.name == "lightning.pytorch"
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(fits(f"{LIGHTNING}\nimport hybridtrain") + SAME, marks=pytest.mark.slow),
        pytest.param(fits(f"import hybridtrain\n{LIGHTNING}") + SAME, marks=pytest.mark.slow),
        # A third library has imported the other one first: the trainer decides.
        fits(f"import pytorch_lightning\n{LIGHTNING}\nimport hybridtrain") + SAME,
        pytest.param(
            fits(
                f"{LIGHTNING}\nfrom hybridtrain import HybridStrategy",
                "HybridStrategy(policy='async', start_method='fork')",
            )
            + SAME,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_lightning_trains_in_every_order_of_imports(code: str) -> None:
    done = python(code)
    assert done.returncode == 0, done.stderr


HOOK = """\
    def on_train_start(self):
        import pytorch_lightning
        assert isinstance(self.trainer, pytorch_lightning.Trainer)
"""


@pytest.mark.slow
def test_a_spawned_worker_uses_the_package_of_its_parent(tmp_path: Path) -> None:
    """Also where the script has imported both, and where functions import Lightning again."""
    script = tmp_path / "script.py"
    hook = """
    def on_train_start(self):
        import pytorch_lightning
        assert isinstance(self.trainer, pytorch_lightning.Trainer)
"""
    module = MODULE.replace(
        "    def training_step", f"{hook.strip(chr(10))}\n    def training_step"
    )
    strategy = "hybridtrain.HybridStrategy(start_method='spawn')"
    made = f"trainer = L.Trainer(strategy='async', **{OPTIONS})"
    fit = f"L.Trainer(strategy={strategy}, **{OPTIONS}).fit(Net(), datamodule=Data())"
    script.write_text(
        f"import pytorch_lightning\n{LIGHTNING}\nimport hybridtrain\n{module}\n"
        f"if __name__ == '__main__':\n    {made}\n    {fit}\n    print('trained')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip().endswith("trained"), done.stderr


SPAWNED = "HYBRIDTRAIN_SPAWNED_LIGHTNING"
MIXTURES = f"""
import pytorch_lightning as pl, lightning as L, hybridtrain
from pytorch_lightning.demos.boring_classes import BoringModel
OPTIONS = {OPTIONS}
def callback():
    trainer = pl.Trainer(strategy="hybrid", callbacks=[L.pytorch.callbacks.Timer()], **OPTIONS)
    trainer.fit(BoringModel())
for attempt in (
    lambda: L.Trainer(strategy=hybridtrain.HybridStrategy(), **OPTIONS),
    lambda: L.Trainer(strategy="async", **OPTIONS),
    callback,
):
    try:
        attempt()
    except ValueError as error:
        print(type(error).__name__, error)
"""


def test_spawned_processes_are_told_of_the_package_and_the_environment_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for former in (None, "lightning"):  # such as in a process that was spawned itself
        if former is not None:
            monkeypatch.setenv(SPAWNED, former)
        before = dict(os.environ)
        with told_to_children():
            assert os.environ[SPAWNED] == decide()
        assert dict(os.environ) == before


@pytest.mark.slow
def test_a_mixture_of_both_packages_is_one_line() -> None:
    done = python(MIXTURES)
    said = done.stdout.strip().splitlines()
    assert len(said) == 3, done.stderr
    for line, named in zip(said, ("the Trainer", "the Trainer", "Timer"), strict=True):
        assert line.startswith(f"UserError {named} is of the package 'lightning'")
        assert f"{VARIABLE}=lightning" in line


@pytest.mark.wide
def test_an_unknown_package_in_the_environment_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridtrain", "task=digits"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: "torchlight"},
    )
    assert done.returncode == 2
    assert f"{VARIABLE}=torchlight" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_configurations_name_the_classes_of_the_package_in_use() -> None:
    """This process uses pytorch_lightning, whatever the run had that left the configuration."""
    config = {
        "trainer": {"_target_": "lightning.Trainer", "devices": 2},
        "callbacks": [{"_target_": "lightning.pytorch.callbacks.Timer"}],
        "model": {"_target_": "lightning_bolts.Net", "name": "lightning.pytorch"},
    }
    present = with_present_targets(config)
    if os.environ.get(VARIABLE) == "lightning":
        assert present == config
        return
    assert present["trainer"] == {"_target_": "pytorch_lightning.Trainer", "devices": 2}
    assert present["callbacks"] == [{"_target_": "pytorch_lightning.callbacks.Timer"}]
    assert present["model"] == config["model"]


@pytest.mark.slow
def test_the_command_line_takes_the_package_of_the_users_module(tmp_path: Path) -> None:
    """A run, its replay, and a resume with the other package."""
    code = f"{LIGHTNING}\n{MODULE}"
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "other.py").write_text(code.replace("lightning as L", "pytorch_lightning as L"))
    environment = {key: each for key, each in os.environ.items() if key != VARIABLE}

    def command(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    own = ("task=own", "model._target_=mine.Net", "data._target_=mine.Data", "trainer.devices=2")
    command("hybridtrain", *own, "trainer.max_epochs=1", "run_dir=run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 4
    assert "equal to the bit" in command("hybridtrain", "replay", "run=run")
    checkpoint = next((tmp_path / "run" / "checkpoints").glob("*.ckpt"))
    other = (*own[:1], "model._target_=other.Net", "data._target_=other.Data", own[3])
    command("hybridtrain", *other, f"ckpt={checkpoint}", "trainer.max_epochs=2", "run_dir=again")
    assert json.loads((tmp_path / "again" / "summary.json").read_text())["updates"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    ["accumulation and hybrid-3", pytest.param("hybrid", marks=pytest.mark.slow)],
)
def test_parity_holds_under_lightning_as_well(chosen: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/parity/test_parity.py", "-k", chosen],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, VARIABLE: "lightning"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout or "%]" in done.stdout
