"""The speech task: an acoustic net trained with CTC, as an ordinary LightningModule.

A batch is a dict: ``features`` (B, T, F), ``feature_lengths`` (B,), ``targets`` (B, S) labels
padded with zeros, ``target_lengths`` (B,), and the lists ``transcripts`` and ``files``.

The loss is DeepSpeech's: minus the log-probability of the whole transcript (a sum over frames, not
divided by length), averaged over the batch.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech import metrics
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.decoding import (
    Decoder,
    DecoderOptions,
    GreedyDecoder,
    build_decoder,
)
from hybridtrain.tasks.speech.features import Features
from hybridtrain.tasks.speech.metrics import Sentence, count_errors, rate
from hybridtrain.tasks.speech.nets import build_net
from hybridtrain.util.option_types import Natural, typed
from hybridtrain.util.streams import say

log = logging.getLogger(__name__)
Batch = dict[str, Any]
OUTPUT_STEP_S = 0.020  # of the 2014 paper: every second frame of 10 ms
SHOWN = 3  # transcripts per validation in TensorBoard


def rehearse(module: nn.Module, loss: Callable[[], Tensor], batch_size: int, frames: int) -> None:
    """Compute ``loss()`` and its gradient, and drop both.

    If memory does not suffice: a ``UserError`` that says for what batch and what to lower.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    try:
        torch.autograd.grad(loss(), parameters, allow_unused=True)
    except (RuntimeError, MemoryError) as error:
        if not _is_memory(error):
            raise
        raise UserError(
            f"the longest batch ({batch_size} samples of up to {frames} frames) does not fit into"
            f" memory: lower data.batch_size (now {batch_size}), or model.net.width"
        ) from error


def _is_memory(error: BaseException) -> bool:
    """CUDA raises its own class, the CPU allocator a RuntimeError with one of two texts."""
    texts = ("can't allocate memory", "not enough memory", "out of memory")
    known = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or any(text in str(error) for text in texts)


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore buffers and random states behind the block; an exception ends the run."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with isolate_rng(include_cuda=any(p.device.type == "cuda" for p in module.parameters())):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


