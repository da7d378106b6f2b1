"""A checkpoint belongs to nobody: hybrid, ddp, one device and plain torch go on from one another's.

All runs below see the same global mini-batches, so the uninterrupted run is one process's.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from tests.lightning.toys import Regression, fit, flat, make_trainer, regression_data
from tests.picking import by_default

GLOBAL_BATCH = 12
LIGHTNINGS = {
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "state_dict",
    "loops",
    "callbacks",
    "optimizer_states",
    "lr_schedulers",
    "hparams_name",
    "hyper_parameters",
}


class Two(Regression):
    """Two optimizers, stepped by hand, with a scheduler each: by steps, and by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters({"width": 16})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):  # type: ignore[arg-type]
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            schedule.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net[0].parameters(), lr=0.01)
        second = torch.optim.SGD(self.net[2].parameters(), lr=0.01, momentum=0.9)
        schedules = [
            torch.optim.lr_scheduler.OneCycleLR(first, 0.02, total_steps=40),
            torch.optim.lr_scheduler.ExponentialLR(second, 0.95),
        ]
        return [first, second], schedules


class Plateau(Regression):
    """A scheduler that follows a metric, and stops improving soon."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.5
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"},
        }


class Cycle(Regression):
    """A scheduler that counts steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, amsgrad=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


KINDS = [Two, Plateau, Cycle]


def callbacks(folder: Path, *more: str) -> list[pl.Callback]:
    found: list[pl.Callback] = [
        ModelCheckpoint(folder, monitor="val/loss", save_last=True, save_top_k=2),
        EarlyStopping("val/loss", patience=50),
    ]
    return found + ([EMAWeightAveraging(decay=0.5)] if "ema" in more else [])


def run(
    place: str, module: Any, folder: Path, epochs: int, ckpt: str | None = None, **options: Any
) -> pl.LightningModule:
    """Train somewhere, for so many epochs in all; leaves ``last.ckpt`` in the folder."""
    strategy, workers = {"one": ("auto", 1), "ddp": ("ddp_fork", 2)}.get(place, ("hybrid", 3))
    workers = 2 if place == "hybrid2" else workers
    data = regression_data(48)
    pl.seed_everything(7, verbose=False)
    made = module()
    trainer = make_trainer(
        strategy,
        workers,
        max_epochs=epochs,
        enable_checkpointing=True,
        **({"callbacks": callbacks(folder)} | options),
    )
    size = GLOBAL_BATCH // workers
    order: Any = DistributedSampler(data, 1, 0, seed=7) if workers == 1 else None
    loader = DataLoader(data, size, shuffle=workers > 1, sampler=order)
    trainer.fit(made, loader, DataLoader(data, 4), ckpt_path=ckpt)
    return made


def reference(place: str, kind: Any, folder: Path, epochs: int, *stops: int) -> Any:
    """The run that the others are to equal: not interrupted at ``stops``.

    But for ``Plateau``: Lightning writes a checkpoint before ReduceLROnPlateau has seen the epoch's
    metric, so where it has written it, or is to go on from it, that step is left out at each stop.
    """
    path, made = None, None
    for number, until in enumerate([*(stops if kind is Plateau else ()), epochs]):
        made = run(place, kind, folder / str(number), until, path)
        path = str(folder / str(number) / "last.ckpt")
    return made, torch.load(path, weights_only=True)  # type: ignore[arg-type]


DDP = """
    import sys, torch
    from functools import partial
    from pathlib import Path
    from tests.lightning import test_portability as t
    module, folder, epochs, ckpt = sys.argv[1:]
    made = t.run("ddp", getattr(t, module), Path(folder), int(epochs), ckpt or None)
    torch.save(made.state_dict(), Path(folder) / "final.pt")
"""


