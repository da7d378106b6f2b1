"""Checkpoints that are written while training goes on are those that all would have waited for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from hybridtrain import HybridStrategy, StepProfiler
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing import checkpoint_io
from hybridtrain.lightning.checkpointing.checkpoint_io import WholeCheckpointIO
from hybridtrain.lightning.checkpointing.checkpoint_writing import may_come_later, reads_at_once
from hybridtrain.util.files import fault_of, write_whole
from tests.lightning.test_profile import profile, spans
from tests.lightning.toys import Regression, fit, regression_data
from tests.picking import by_default

STEPS = [0]  # of this process


class Counting(Regression):
    """Has state of every kind: moments, a buffer, tied weights. Counts its steps."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.Adam(parameters, lr=0.01))
        self.register_buffer("seen", torch.zeros(()))
        self.again = self.net[0]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        STEPS[0] += 1
        self.seen += len(batch[0])
        return super().training_step(batch, batch_idx)


def slowly(path: Path, content: Any) -> None:
    """Steps are quicker."""
    time.sleep(0.02)
    write_whole(path, content)


def when_training_has_gone_on(path: Path, content: Any) -> None:
    """By two steps, or to its end."""
    begun, deadline = STEPS[0], time.monotonic() + 20
    while STEPS[0] < min(begun + 2, 18):
        if time.monotonic() > deadline:
            raise TimeoutError("nobody trains while the checkpoint is written")
        time.sleep(0.001)
    write_whole(path, content)


def trained(folder: Path, checkpoint: str, policy: str = "hybrid", **options: Any) -> Any:
    """A run that keeps many files, deletes some, and writes the last one ever anew."""
    STEPS[0] = 0
    keep = ModelCheckpoint(
        folder, filename="{step}", monitor="train/loss", save_top_k=2, every_n_train_steps=1
    )
    newest = ModelCheckpoint(
        folder, filename="new", monitor="train/loss", save_top_k=-1, every_n_train_steps=4
    )
    newest.CHECKPOINT_NAME_LAST = "end"
    newest.save_last = True
    return fit(
        HybridStrategy(policy, checkpoint=checkpoint),
        2,
        4,
        Counting,
        callbacks=[keep, newest],
        enable_checkpointing=True,
        **options,
    )


def same(one: Any, other: Any, where: str = "") -> None:
    """Equal in every tensor's bits and in everything else, but for names of folders."""
    assert type(one) is type(other), where
    match one:
        case torch.Tensor():
            assert one.dtype == other.dtype and torch.equal(one, other), where
        case dict():
            assert list(map(base, one)) == list(map(base, other)), where
            for (key, value), twin in zip(one.items(), other.values(), strict=True):
                same(value, twin, f"{where}.{key}")
        case list() | tuple():
            assert len(one) == len(other), where
            for number, (value, twin) in enumerate(zip(one, other, strict=True)):
                same(value, twin, f"{where}[{number}]")
        case str():
            assert base(one) == base(other), where
        case _:
            assert one == other, where


def base(name: Any) -> Any:
    """Without the run's folder."""
    return name.replace("/now", "").replace("/later", "") if isinstance(name, str) else name


def test_files_are_the_same_to_the_bit_though_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "now", "blocking")
    monkeypatch.setattr(checkpoint_io, "write_whole", slowly)
    trained(tmp_path / "later", "background")
    names = sorted(path.name for path in (tmp_path / "now").iterdir())
    assert sorted(path.name for path in (tmp_path / "later").iterdir()) == names
    assert len(names) == 2 + 4 + 1 and "new-v3.ckpt" in names
    for name in names:
        both = [torch.load(tmp_path / d / name, weights_only=True) for d in ("now", "later")]
        same(both[0], both[1], name)
        assert both[0]["optimizer_states"][0]["state"][0]["exp_avg"].abs().sum() > 0
        tied = both[1]["state_dict"]
        assert tied["again.weight"].data_ptr() == tied["net.0.weight"].data_ptr()


def test_training_goes_on_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_io, "write_whole", when_training_has_gone_on)
    STEPS[0] = 0
    now_and_then = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=6)
    strategy = HybridStrategy(checkpoint="background")
    fit(strategy, 2, 4, Counting, callbacks=[now_and_then], enable_checkpointing=True)
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", by_default(["async", "ssp", "hogwild"], "async"))
def test_free_running_workers_leave_whole_files_that_training_goes_on_from(
    policy: str, tmp_path: Path
) -> None:
    _, trainer = trained(tmp_path, "background", policy)
    steps = {path.name: torch.load(path, weights_only=True) for path in tmp_path.iterdir()}
    assert steps and all(content["state_dict"] for content in steps.values())
    before = trainer.global_step
    _, trainer = fit(
        HybridStrategy(policy, checkpoint="background"),
        2,
        4,
        Counting,
        max_epochs=4,
        ckpt_path=str(tmp_path / "end.ckpt"),
    )
    assert trainer.global_step > before


