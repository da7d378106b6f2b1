"""Batches, augmentation and the data module as Lightning sees it."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import soundfile
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.utils.data import DataLoader, DistributedSampler

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.augment import Augment
from hybridtrain.tasks.speech.datamodule import SpeechDataModule, bucketed
from hybridtrain.tasks.speech.features import Features
from hybridtrain.tasks.speech.sources.manifest import CsvManifest

CONF = Path(__file__).parents[3] / "conf"
COUNT = 23


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """23 sounds of 0.3 to 2.5 s, every word of its own."""
    folder = tmp_path_factory.mktemp("sounds")
    rows = ["wav_filename,wav_filesize,transcript"]
    for i in range(COUNT):
        rng = np.random.default_rng(i)
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, 4800 + 1600 * i), 16000)
        rows.append(f"{i}.wav,{i},{chr(97 + i)} word")
    (folder / "all.csv").write_text("\n".join(rows) + "\n")
    return str(folder / "all.csv")


def module(manifest: str, **options: Any) -> SpeechDataModule:
    data = SpeechDataModule(
        CsvManifest(manifest, manifest, manifest), **{"batch_size": 4, **options}
    )
    data.setup()
    return data


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        for key in a
    )


def files(loader: DataLoader[Any]) -> Counter[str]:
    return Counter(Path(file).name for batch in loader for file in batch["files"])


# ---- batches


def test_buckets_hold_everything_once_sorted_with_the_incomplete_one_shortest():
    lengths = [5, 3, 9, 3, 7, 1, 8]
    assert bucketed(lengths, 3) == [[5], [1, 3, 0], [4, 6, 2]]
    assert bucketed(lengths, 100) == [[5, 1, 3, 0, 4, 6, 2]]
    assert bucketed([], 3) == []


def test_a_batch_is_the_agreed_dict_padded_with_zeros(manifest: str):
    data = module(manifest)
    batch = data.batches("train")[2]
    assert next(iter(batch)) == "features"
    lengths = batch["feature_lengths"]
    assert batch["features"].shape == (4, int(lengths.max()), 26)
    assert batch["features"].dtype == torch.float32
    for i, file in enumerate(batch["files"]):
        assert batch["features"][i, lengths[i] :].abs().sum() == 0
        assert batch["features"][i, : lengths[i]].abs().sum(1).min() > 0
        number = int(Path(file).stem)
        assert int(lengths[i]) == data.features.frames(4800 + 1600 * number)
        text = batch["transcripts"][i]
        target = batch["targets"][i, : batch["target_lengths"][i]]
        assert data.alphabet.decode(target.tolist()) == text == f"{chr(97 + number)} word"
    assert {batch[k].dtype for k in ("feature_lengths", "targets", "target_lengths")} == {
        torch.int64
    }


def test_every_utterance_is_seen_exactly_once_per_epoch_in_a_new_order(manifest: str):
    loader = module(manifest).train_dataloader()
    torch.manual_seed(0)
    epochs = [[tuple(batch["files"]) for batch in loader] for _ in range(2)]
    for epoch in epochs:
        assert len(epoch) == 6 and len({f for batch in epoch for f in batch}) == COUNT
    assert epochs[0] != epochs[1] and set(epochs[0]) == set(epochs[1])


def test_two_ranks_share_the_utterances_through_an_ordinary_distributed_sampler(manifest: str):
    batches: Any = module(manifest).batches("train")
    seen: Counter[str] = Counter()
    for rank in range(2):
        sampler: Any = DistributedSampler(batches, 2, rank, shuffle=True)
        seen += files(DataLoader(batches, batch_size=None, sampler=sampler))
    assert len(seen) == COUNT and set(seen.values()) == {1}


def test_the_longest_batch_has_the_most_frames_and_is_not_augmented(manifest: str):
    data = module(manifest, augment=Augment())
    longest = data.longest_batch()
    size = longest["features"].shape[0] * longest["features"].shape[1]
    plain = module(manifest)
    assert size == max(b["features"].shape[:2].numel() for b in plain.train_dataloader())
    assert "22.wav" in {Path(f).name for f in longest["files"]}
    assert same(longest, data.longest_batch())


def test_validation_and_test_are_not_augmented_and_come_in_a_fixed_order(manifest: str):
    data = module(manifest, augment=Augment(), eval_batch_size=5)
    first, second = list(data.val_dataloader()), list(data.val_dataloader())
    assert [len(b["files"]) for b in first] == [3, 5, 5, 5, 5]
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert files(data.test_dataloader()) == files(data.val_dataloader())  # type: ignore[arg-type]


def test_a_source_without_a_test_set_has_no_test_loader(manifest: str):
    data = SpeechDataModule(CsvManifest(manifest, manifest))
    assert data.test_dataloader() == []


# ---- augmentation


def test_augmentation_depends_on_seed_epoch_and_utterance_only(manifest: str):
    def batch(seed: int = 0, epoch: int = 0, size: int = 4) -> dict[str, torch.Tensor]:
        data = module(manifest, augment=Augment(noise_db=20, volume_db=3, seed=seed))
        data.batches("train").epoch = lambda: epoch
        loaded = [data.batches("train")[i] for i in range(len(data.batches("train")))]
        return {
            file: b["features"][i, : b["feature_lengths"][i]]
            for b in loaded
            for i, file in enumerate(b["files"])
        }

    once, again, other_batches = batch(), batch(), batch(size=7)
    for file, features in once.items():
        assert torch.equal(features, again[file]) and torch.equal(features, other_batches[file])
    for other in (batch(seed=1), batch(epoch=1)):
        assert not any(torch.equal(once[file], other[file]) for file in once)


@pytest.mark.slow
def test_loader_processes_give_the_same_bits_as_none(manifest: str):
    def epoch(workers: int, start: str | None = None) -> list[dict[str, Any]]:
        data = module(manifest, augment=Augment(), num_workers=workers)
        data.batches("train").epoch = lambda: 3  # a lambda cannot be pickled: it need not be
        torch.manual_seed(1)
        batches: Any = data.batches("train")
        context = multiprocessing.get_context(start) if start else None
        return list(DataLoader(batches, None, num_workers=workers, multiprocessing_context=context))

    plain = epoch(0)
    for other in (epoch(2, "fork"), epoch(1, "spawn")):
        assert all(same(a, b) for a, b in zip(plain, other, strict=True))


def test_tempo_changes_the_length_within_its_range_but_leaves_ctc_room():
    augment, features = Augment(tempo=0.2, time_masks=0, frequency_masks=0), torch.randn(100, 26)
    lengths = [len(augment.frames(features, augment.generator(0, i))) for i in range(200)]
    assert min(lengths) in range(83, 88) and max(lengths) in range(118, 126)
    tight = [len(augment.frames(features, augment.generator(0, i), 97)) for i in range(200)]
    assert min(tight) == 97
    assert all(len(augment.frames(features, augment.generator(0, i), 200)) >= 100 for i in range(9))


def test_masks_are_blocks_of_zeros_no_wider_than_asked():
    augment = Augment(tempo=0, time_masks=1, time_width=8, frequency_masks=1, frequency_width=4)
    features = torch.ones(60, 26)
    for i in range(50):
        masked = augment.frames(features, augment.generator(0, i))
        rows = int((masked.sum(1) == 0).sum())
        columns = int((masked.sum(0) == 0).sum())
        assert rows <= 8 and columns <= 4
        assert int((masked == 0).sum()) == 60 * 26 - (60 - rows) * (26 - columns)
    assert float(features.min()) == 1  # the original, which is cached, is untouched


def test_noise_and_volume_have_the_levels_asked_for():
    sound = torch.randn(16000) * 0.05
    noisy = Augment(noise_db=20)
    for i in range(20):
        added = noisy.sound(sound, noisy.generator(0, i)) - sound
        below_db = -20 * float((added.std() / sound.std()).log10())
        assert 19.5 < below_db < 60.5
    louder = Augment(volume_db=6)
    gains = [float((louder.sound(sound, louder.generator(0, i)) / sound).mean()) for i in range(50)]
    assert 0.5 < min(gains) < 0.7 and 1.5 < max(gains) < 2.0


@pytest.mark.parametrize("option", [{"tempo": 1.0}, {"time_masks": -1}, {"volume_db": -3}])
def test_impossible_augmentation_is_refused(option: dict[str, float]):
    with pytest.raises(UserError, match=f"data.augment.{next(iter(option))}"):
        Augment(**option)  # type: ignore[arg-type]


# ---- the data module


class Listener(pl.LightningModule):
    """Counts what it is given; stands for a model with two frames per output."""

    frames_per_output = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[dict[str, Any]]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        self.seen[-1].append(batch)
        return self.weight * batch["features"].mean()

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(manifest: str) -> Listener:
    pl.seed_everything(0)
    listener = Listener()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = SpeechDataModule(CsvManifest(manifest, manifest), augment=Augment(), batch_size=4)
    trainer.fit(listener, data)
    assert data.batches("train").frames_per_output == 2
    return listener


def test_under_lightning_each_epoch_is_augmented_anew_and_a_run_repeats_itself(manifest: str):
    epochs = fit(manifest).seen
    lengths = [
        {f: int(n) for b in epoch for f, n in zip(b["files"], b["feature_lengths"], strict=True)}
        for epoch in epochs
    ]
    assert [len(epoch) for epoch in lengths] == [COUNT] * 3
    assert lengths[0] != lengths[1] != lengths[2] != lengths[0]
    for epoch, again in zip(epochs, fit(manifest).seen, strict=True):
        assert all(same(a, b) for a, b in zip(epoch, again, strict=True))


def test_the_data_module_can_be_sent_to_a_spawned_worker(manifest: str):
    data = module(manifest, augment=Augment())
    data.batches("train")[0]
    copy = pickle.loads(pickle.dumps(data))
    assert same(copy.batches("train")[1], data.batches("train")[1])


def test_features_are_cached_unless_the_sound_is_augmented(
    manifest: str, monkeypatch: pytest.MonkeyPatch
):
    calls: list[int] = []
    real = Features.__call__
    monkeypatch.setattr(Features, "__call__", lambda f, x: (calls.append(1), real(f, x))[1])
    for augment, expected in ((Augment(), 1), (Augment(noise_db=30), 2)):
        calls.clear()
        batches = module(manifest, augment=augment).batches("train")
        first, second = batches[5], batches[5]
        assert len(calls) == expected * 4 and same(first, second)


def test_bad_sizes_are_refused(manifest: str):
    for option in ("batch_size", "eval_batch_size"):
        with pytest.raises(UserError, match=f"data.{option}=0"):
            SpeechDataModule(CsvManifest(manifest), **{option: 0})
    with pytest.raises(UserError, match="num_workers=-1"):
        SpeechDataModule(CsvManifest(manifest), num_workers=-1)


# ---- configuration


def configured(*overrides: str) -> SpeechDataModule:
    with initialize_config_dir(str(CONF / "data"), version_base=None):
        return instantiate(compose(overrides[0], overrides=list(overrides[1:])))


@pytest.mark.parametrize("source", ["spoken_digits", "csv", "librispeech", "fsdd"])
def test_every_configuration_builds_with_the_classes_own_defaults(source: str):
    data = configured(source)
    assert data.source == type(data.source)()
    assert data.augment == Augment() and data.features == Features() == type(data.features)()
    plain = SpeechDataModule(data.source)
    for name in ("batch_size", "eval_batch_size", "num_workers", "skip_bad", "frames_per_output"):
        assert getattr(data, name) == getattr(plain, name)


def test_options_of_source_features_and_loading_are_set_from_the_command_line(manifest: str):
    data = configured(
        "csv", f"train=[{manifest},{manifest}]", f"val={manifest}", "batch_size=5", "augment=null",
        "features.kind=logmel", "features.n_features=40", "limit_train=7", "alphabet=' abcdeorw'",
        "skip_bad=true",
    )  # fmt: skip
    data.setup("fit")
    assert data.batches("train")[1]["features"].shape[2] == 40
    assert [u.filesize for u in data.batches("train").utterances] == [0, 0, 1, 1, 2, 2, 3]
    assert data.augment is None and len(data.alphabet) == 9
    assert len(data.skipped["val"]) == COUNT - 8  # words that begin with another letter