def run_ddp(module: Any, folder: Path, epochs: int, ckpt: str = "") -> dict[str, Any]:
    """In a process of its own, because of what ddp leaves behind. Returns the final weights."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DDP), module.__name__, folder, str(epochs), ckpt],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "final.pt", weights_only=True)


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "last.ckpt", weights_only=True)


def assert_same(one: Any, other: Any, rtol: float, path: str = "") -> None:
    """Two nested checkpoints say the same."""
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * 1e-2, msg=lambda m: path + m)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], rtol, f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, rtol, f"{path}[{index}]")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=max(rtol, 1e-12)), path
    else:
        assert one == other, path


@pytest.mark.parametrize("kind", by_default(KINDS, Two))
def test_a_checkpoint_holds_what_one_process_would_have_written_and_one_key_more(
    kind: Any, tmp_path: Path
) -> None:
    run("hybrid", kind, tmp_path, 3)
    run("one", kind, tmp_path, 3, callbacks=callbacks(other := tmp_path / "one"))
    ours, theirs = load(tmp_path), load(other)
    assert ours.keys() - theirs.keys() <= {"hybridtrain"}
    assert theirs.keys() <= ours.keys() <= LIGHTNINGS | {"hybridtrain"}
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(ours[part], theirs[part], 1e-4, part)
    counted = [states["loops"]["fit_loop"] for states in (ours, theirs)]
    for name in (name for name in counted[0] if "progress" in name and "val_loop" not in name):
        assert_same(counted[0][name], counted[1][name], 0.0, name)
    for name, state in theirs["callbacks"].items():
        kept = {k for k in state if "path" not in k and "models" not in k and k != "dirpath"}
        for key in kept:
            assert_same(ours["callbacks"][name][key], state[key], 1e-4, f"{name}[{key}]")


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", by_default(KINDS, Two))
@pytest.mark.parametrize(
    ("first", "second"), [("hybrid", "one"), ("one", "hybrid"), ("hybrid", "hybrid2")]
)
def test_the_continued_run_equals_the_uninterrupted_one(
    kind: Any, first: str, second: str, tmp_path: Path
) -> None:
    run(first, kind, tmp_path / "a", 2)
    path = str(tmp_path / "a" / "last.ckpt")
    continued = run(second, kind, tmp_path / "b", 5, path)
    stops = (2,) if "one" in (first, second) else ()
    whole, theirs = reference("one", kind, tmp_path / "c", 5, *stops)
    torch.testing.assert_close(flat(continued), flat(whole), rtol=1e-4, atol=1e-6)
    ours = load(tmp_path / "b")
    for part in ("optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_same(ours[part], theirs[part], 1e-4, part)


@pytest.mark.parametrize(
    "kind", [Two, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Plateau, Cycle))]
)
@pytest.mark.slow
def test_a_run_that_goes_on_under_ddp_and_back_equals_one_process(
    kind: Any, tmp_path: Path
) -> None:
    run("hybrid", kind, tmp_path / "a", 2)
    run_ddp(kind, tmp_path / "b", 4, str(tmp_path / "a" / "last.ckpt"))
    back = run("hybrid", kind, tmp_path / "c", 6, str(tmp_path / "b" / "last.ckpt"))
    whole, theirs = reference("one", kind, tmp_path / "d", 6, 2, 4)
    torch.testing.assert_close(flat(back), flat(whole), rtol=1e-4, atol=1e-6)
    for part in ("optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_same(load(tmp_path / "c")[part], theirs[part], 1e-4, part)


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_default(KINDS, Cycle))
@pytest.mark.parametrize(
    "precision", by_default(["32-true", "bf16-mixed", "bf16-true"], "bf16-true")
)
def test_a_run_resumed_with_the_same_workers_goes_on_to_the_bit(
    kind: Any, precision: str, tmp_path: Path
) -> None:
    """64-true is left out: Lightning restores its weights through float32, in any strategy."""
    options: dict[str, Any] = {"precision": precision}
    run("hybrid", kind, tmp_path / "a", 2, **options)
    path = str(tmp_path / "a" / "last.ckpt")
    continued = run("hybrid", kind, tmp_path / "b", 4, path, **options)
    whole = run("hybrid", kind, tmp_path / "c", 4, **options)
    assert torch.equal(flat(continued), flat(whole))
    ours, theirs = load(tmp_path / "b"), load(tmp_path / "c")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(ours[part], theirs[part], 0.0, part)
    expected = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {tensor.dtype for tensor in ours["state_dict"].values()} == {expected}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", by_default(KINDS, Plateau))
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_the_caller_too_can_write_a_checkpoint_after_training(
    kind: Any, strategy: str, tmp_path: Path
) -> None:
    data = regression_data(48)
    module, trainer = kind(), make_trainer(strategy, 2, max_epochs=2)
    trainer.fit(module, DataLoader(data, 6), DataLoader(data, 4))
    trainer.validate(module, DataLoader(data, 4), verbose=False)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = load(tmp_path)
    assert saved["global_step"] == trainer.global_step > 0
    rebuilt = module.configure_optimizers()
    if kind is Plateau:
        optimizers, schedules = [rebuilt["optimizer"]], [rebuilt["lr_scheduler"]]
    else:
        optimizers, schedules = rebuilt
    assert len(saved["optimizer_states"]) == len(optimizers)
    for optimizer, state in zip(optimizers, saved["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(optimizer.state[p] for p in parameters)
    assert len(saved["lr_schedulers"]) == len(schedules)
    again = make_trainer("auto", 1, max_epochs=3)
    again.fit(
        kind(), DataLoader(data, 12), DataLoader(data, 4), ckpt_path=str(tmp_path / "last.ckpt")
    )
    assert again.global_step > trainer.global_step
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    content = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in content and "state_dict" in content


@pytest.mark.slow
def test_an_average_of_the_weights_goes_on_too(tmp_path: Path) -> None:
    ema = partial(callbacks, tmp_path / "a", "ema")
    run("hybrid", Cycle, tmp_path / "a", 2, callbacks=ema())
    path = str(tmp_path / "a" / "last.ckpt")
    runs = {
        place: run(place, Cycle, tmp_path, 4, path, callbacks=callbacks(tmp_path / place, "ema"))
        for place in ("hybrid", "one")
    }
    whole = run("hybrid", Cycle, tmp_path, 4, callbacks=callbacks(tmp_path / "c", "ema"))
    assert torch.equal(flat(runs["hybrid"]), flat(whole))
    torch.testing.assert_close(flat(runs["one"]), flat(whole), rtol=1e-4, atol=1e-6)


PLAIN = """
    import sys
    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("hybridtrain", "pytorch_lightning", "lightning_fabric"):
                raise ImportError(f"{name} is not here")
    sys.meta_path.insert(0, Refuse())
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    path, epochs, out = sys.argv[1:]
    saved = torch.load(path, weights_only=True)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    net.load_state_dict({k.removeprefix("net."): v for k, v in saved["state_dict"].items()})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
    optimizer.load_state_dict(saved["optimizer_states"][0])
    schedule.load_state_dict(saved["lr_schedulers"][0])
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.pow(2).sum(1, keepdim=True))
    order = DistributedSampler(data, 1, 0, seed=7)
    for epoch in range(saved["epoch"] + 1, int(epochs)):
        order.set_epoch(epoch)
        for inputs, targets in DataLoader(data, 12, sampler=order):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    saved["state_dict"] = {f"net.{k}": v for k, v in net.state_dict().items()}
    saved["optimizer_states"] = [optimizer.state_dict()]
    saved["lr_schedulers"] = [schedule.state_dict()]
    torch.save(saved, out)
    assert not any("hybridtrain" in name for name in sys.modules)