def writes_until(first: int, last: int) -> Any:
    """The disk is full, as it is said to be, from one file to another."""
    count = [0]

    def write(path: Path, content: Any) -> None:
        count[0] += 1
        if first <= count[0] <= last:
            raise OSError(28, "No space left on device")
        write_whole(path, content)

    return write


@pytest.mark.parametrize("how", ["blocking", "background"])
@pytest.mark.parametrize("save_last", by_default([True, "link"], "link"))
def test_a_full_disk_ends_no_run_and_what_was_missed_is_known_at_the_end(
    how: str, save_last: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_io, "write_whole", writes_until(2, 1000))
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_last=save_last)
    strategy = HybridStrategy(checkpoint=how)
    _, trainer = fit(strategy, 2, 4, Counting, callbacks=[keep], enable_checkpointing=True)
    assert trainer.global_step == 18
    unsaved = strategy.keeping.unsaved
    assert unsaved.refused and unsaved.failures >= 3
    assert "No space left on device" in unsaved.lost.values()
    assert str(tmp_path / "step=4.ckpt") not in unsaved.lost
    assert (tmp_path / "step=4.ckpt").is_file(), "nothing is deleted that nothing has replaced"


@pytest.mark.parametrize("root", ["/proc/nope", "full"])
def test_what_was_never_written_is_no_best_model_and_a_program_can_read_why(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if root == "full":
        monkeypatch.setattr(checkpoint_io, "write_whole", writes_until(2, 1000))
        root = str(tmp_path)
    callbacks: list[Callback] = [
        ModelCheckpoint(filename="{step}", monitor="train/loss", save_top_k=2, save_last=True)
    ]
    options = {"callbacks": callbacks, "enable_checkpointing": True, "default_root_dir": root}
    _, trainer = fit(HybridStrategy(), 2, 4, Counting, **options)
    keep = trainer.checkpoint_callback
    assert isinstance(keep, ModelCheckpoint)
    paths = {keep.best_model_path, keep.last_model_path, keep.kth_best_model_path}
    assert all(Path(path).is_file() for path in {*paths, *keep.best_k_models} - {""})
    assert bool(keep.best_model_path) == bool(keep.best_k_models)
    if keep.best_k_models:
        assert keep.best_model_score == min(keep.best_k_models.values())
    if root == "/proc/nope":
        assert (paths, keep.best_k_models) == ({""}, {})
    unsaved = trainer.strategy.run_stats()["unsaved"]
    assert unsaved == trainer.strategy.keeping.unsaved.lost and unsaved
    assert all(isinstance(reason, str) for reason in unsaved.values())


def test_when_there_is_room_again_checkpoints_are_written_and_old_ones_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_io, "write_whole", writes_until(2, 3))
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3)
    strategy = HybridStrategy(checkpoint="background")
    fit(strategy, 2, 4, Counting, callbacks=[keep], enable_checkpointing=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step=18.ckpt"]
    assert (strategy.keeping.unsaved.failures, strategy.keeping.unsaved.lost) == (2, {})
    assert strategy.run_stats()["unsaved"] == {}


def test_a_directory_that_is_gone_for_a_while_ends_no_run(tmp_path: Path) -> None:
    """Whoever may do everything (root) is stopped by no file mode, so a file is in the way."""
    folder, away = tmp_path / "kept", tmp_path / "away"

    class Mischief(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.is_global_zero and trainer.global_step == 7:
                folder.rename(away)
                folder.touch()

    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_last=True)
    strategy = HybridStrategy(checkpoint="blocking")
    callbacks: list[Callback] = [Mischief(), keep]
    _, trainer = fit(strategy, 2, 4, Counting, callbacks=callbacks, enable_checkpointing=True)
    assert trainer.global_step == 18
    assert {Path(name).name for name in strategy.keeping.unsaved.lost} >= {"last.ckpt"}
    assert all(fault_of(path) is None for path in away.iterdir())


def test_the_end_of_fit_waits_so_the_last_and_the_best_are_there(tmp_path: Path) -> None:
    module, trainer = trained(tmp_path, "background")
    best = trainer.checkpoint_callback.best_model_path
    assert Path(best).is_file()
    assert not list(tmp_path.glob(".*"))
    loader = torch.utils.data.DataLoader(regression_data(), 4)
    trainer.test(module, loader, ckpt_path=best, verbose=False)


def test_an_interrupted_run_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = iter([True])

    def interrupting(path: Path, content: Any) -> None:
        if STEPS[0] >= 3 and next(once, False):  # training may have gone on since the third
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.05)
        write_whole(path, content)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(checkpoint_io, "write_whole", interrupting)
    try:
        with pytest.raises(SystemExit):
            trained(tmp_path, "background", max_epochs=100)
    finally:
        signal.signal(signal.SIGINT, before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert "interrupted.ckpt" in names and not any(name.startswith(".") for name in names)
    for path in files:
        assert torch.load(path, weights_only=True)["state_dict"]


def test_whoever_saves_a_checkpoint_himself_finds_it_when_he_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Saving(Counting):
        def on_train_batch_end(self, *_: Any) -> None:
            path = tmp_path / f"mine-{self.global_step}.ckpt"
            self.trainer.save_checkpoint(path)
            if self.trainer.is_global_zero:
                assert path.is_file()

    strategy = HybridStrategy(checkpoint="background")
    fit(strategy, 2, 12, Saving, max_epochs=1)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_checkpoint_is_refused_or_where_it_is_the_last_passed_over(
    tmp_path: Path,
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_last=True)
    fit("hybrid", 2, 4, Counting, callbacks=[keep], enable_checkpointing=True)
    damaged = tmp_path / "last-v1.ckpt"
    content = bytearray((tmp_path / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)  # the newest
    with pytest.raises(UserError, match="but the checksum of its"):
        fit("hybrid", 2, 4, Counting, ckpt_path=str(damaged), max_epochs=4)
    again = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_last=True)
    options: dict[str, Any] = {"callbacks": [again], "enable_checkpointing": True}
    _, trainer = fit("hybrid", 2, 4, Counting, ckpt_path="last", max_epochs=4, **options)
    assert trainer.global_step == 24
    before = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert before["global_step"] == 24, "it has gone on from the one before"


def test_optimizers_states_travel_to_the_worker_that_saves_them_and_to_no_other(
    tmp_path: Path,
) -> None:
    trained(tmp_path / "now", "blocking", profiler=StepProfiler(tmp_path / "profile", quiet=True))
    workers = profile(tmp_path / "profile")["workers"]
    assert "snapshot" in spans(workers["0"]) and "snapshot" not in spans(workers["1"])


def test_an_unknown_way_of_writing_checkpoints_is_refused() -> None:
    with pytest.raises(UserError, match=r"checkpoint='soon' was given; .* blocking or background"):
        HybridStrategy(checkpoint="soon")


# ---- whose files may come later -----------------------------------------------------------------


class Uploading(ModelCheckpoint):
    """Somebody's own, which does something with the file."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)


def test_what_may_be_looked_at_right_away_is_waited_for(tmp_path: Path) -> None:
    assert may_come_later(ModelCheckpoint(tmp_path, save_last=True))
    assert not may_come_later(ModelCheckpoint(tmp_path, save_last="link"))
    assert not may_come_later(Uploading(tmp_path))
    assert not reads_at_once(TensorBoardLogger(tmp_path))
    assert not reads_at_once(CSVLogger(tmp_path))

    class Wandb(CSVLogger):
        _log_model: Any = "all"

        def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None: ...

    assert reads_at_once(Wandb(tmp_path))
    Wandb._log_model = False
    assert not reads_at_once(Wandb(tmp_path))


# ---- the writer ---------------------------------------------------------------------------------


class Gate:
    """Writing that waits until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.begun = False, 0
        monkeypatch.setattr(checkpoint_io, "write_whole", self.write)

    def write(self, path: Path, content: Any) -> None:
        self.begun += 1
        deadline = time.monotonic() + 20
        while not self.open:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        write_whole(path, content)


def test_files_are_written_in_order_and_deleted_after_what_replaces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, old, new = WholeCheckpointIO(), tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    writer.save_checkpoint({"n": 1}, old)
    assert old.is_file()
    gate = Gate(monkeypatch)
    weights = torch.zeros(3)
    with writer.deferring():
        writer.save_checkpoint({"n": weights}, new)
        weights += 1  # training goes on
        writer.remove_checkpoint(old)
    assert old.is_file() and not new.exists()
    gate.open = True
    writer.wait_for(new)
    assert new.is_file()
    writer.wait_for(old)
    assert not old.exists()
    assert torch.equal(writer.load_checkpoint(new)["n"], torch.zeros(3))
    writer.teardown()
    writer.teardown()


def test_a_third_checkpoint_is_kept_in_memory_only_when_the_first_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writer = Gate(monkeypatch), WholeCheckpointIO()
    with writer.deferring():
        for number in range(2):
            writer.save_checkpoint({}, tmp_path / f"{number}.ckpt")
        assert not list(tmp_path.glob("*.ckpt"))
        gate.open = True
        writer.save_checkpoint({}, tmp_path / "2.ckpt")
        assert (tmp_path / "0.ckpt").is_file()
    writer.teardown()
    assert gate.begun == len(list(tmp_path.iterdir())) == 3


def test_what_cannot_be_saved_is_said_at_once_and_an_error_only_once(tmp_path: Path) -> None:
    writer = WholeCheckpointIO()
    with writer.deferring(), pytest.raises(AttributeError, match="local object"):
        writer.save_checkpoint({"f": lambda: None}, tmp_path / "a.ckpt")
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="b.ckpt could not be written"):
        with writer.deferring():
            writer.save_checkpoint({}, tmp_path / "file" / "b.ckpt")
        writer.teardown()
    writer.teardown()
    assert list(writer.unsaved.lost) == [str(tmp_path / "file" / "b.ckpt")]
    with pytest.raises(TypeError, match="storage_options"):
        writer.save_checkpoint({}, tmp_path / "c.ckpt", storage_options={})
