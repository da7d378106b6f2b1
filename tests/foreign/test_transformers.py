"""Small Hugging Face models with random weights, wrapped as their users wrap them."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.recording import read_record
from hybridtrain.lightning.replay.replay_fit import replay_fit
from tests.foreign.strangers import (
    SEED,
    alone,
    apart,
    same_bits,
    seeded,
    train,
    trainer_of,
    union,
)

transformers = pytest.importorskip("transformers", reason="the extra 'test' is not installed")

WORDS = 24


class Sentences(Dataset[Any]):
    """Token ids; the label says whether the first word comes again."""

    def __init__(self, n: int = 32, length: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, WORDS, (n, length), generator=generator)
        self.ids[::2, -1] = self.ids[::2, 0]
        self.labels = (self.ids[:, 1:] == self.ids[:, :1]).any(1).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": self.labels[index],
        }


class Texts(Sentences):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        return item | {"labels": item["input_ids"]}


class Wrapped(pl.LightningModule):
    """Whatever has a ``loss``: AdamW without decay for biases and norms, a warm-up by steps."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.model(**batch).loss
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> Any:
        def decays(name: str) -> bool:
            return not any(part in name for part in ("bias", "LayerNorm", "ln_"))

        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for n, p in named if decays(n)], "weight_decay": 0.01},
            {"params": [p for n, p in named if not decays(n)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=5e-3)
        schedule = transformers.get_linear_schedule_with_warmup(
            optimizer, 2, self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def bert() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=2,
            **sizes,
        )
    )


def gpt2() -> Any:
    """Its output layer is tied to its embedding."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


@pytest.mark.parametrize(
    ("make", "data"),
    [pytest.param(bert, Sentences(), marks=pytest.mark.slow), (gpt2, Texts())],
)
def test_a_transformer_equals_one_process_on_the_union_of_the_batches(make: Any, data: Any) -> None:
    module, reference = seeded(lambda: Wrapped(make())), seeded(lambda: Wrapped(make()))
    options: dict[str, Any] = {"max_epochs": 4, "precision": "64-true"}
    trainer, losses = train(module, train_dataloaders=DataLoader(data, 4), **options)
    expected, _ = alone(reference, train_dataloaders=union(data, 8), **options)
    assert apart(module, reference) < 1e-9
    assert losses.fell()
    assert trainer.global_step == expected.global_step == 16
    loader = DataLoader(data, 4)
    (ours,) = trainer.validate(module, loader, verbose=False)
    (theirs,) = expected.validate(reference, loader, verbose=False)
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-6)  # a float32


def test_what_was_tied_stays_tied(tmp_path: Any) -> None:
    module = seeded(lambda: Wrapped(gpt2()))
    train(module, train_dataloaders=DataLoader(Texts(), 4), max_epochs=1)
    model = module.model
    assert model.lm_head.weight is model.transformer.wte.weight
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert apart(again, model) == 0.0


@pytest.mark.slow
def test_a_transformer_trains_asynchronously_and_is_replayed_to_the_bit(tmp_path: Any) -> None:
    """Who comes when differs from run to run, so a loss says little; the replay is exact."""
    module, copy = seeded(lambda: Wrapped(bert())), seeded(lambda: Wrapped(bert()))
    options: dict[str, Any] = {"train_dataloaders": DataLoader(Sentences(), 4), "max_epochs": 6}
    strategy = HybridStrategy("async", record=tmp_path)
    trainer, losses = train(module, strategy, **options)
    assert trainer.global_step == 48
    assert losses.values.isfinite().all()

    (path,) = tmp_path.iterdir()
    data = options.pop("train_dataloaders")
    again = trainer_of(HybridStrategy("async"), 2, **options)
    pl.seed_everything(SEED, verbose=False)
    report = replay_fit(read_record(path), again, copy, train_dataloaders=data)
    assert report.equal and report.whole and report.updates == 48, report
    assert same_bits(module, copy)
