"""One run through the command line: what it leaves behind and how it ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridtrain.cli.telemetry.summary import Summary, lines
from hybridtrain.report.history import read_history
from tests.cli.conftest import Command, summary
from tests.cli.tiny import TINY, N
from tests.picking import by_default

KEYS = {
    *("strategy", "workers", "device", "updates", "samples", "samples_per_s", "wall_s"),
    *("train_s", "started", "effective_batch", "waiting_share", "staleness", "lead", "dropped"),
    *("cores", "cpu_s"),
    *(
        "left_out",
        "metrics",
        "checkpoint",
        "exit",
        "error",
        "slow",
        "advice",
        "unsaved",
        "resumed",
        "handed_over",
        "hosts",
        "device_memory",
        "total",
        "awaited_share",
        "step_s",
    ),
}


@pytest.mark.parametrize(
    ("strategy", "updates"),
    by_default([("hybrid", 12), ("async", 24), ("ddp", 12)], ("hybrid", 12)),
)
def test_a_run_leaves_summary_checkpoint_and_logs_in_its_directory(
    command: Command, strategy: str, updates: int
) -> None:
    result = command(*TINY, f"strategy={strategy}", "trainer.devices=2", "hydra.run.dir=here")
    assert (result.code, result.err) == (0, "")
    found = summary("here")
    assert set(found) == KEYS
    assert found["strategy"] == strategy
    assert (found["workers"], found["device"], found["exit"]) == (2, "cpu", 0)
    assert found["updates"] == updates
    assert found["samples"] == 2 * N
    assert len(found["waiting_share"]) == (0 if strategy == "ddp" else 2), "0: not counted"
    assert 0 < found["train_s"] < found["wall_s"]
    assert found["samples_per_s"] > 0 and found["wall_s"] > 0
    assert Path(found["checkpoint"]).is_relative_to(Path("here").resolve())
    assert Path(found["checkpoint"]).is_file()
    assert Path("here/checkpoints/last.ckpt").is_file()
    assert sorted(x.name for x in Path().iterdir()) == ["here"]
    assert "tensorboard --logdir here" in result.out
    assert "Tip:" not in result.out


def test_the_test_sees_every_sample_once_whatever_the_number_of_workers(command: Command) -> None:
    command(*TINY, "trainer.devices=3", "hydra.run.dir=here")
    assert summary("here")["metrics"]["test/n"] == N


def test_loggers_receive_speed_waiting_staleness_and_learning_rate(command: Command) -> None:
    options = ["trainer.devices=2", "trainer.log_every_n_steps=1", "hydra.run.dir=here"]
    command(*TINY, *options, "logger=both")
    events = EventAccumulator("here/tensorboard").Reload()
    tags = set(events.Tags()["scalars"])
    assert {"samples_per_s", "waiting/worker_0", "waiting/worker_1"} <= tags
    assert {"staleness/mean", "staleness/max", "train/loss", "lr-SGD"} <= tags
    assert {"effective_batch", "lead/worker_0", "lead/worker_1", "dropped"} <= tags
    assert "samples_per_s" in Path("here/csv/metrics.csv").read_text()


def test_tensorboard_shows_how_stale_the_gradients_were(command: Command) -> None:
    options = ["trainer.devices=2", "trainer.log_every_n_steps=1", "hydra.run.dir=here"]
    command(*TINY, *options, "strategy=async", "callbacks.monitor.log_every_s=0")
    events = EventAccumulator("here/tensorboard", {"histograms": 0}).Reload()
    shown = [x.histogram_value for x in events.Histograms("staleness")]
    known = summary("here")["staleness"]
    assert sum(x.num for x in shown) == sum(known["histogram"].values()) == 24
    assert sum(x.sum for x in shown) / 24 == pytest.approx(known["mean"], abs=1e-4)


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async", "ddp"], "async"))
def test_a_run_leaves_its_course_whatever_its_loggers(command: Command, strategy: str) -> None:
    options = ["trainer.devices=2", "logger=none", "hydra.run.dir=here"]
    command(*TINY, *options, f"strategy={strategy}")
    course, found = read_history(Path("here")), summary("here")
    columns = course.columns
    assert course.bad == 0
    assert (columns["updates"][-1], columns["samples"][-1]) == (found["updates"], 2 * N)
    assert columns["train_s"] == sorted(columns["train_s"])
    assert all(a < b for a, b in zip(columns["train_s"], columns["wall_s"], strict=True))
    assert [x for _, x in zip(*course.points("epoch", "val/size"), strict=True)] != []
    assert course.points("epoch", "train/loss")[0] == [0, 1], "each mean in its epoch's row"
    assert columns["train_s"][-1] == pytest.approx(found["train_s"], abs=1e-3)
    assert "staleness_mean" not in columns or strategy != "ddp"
    assert all(loss > 0 for loss in course.points("samples", "train_loss")[1])


@pytest.mark.slow
def test_the_loss_in_the_course_is_that_of_a_mini_batch_however_many_are_accumulated(
    command: Command,
) -> None:
    still = ["model.lr=0.0", f"data.batch_size={N}", "trainer.max_epochs=4", "hydra.run.dir=here"]
    command(*TINY[:2], TINY[3], *still, "trainer.accumulate_grad_batches=2", "logger=none")
    losses = read_history(Path("here")).points("updates", "train_loss")[1]
    expected = summary("here")["metrics"]["train/loss"]
    assert losses and losses == [pytest.approx(expected, rel=1e-5)] * len(losses)


@pytest.mark.parametrize(
    "option", by_default(["logger=none", "callbacks=none", "callbacks.lr=null"], "callbacks=none")
)
def test_logger_and_callbacks_can_be_left_out(command: Command, option: str) -> None:
    result = command(*TINY, option, "hydra.run.dir=here")
    assert (result.code, result.err) == (0, "")
    assert summary("here")["exit"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    by_default(
        ["trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false"],
        "trainer.enable_checkpointing=false",
    ),
)
def test_the_trainers_switches_turn_our_callbacks_off(command: Command, option: str) -> None:
    assert command(*TINY, option, "hydra.run.dir=here").code == 0
    assert (summary("here")["checkpoint"] is None) == ("checkpointing" in option)


@pytest.mark.slow
def test_without_a_test_there_is_no_metric_of_it_and_nothing_has_failed(command: Command) -> None:
    result = command(*TINY, "task.metric=test/n", "test=false", "hydra.run.dir=here")
    assert (result.code, result.err) == (0, "")
    assert "test/n" not in summary("here")["metrics"]


def test_options_of_a_users_own_module_need_no_plus(command: Command) -> None:
    command(*TINY, "model.width=5", "hydra.run.dir=here")
    saved = Path("here/.hydra/config.yaml").read_text()
    assert "width: 5" in saved
    assert "name: own" in saved


def test_a_failing_module_shows_its_traceback_and_leaves_a_summary(command: Command) -> None:
    result = command(*TINY, "model.fail_at=3", "trainer.devices=2", "hydra.run.dir=here")
    assert result.code == 1
    assert "this module fails on purpose" in result.err
    assert "in training_step" in result.err  # the user's code, not only ours
    assert summary("here")["exit"] == 1
    assert "Failed after" in result.out


@pytest.mark.parametrize("strategy", by_default(["hybrid", "ddp"], "hybrid"))
def test_training_goes_on_from_a_checkpoint(command: Command, strategy: str) -> None:
    first = [*TINY, f"strategy={strategy}", "hydra.run.dir=first"]
    assert command(*first).code == 0
    more = [*TINY, f"strategy={strategy}", "trainer.max_epochs=5", "hydra.run.dir=second"]
    assert command(*more, "ckpt=first/checkpoints/last.ckpt").code == 0
    assert summary("second")["checkpoint"].endswith("epoch=4-step=60.ckpt")


@pytest.mark.slow
def test_test_only_tests_the_checkpoint_and_trains_nothing(command: Command) -> None:
    command(*TINY, "hydra.run.dir=first")
    ckpt = summary("first")["checkpoint"]
    assert "=" in ckpt  # as Lightning names them; Hydra alone would refuse it unquoted
    quoted = command(*TINY, f"ckpt='{ckpt}'", "test_only=true", "hydra.run.dir=quoted")
    assert (quoted.code, quoted.err) == (0, "")
    result = command(*TINY, f"ckpt={ckpt}", "test_only=true", "hydra.run.dir=second")
    assert (result.code, result.err) == (0, "")
    found = summary("second")
    assert found["metrics"] == {"test/n": N}
    assert found["updates"] == 0


@pytest.mark.slow
def test_two_runs_of_the_same_second_have_their_own_directories(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hydra.core.utils as hydra_utils

    class Frozen(hydra_utils.datetime):  # type: ignore[misc,name-defined]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2030, 1, 1)

    monkeypatch.setattr(hydra_utils, "datetime", Frozen)
    for _ in range(2):
        assert command(*TINY, "trainer.max_epochs=1").code == 0
    names = [x.name for x in Path("outputs/2030-01-01").iterdir()]
    assert len(names) == 2
    assert all(re.fullmatch(r"00-00-00-[0-9a-f]{4}", x) for x in names)


@pytest.mark.parametrize(
    ("saved", "shown"), [(0, []), (3000, ["handed over  1000 bytes, 3000 saved: 4.0 times fewer"])]
)
def test_bytes_are_printed_where_some_were_saved(saved: int, shown: list[str]) -> None:
    told = Summary(
        strategy="local_sgd", workers=2, device="cpu",
        handed_over={"sent_bytes": 1000, "saved_bytes": saved},
    )  # fmt: skip
    found = [line.strip() for line in lines(told, Path("here"), tensorboard=False)]
    assert [line for line in found if line.startswith("handed over")] == shown


def test_hosts_are_printed_where_there_were_several() -> None:
    one = {"workers": 1, "waiting_share": 0.25, "sent": 1234567, "received": 20000}
    told = Summary(strategy="hybrid", workers=2, device="cpu", hosts=[one, one])
    found = lines(told, Path("here"), tensorboard=False)
    wanted = "  host 1       1.235 MB sent, 0.02 MB received; its workers waited 25.0 %"
    assert [line.split() for line in found if "host 1" in line] == [wanted.split()]
    assert not any("host" in x for x in lines(on_gpu({}), Path("here"), tensorboard=False))


def test_without_a_terminal_progress_is_plain_lines(command: Command) -> None:
    result = command(*TINY, "callbacks.progress.line_every_s=0", "trainer.devices=2")
    lines = [x for x in result.out.splitlines() if x.startswith("epoch ")]
    assert len(lines) > 2
    assert re.search(r"epoch 2/2  .*loss \S+  samples/s \S+  workers 2", lines[-1])
    assert "\x1b" not in result.out


def test_the_live_bar_shows_loss_speed_and_workers() -> None:
    import pytorch_lightning as pl

    from hybridtrain.cli.telemetry.monitor import RunMonitor
    from hybridtrain.cli.telemetry.progress import LiveProgress
    from tests.cli.tiny import TinyData, TinyModule

    shown: list[dict[str, Any]] = []

    class Watched(LiveProgress):
        def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
            shown.append(super().get_metrics(trainer, pl_module))
            return shown[-1]

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Watched(), RunMonitor()],
    )
    trainer.fit(TinyModule(), datamodule=TinyData())
    assert {"loss", "samples/s", "workers"} <= set(shown[-1])


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_and_another_others(command: Command) -> None:
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        command(*TINY, f"seed={seed}", "trainer.devices=2", f"hydra.run.dir={name}")
        losses.append(summary(name)["metrics"]["train/loss"])
    assert losses[0] == losses[1] != losses[2]


def on_gpu(memory: dict[str, list[int]]) -> Summary:
    return Summary(strategy="hybrid", workers=2, device="cuda", device_memory=memory)


def test_the_summary_says_how_many_such_workers_fit_on_a_device() -> None:
    memory = {"needed_bytes": [2**31, 3 * 2**30], "total_bytes": [80 * 2**30] * 2}
    told = "\n".join(lines(on_gpu(memory), Path("here"), False))
    assert "2.00, 3.00 GiB needed at most, worker by worker, of a device's 80.00; 26 such" in told
    memory["needed_bytes"][0] = 0  # nobody knows
    told = "\n".join(lines(on_gpu(memory), Path("here"), False))
    assert "GiB" not in told
