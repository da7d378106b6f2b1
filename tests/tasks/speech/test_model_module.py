"""SpeechModule: loss, metrics, report, rehearsal and checkpoint."""

from __future__ import annotations

import io
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from hybridtrain import PlainProgress
from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.decoding import BeamDecoder, DecoderOptions
from hybridtrain.tasks.speech.metrics import Sentence, as_text, select
from hybridtrain.tasks.speech.module import SpeechModule
from tests.picking import by_default
from tests.tasks.speech.speech_batches import FEATURES, Batches, batch_of, tiny_module, trainer

KINDS = ["stt", "paper"]


@pytest.mark.parametrize("kind", by_default(KINDS, "stt"))
def test_one_utterance_is_learnt_by_heart(kind: str) -> None:
    data = Batches([batch_of(["she had"])])
    module = tiny_module(kind, width=48, lr=0.005)
    epochs = {"stt": 150, "paper": 300}[kind]
    run = trainer(max_epochs=epochs, check_val_every_n_epoch=epochs)
    run.fit(module, data)
    assert run.callback_metrics["train/loss"] < 1.0
    (result,) = run.test(module, data, verbose=False)
    assert result["test/wer"] == 0.0
    assert module.test_report["best"][0]["heard"] == "she had"


def test_loss_is_a_sum_over_frames_and_a_mean_over_samples() -> None:
    module = tiny_module()
    texts = ["cab", "a"]
    apart = [module.loss(batch_of([text])).item() for text in texts]
    together = module.loss(batch_of(texts)).item()
    assert together == pytest.approx(sum(apart) / 2, rel=1e-4)
    assert apart[0] > 2 * apart[1]  # not divided by length


def impossible(batch: dict[str, Any], row: int) -> dict[str, Any]:
    """The same with a sample whose sound is shorter than its transcript."""
    lengths = batch["feature_lengths"].clone()
    lengths[row] = 1
    return {**batch, "feature_lengths": lengths}


def not_a_number(batch: dict[str, Any], row: int) -> dict[str, Any]:
    features = batch["features"].clone()
    features[row, 0, 0] = float("nan")
    return {**batch, "features": features}