"""


@pytest.mark.slow
def test_plain_torch_goes_on_without_us_and_without_lightning(tmp_path: Path) -> None:
    run("hybrid", Cycle, tmp_path, 2)
    script, out = tmp_path / "plain.py", tmp_path / "plain.pt"
    script.write_text(textwrap.dedent(PLAIN))
    done = subprocess.run(
        [sys.executable, script, tmp_path / "last.ckpt", "5", out],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    continued = torch.load(out, weights_only=True)
    run("one", Cycle, tmp_path, 5, callbacks=callbacks(tmp_path / "one"))
    whole = load(tmp_path / "one")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(continued[part], whole[part], 1e-4, part)


class Wide(Regression):
    """40,000 parameters, of which two are tied and some are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(200, 200)
        self.again = torch.nn.Linear(200, 200)
        self.again.weight = self.wide.weight
        self.turned = torch.nn.Parameter(torch.randn(4, 4).t())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        far = self.again(self.wide(batch[0].repeat(1, 50))).mean()
        turned = (batch[0] @ self.turned).mean()
        return super().training_step(batch, batch_idx) + far + turned


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_views_of_shared_memory_do_not_blow_up_the_file(make: Any, tmp_path: Path) -> None:
    module = lambda: Wide_of(make)  # noqa: E731
    sizes = []
    for place in ("hybrid", "one"):
        run(place, module, tmp_path, 1, callbacks=callbacks(tmp_path / place))
        sizes.append((tmp_path / place / "last.ckpt").stat().st_size)
        state = load(tmp_path / place)["state_dict"]
        assert state["wide.weight"].data_ptr() == state["again.weight"].data_ptr()
    assert sizes[0] < sizes[1] + 42_000  # what is left of the epoch, generators of three workers


def Wide_of(make: Any) -> Wide:
    module = Wide()
    module.make_optimizer = lambda p: make(p, lr=1e-3)
    return module


def test_loading_never_runs_code(tmp_path: Path) -> None:
    """A file that would run something on unpickling is refused by every strategy."""
    run("hybrid", Cycle, tmp_path, 1)
    content = load(tmp_path)
    trap = tmp_path / "ran"
    content["callbacks"]["Trap"] = Trap(str(trap))
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        fit("hybrid", 2, 6, Cycle, ckpt_path=str(tmp_path / "bad.ckpt"))
    assert not trap.exists()


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")