class SpeechModule(pl.LightningModule):
    """DeepSpeech: features to letters with CTC.

    ``net``: ``{kind: stt | paper, width: ..., ...}``, see ``nets.py``; plain data, so that a
    checkpoint holds it. ``alphabet``: the letters, or a DeepSpeech ``alphabet.txt``. ``features``:
    a ``Features`` or its arguments; n_features is the net's input. ``optimizer``: parameters ->
    Optimizer. ``scheduler``: Optimizer -> scheduler, stepped once per ``scheduler_interval`` (epoch
    or step). ``decoder``: options for testing, see ``DecoderOptions``; validation is always greedy.
    ``zero_infinity``: leave samples whose loss is not finite out of the gradient (they are named
    in the log either way). ``report_count``: best, median and worst sentences shown after a test.
    """

    @typed("model.")
    def __init__(
        self,
        net: Mapping[str, Any],
        alphabet: str | None = None,
        features: Features | Mapping[str, Any] | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        decoder: Mapping[str, Any] | None = None,
        zero_infinity: bool = True,
        report_count: Natural = 5,
    ) -> None:
        super().__init__()
        self.alphabet = Alphabet.of(alphabet)
        if not isinstance(features, Features):
            features = Features(**_plain(features or {}))
        options = _plain(net)
        if options.get("stride", 1) is None:
            options["stride"] = max(1, round(OUTPUT_STEP_S / features.step_s))
        self.save_hyperparameters(
            {
                "net": options,
                "alphabet": self.alphabet.symbols,
                "features": asdict(features),
                "decoder": _plain(decoder or {}),
                "zero_infinity": zero_infinity,
                "report_count": report_count,
            }
        )
        self.options = DecoderOptions.of(_plain(decoder or {}))
        self.net = build_net(options, features.n_features, len(self.alphabet) + 1)
        self.frames_per_output = self.net.stride  # the data side asks for it
        self.optimizer, self.scheduler = optimizer, scheduler
        self.scheduler_interval = scheduler_interval
        self.test_report: dict[str, list[dict[str, Any]]] = {}
        self._reported: set[str] = set()  # files whose loss was not finite
        self._sums = torch.zeros(6, dtype=torch.float64)
        self._shown: list[tuple[str, str]] = []
        self._sentences: list[Sentence] = []
        self._decoder: Decoder = GreedyDecoder(self.alphabet)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """features (B, T, F), lengths (B,) -> log-probabilities (B, T', S) and their lengths."""
        scores = self.net(features, lengths).float()
        return scores.log_softmax(-1), self.net.output_lengths(lengths)

    def losses(self, batch: Batch, log_probs: Tensor, lengths: Tensor) -> Tensor:
        """CTC loss of every sample, (B,); infinite where the transcript does not fit the frames."""
        by_time = log_probs.transpose(0, 1)  # (T', B, S), as CTC wants it
        targets, sizes = batch["targets"], batch["target_lengths"]
        blank = self.alphabet.blank
        return ctc_loss(by_time, targets, lengths, sizes, blank=blank, reduction="none")

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch. Samples that are not finite count as 0 (see ``zero_infinity``)."""
        losses = self.losses(batch, *self(batch["features"], batch["feature_lengths"]))
        finite = losses.isfinite()
        if bool(finite.all()):
            return losses.mean()
        self._name_files(batch, finite.tolist())
        if not self.hparams["zero_infinity"]:
            return losses.mean()
        return self._loss_of(batch, finite) / len(losses)

    def _loss_of(self, batch: Batch, chosen: Tensor) -> Tensor:
        """Summed loss of the chosen samples (B,), computed anew: NaN * 0 would still be NaN."""
        if not bool(chosen.any()):
            return torch.stack([p.sum() for p in self.parameters()]).sum() * 0.0
        kept = {key: batch[key][chosen] for key in batch if isinstance(batch[key], Tensor)}
        losses = self.losses(kept, *self(kept["features"], kept["feature_lengths"]))
        return losses.sum()

    def _name_files(self, batch: Batch, finite: Sequence[bool]) -> None:
        """Warn once per file."""
        for file, ok in zip(batch["files"], finite, strict=True):
            if not ok and file not in self._reported:
                self._reported.add(file)
                log.warning(
                    "the loss of %s is not finite: is its transcript longer than its sound, or the"
                    " learning rate too high?",
                    file,
                )

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of a mini-batch."""
        loss = self.loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch["files"]))
        return loss

    def on_fit_start(self) -> None:
        """Compute the longest batch once, so that memory runs out at the start or never."""
        longest = getattr(getattr(self.trainer, "datamodule", None), "longest_batch", None)
        if longest is None:
            return
        with unchanged(self), self.trainer.precision_plugin.forward_context():
            batch = self.trainer.strategy.batch_to_device(longest(), self.device)
            rehearse(self, lambda: self.loss(batch), *batch["features"].shape[:2])

    def on_train_epoch_end(self) -> None:
        """Log how many files had no finite loss so far (on this rank)."""
        if self._reported:
            self.log("train/not_finite_files", float(len(self._reported)))

    def on_validation_epoch_start(self) -> None:
        """Forget the last epoch's counts."""
        self._sums, self._shown = torch.zeros(6, dtype=torch.float64), []

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Count loss and errors; texts are decoded greedily."""
        texts, _ = self._evaluate(batch, GreedyDecoder(self.alphabet))
        self._shown += list(zip(batch["transcripts"], texts, strict=True))
        del self._shown[SHOWN:]

    def on_validation_epoch_end(self) -> None:
        """Log val/loss, val/wer and val/cer of the whole set."""
        self._log_sums("val")
        if not self.trainer.sanity_checking:
            self._add_text("val/transcripts", metrics.as_markdown(self._shown))

    def on_test_epoch_start(self) -> None:
        """Make the test's decoder here: it does not survive pickling to another process."""
        self._decoder = build_decoder(self.options, self.alphabet)
        self._sums, self._sentences = torch.zeros(6, dtype=torch.float64), []

    def test_step(self, batch: Batch, batch_index: int) -> None:
        """Count loss and errors and keep the sentences for the report."""
        texts, losses = self._evaluate(batch, self._decoder)
        rows = zip(batch["files"], batch["transcripts"], texts, losses.tolist(), strict=True)
        self._sentences += [Sentence.of(*row) for row in rows]

    def on_test_epoch_end(self) -> None:
        """Log test/loss, test/wer and test/cer, and show the report on rank 0."""
        self._decoder = GreedyDecoder(self.alphabet)
        self._log_sums("test")
        sentences = metrics.gather(
            self._sentences, lambda own: cast(Tensor, self.all_gather(own.to(self.device)))
        )
        self.test_report = metrics.select(sentences, self.hparams["report_count"])
        text = metrics.as_text(self.test_report)
        if self.trainer.is_global_zero and text:
            say(f"\nTest sentences\n{text}")
        self._add_text("test/sentences", f"```\n{text}\n```")

    def on_predict_start(self) -> None:
        """Texts are decoded as for testing."""
        self._decoder = build_decoder(self.options, self.alphabet)

    def predict_step(self, batch: Batch, batch_index: int) -> list[str]:
        """The texts of a batch."""
        return self._decoder(*self(batch["features"], batch["feature_lengths"]))

    def _evaluate(self, batch: Batch, decoder: Decoder) -> tuple[list[str], Tensor]:
        """Decode a batch and add loss, samples and error counts to this epoch's sums."""
        log_probs, lengths = self(batch["features"], batch["feature_lengths"])
        losses = self.losses(batch, log_probs, lengths)
        finite = losses.isfinite()
        if not bool(finite.all()):
            self._name_files(batch, finite.tolist())
        texts = decoder(log_probs, lengths)
        errors = count_errors(batch["transcripts"], texts)
        loss, samples = float(losses[finite].sum()), float(finite.sum())
        self._sums += torch.tensor([loss, samples, *errors], dtype=torch.float64)
        return texts, losses

    def _log_sums(self, stage: str) -> None:
        """Rates of the whole set: the counts are summed over the ranks first, whatever each saw."""
        sums = self._sums.to(self.device) if self.device.type == "cuda" else self._sums
        total = self.trainer.strategy.reduce(sums, reduce_op="sum")
        loss, samples, word_errors, words, char_errors, chars = cast(Tensor, total).tolist()
        values = {
            f"{stage}/loss": loss / samples if samples else float("nan"),
            f"{stage}/wer": rate(word_errors, words),
            f"{stage}/cer": rate(char_errors, chars),
        }
        self.log_dict(values, prog_bar=True, sync_dist=True)  # equal everywhere already

    def _add_text(self, name: str, text: str) -> None:
        """Write to every logger that takes text (TensorBoard does)."""
        for logger in self.loggers:
            add = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add is not None and self.trainer.is_global_zero:
                add(name, text, self.global_step)

    def configure_optimizers(self) -> Any:
        """The optimizer, and the scheduler if there is one."""
        if self.optimizer is None:
            raise UserError("the speech model has no optimizer: pass optimizer=..., e.g. Adam")
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        schedule = {
            "scheduler": self.scheduler(optimizer),
            "interval": self.scheduler_interval,
            "monitor": "val/loss",
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def _plain(value: Any) -> Any:
    """Nested mappings and sequences (Hydra's, for one) as dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


@typed("model.scheduler.")
def rise_and_fall(optimizer: Optimizer, epochs: int | None, rise: Natural = 1) -> LambdaLR:
    """Factor (e + 1) / (rise + 1) in epochs e < ``rise``, then a half cosine ending at ``epochs``.

    For a schedule that steps once per epoch. Without an end (``epochs`` None or -1, as Lightning's
    max_epochs may be) it stays at 1. A run that goes on with more epochs follows the new end.
    """

    def factor(epoch: int) -> float:
        if epoch < rise:
            return (epoch + 1) / (rise + 1)
        if epochs is None or epochs <= rise:
            return 1.0
        done = min(1.0, (epoch - rise) / (epochs - rise))
        return 0.5 * (1.0 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