@pytest.mark.parametrize("spoil", [impossible, not_a_number])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_without_a_finite_loss_are_named_once_and_left_out(
    kind: str, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = tiny_module(kind)
    with caplog.at_level(logging.WARNING):
        loss = module.loss(spoil(batch_of(["abc", "bad", "cab"]), 1))
        module.loss(spoil(batch_of(["abc", "bad", "cab"]), 1))
    assert [r.message.split()[3] for r in caplog.records] == ["f-bad.wav"]
    without = module.loss(batch_of(["abc", "cab"])) * 2 / 3  # it counts as 0 among three
    torch.testing.assert_close(loss, without, rtol=1e-4, atol=1e-4)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_a_batch_of_nothing_finite_has_a_zero_gradient() -> None:
    module = tiny_module()
    module.loss(impossible(batch_of(["abc"]), 0)).backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_zero_infinity_false_lets_the_loss_through_and_still_names_the_file(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = tiny_module(zero_infinity=False)
    assert module.loss(impossible(batch_of(["abc", "bad"]), 1)).isinf()
    assert "f-bad.wav" in caplog.text


def test_files_without_a_finite_loss_are_counted() -> None:
    run = trainer(max_epochs=2)
    run.fit(tiny_module(), Batches([impossible(batch_of(["abc", "bad"]), 1)]))
    assert run.callback_metrics["train/not_finite_files"] == 1


def answering(monkeypatch: pytest.MonkeyPatch, heard: dict[str, str]) -> SpeechModule:
    """A module that hears what the test says, by number of frames."""
    by_length = {4 * len(truth): text for truth, text in heard.items()}
    module = tiny_module()

    def decode(_: Any, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[str]:
        return [by_length[n] for n in lengths.tolist()]

    monkeypatch.setattr("hybridtrain.tasks.speech.decoding.GreedyDecoder.__call__", decode)
    return module


def test_rates_are_of_the_whole_set_not_a_mean_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    module = answering(monkeypatch, {"a b c d e f": "a b c d e f", "ab": "xy"})
    data = Batches([batch_of(["a b c d e f"]), batch_of(["ab"])])
    (result,) = trainer().test(module, data, verbose=False)
    assert result["test/wer"] == pytest.approx(1 / 7)
    assert result["test/cer"] == pytest.approx(2 / 13)
    (validated,) = trainer().validate(module, data, verbose=False)
    assert validated["val/wer"] == pytest.approx(1 / 7)
    expected = [module.loss(batch).item() for batch in data.train]
    assert validated["val/loss"] == pytest.approx(sum(expected) / 2, rel=1e-5)


class Shards(Batches):
    """Rank r sees batches r, r + W, ...: unequal shares, as a last odd batch makes them."""

    def test_dataloader(self) -> Any:
        world = self.trainer.world_size  # type: ignore[union-attr]
        self.held_out = self.held_out[self.trainer.global_rank :: world]  # type: ignore[union-attr]
        return super().test_dataloader()


@pytest.mark.parametrize(
    "strategy", ["hybrid", pytest.param("ddp_spawn", marks=pytest.mark.slow)]
)  # ddp_fork would fork this process, whose OpenMP threads may make it hang
def test_two_ranks_report_what_one_reports(tmp_path: Path, strategy: str) -> None:
    texts = [["abc", "a bad cab"], ["dad"], ["a b c d"]]
    results, reports = [], []
    for devices in (1, 2):
        out = tmp_path / f"{devices}.pt"
        module = tiny_module()
        run = trainer(
            devices=devices,
            strategy=strategy if devices == 2 else "auto",
            use_distributed_sampler=False,
            callbacks=[Keep(out)],
        )
        run.test(module, Shards([batch_of(t) for t in texts]), verbose=False)
        kept = torch.load(out, weights_only=True)
        results.append(kept["metrics"])
        reports.append(kept["report"])
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    files = [sorted(s["file"] for group in r.values() for s in group) for r in reports]
    assert files[0] == files[1]
    assert len(files[1]) == 4


class Keep(pl.Callback):
    """Save rank 0's metrics and report, which a forked rank would take with it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        if trainer.is_global_zero:
            torch.save({"metrics": metrics, "report": pl_module.test_report}, self.path)


def sentences(rates: list[float]) -> list[Sentence]:
    return [Sentence(f"{i}.wav", "t", "h", float(i), rate, 0.0) for i, rate in enumerate(rates)]


def test_report_shows_best_median_and_worst_once_each() -> None:
    chosen = select(sentences([0.5, 0.0, 1.0, 0.0, 0.3, 0.75, 0.1, 0.9]), 2)
    rates = {name: [s["wer"] for s in group] for name, group in chosen.items()}
    assert rates == {"best": [0.0, 0.0], "median": [0.3, 0.5], "worst": [1.0, 0.9]}
    assert [s["file"] for s in chosen["best"]] == ["3.wav", "1.wav"]  # the higher loss first
    few = select(sentences([0.5, 0.0, 1.0]), 5)
    assert [s["wer"] for group in few.values() for s in group] == [0.0, 0.5, 1.0]
    assert select([], 5) == {"best": [], "median": [], "worst": []}


def test_report_is_readable_and_goes_to_the_logger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts: dict[str, str] = {}
    logger = TensorBoardLogger(tmp_path)
    monkeypatch.setattr(logger.experiment, "add_text", lambda n, t, s: texts.update({n: t}))
    module = answering(monkeypatch, {"a cab": "a cap", "dad": "dad"})
    data = Batches([batch_of(["a cab", "dad"])])
    run = trainer(logger=logger, max_epochs=1)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    printed = capsys.readouterr().out
    for expected in ("best", "f-dad.wav", "WER  50.0%", "truth: a cab", "heard: a cap"):
        assert expected in printed
    assert "heard: a cap" in texts["test/sentences"]
    assert "| a cab | a cap |" in texts["val/transcripts"]
    assert as_text({"best": [], "median": [], "worst": []}) == ""


def test_the_report_raises_nothing_in_a_script_whose_output_is_ascii(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    module = answering(monkeypatch, {"a cab": "größe"})
    data = Batches([batch_of(["a cab"])])
    run = trainer(enable_progress_bar=True, callbacks=[PlainProgress(0)], max_epochs=1)
    monkeypatch.setattr(sys, "stdout", stream)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    assert rb"heard: gr\xf6\xdfe" in stream.buffer.getvalue()  # type: ignore[attr-defined]
    assert run.callback_metrics["test/wer"] == 1.0


def test_beam_search_is_used_for_the_test_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count(self: BeamDecoder, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[str]:
        calls.append(self.options.beam_width)
        return ["a"] * len(lengths)

    monkeypatch.setattr(BeamDecoder, "__call__", count)
    module = tiny_module(decoder={"kind": "beam", "beam_width": 8})
    data = Batches([batch_of(["a"])])
    trainer().validate(module, data, verbose=False)
    assert calls == []
    (result,) = trainer().test(module, data, verbose=False)
    assert calls == [8]
    assert result["test/wer"] == 0.0


def test_checkpoint_loads_as_data_only_and_restores_the_model(tmp_path: Path) -> None:
    module = tiny_module("paper", decoder={"kind": "beam", "beam_width": 9})
    run = trainer(max_epochs=1)
    run.fit(module, Batches([batch_of(["abc"])]))
    run.save_checkpoint(tmp_path / "x.ckpt")
    settings = torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"]
    assert settings["net"]["kind"] == "paper"
    assert settings["features"]["n_features"] == 26
    loaded = SpeechModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    batch = batch_of(["cab"])
    arguments = batch["features"], batch["feature_lengths"]
    torch.testing.assert_close(loaded(*arguments), module.eval()(*arguments))
    assert loaded.options == DecoderOptions(kind="beam", beam_width=9)


def test_scheduler_steps_per_epoch_or_per_step() -> None:
    for interval, expected in [("epoch", 0.5), ("step", 0.25)]:
        module = tiny_module(
            optimizer=partial(torch.optim.SGD, lr=1e-3),
            scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
            scheduler_interval=interval,
        )
        run = trainer(max_epochs=1)
        run.fit(module, Batches([batch_of(["ab"]), batch_of(["cab"])]))
        assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * expected)


def test_predicts_texts() -> None:
    module = tiny_module()
    loader = Batches([batch_of(["ab", "cab"])]).val_dataloader()
    (texts,) = trainer().predict(module, loader)  # type: ignore[misc]
    assert len(texts) == 2
    assert all(isinstance(text, str) for text in texts)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(UserError, match="epoch or step"):
        SpeechModule({"kind": "stt"}, scheduler_interval="day")
    with pytest.raises(UserError, match="no optimizer"):
        SpeechModule({"kind": "stt", "width": 4}, features=FEATURES).configure_optimizers()
