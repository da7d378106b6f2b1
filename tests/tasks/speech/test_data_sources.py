"""The sources: CSV manifests, LibriSpeech, FSDD, and what is refused before training."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.trainer.states import TrainerFn

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.datamodule import SpeechDataModule, check_all
from hybridtrain.tasks.speech.features import Features
from hybridtrain.tasks.speech.sources.fsdd import Fsdd
from hybridtrain.tasks.speech.sources.manifest import CsvManifest, LibriSpeech
from hybridtrain.tasks.speech.sources.utterance import AudioClip, Utterance, frames_needed

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
HEADER = "wav_filename,wav_filesize,transcript\n"


def write_sound(path: Path, seconds: float = 1.0, rate: int = 16000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(path.name)).uniform(-0.1, 0.1, round(seconds * rate))
    soundfile.write(path, noise, rate)
    return path


def write_csv(path: Path, *rows: str, header: str = HEADER) -> str:
    path.write_text(header + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return str(path)


def module(tmp_path: Path, *rows: str, **options: object) -> SpeechDataModule:
    """A data module over one CSV; one good row is always there for validation."""
    write_sound(tmp_path / "good.wav")
    val = write_csv(tmp_path / "val.csv", "good.wav,1,fine")
    train = write_csv(tmp_path / "train.csv", *rows)
    return SpeechDataModule(CsvManifest(train, val), **options)  # type: ignore[arg-type]


def refused(tmp_path: Path, *rows: str) -> str:
    """The error that the rows give at setup, which is before any training."""
    with pytest.raises(UserError) as error:
        module(tmp_path, *rows).setup("fit")
    return str(error.value)


# ---- CSV


def test_several_csv_files_are_merged_by_ascending_file_size(tmp_path: Path):
    write_sound(tmp_path / "sub" / "b.flac", rate=22050)
    write_sound(tmp_path / "a.wav")
    one = write_csv(tmp_path / "one.csv", "a.wav,30,the a", f"{tmp_path}/a.wav,10,again")
    two = write_csv(tmp_path / "sub" / "two.csv", "b.flac,20,the b")
    for files in (f"{one},{two}", [one, two]):
        rows = CsvManifest(files, one).utterances("train")
        assert [r.transcript for r in rows] == ["again", "the b", "the a"]
        assert rows[1].measure(16000) == 16000 and len(rows[1].load(16000)) == 16000
    assert rows[0].origin == f"{one}, line 3"


def test_limit_and_reverse_mean_what_they_mean_in_deepspeech(tmp_path: Path):
    rows = [f"x.wav,{size},size {size}" for size in (3, 1, 2)]
    file = write_csv(tmp_path / "t.csv", *rows)
    found = CsvManifest(file, file, limit_train=2, reverse_val=True, limit_val=1)
    assert [u.filesize for u in found.utterances("train")] == [1, 2]
    assert [u.filesize for u in found.utterances("val")] == [3]


def test_without_a_validation_file_every_20th_row_is_held_out(tmp_path: Path):
    file = write_csv(tmp_path / "t.csv", *(f"{i}.wav,{i},row" for i in range(40)))
    source = CsvManifest(file)
    train, val = source.utterances("train"), source.utterances("val")
    assert [u.filesize for u in val] == [19, 39]
    assert len(train) == 38 and not {u.name for u in train} & {u.name for u in val}
    assert source.utterances("test") == []
    longest = CsvManifest(file, limit_val=1, reverse_val=True)
    assert [u.filesize for u in longest.utterances("val")] == [39]
    assert len(longest.utterances("train")) == 38


@pytest.mark.parametrize("missing", ["wav_filename", "transcript"])
def test_a_missing_column_is_named_with_its_file(tmp_path: Path, missing: str):
    file = write_csv(tmp_path / "t.csv", header=HEADER.replace(missing, "other"))
    with pytest.raises(UserError, match=f"t.csv, line 1: the column {missing} is missing"):
        CsvManifest(file).utterances("train")


BAD_ROWS = {
    "1.wav,11,no, thank you": "cells in the row: 4, columns in the header: 3; put quotes",
    "1.wav,11": "cells in the row: 2, columns in the header: 3; write all of them",
    "1.wav;11;no": "cells in the row: 1, columns in the header: 3",
    HEADER.strip(): "the header stands here again; remove the line",
    ",11,no": "wav_filename is empty",
    "1.wav,many,no": "wav_filesize='many' is not a number of bytes",
    "1.wav,-1,no": "wav_filesize='-1' is not a number of bytes",
    "1.wav,6.5,no": "wav_filesize='6.5' is not a number of bytes",
}


@pytest.mark.parametrize(("row", "fault"), BAD_ROWS.items())
def test_a_row_that_makes_no_sense_is_named_with_its_line(tmp_path: Path, row: str, fault: str):
    write_sound(tmp_path / "1.wav")
    assert f"train.csv, line 3: {fault}" in refused(tmp_path, "good.wav,1,fine", row)


def test_rows_that_make_no_sense_are_skipped_and_counted_on_request(tmp_path: Path):
    write_sound(tmp_path / "1.wav")
    data = module(tmp_path, *BAD_ROWS, "good.wav,1,fine", skip_bad=True)
    assert [u.transcript for u in data.batches("train").utterances] == ["fine"]
    assert len(data.skipped["train"]) == len(BAD_ROWS)


@pytest.mark.parametrize("between", [";", "\t"])
def test_a_manifest_of_a_spreadsheet_is_read_with_its_separator(tmp_path: Path, between: str):
    header = HEADER.replace(",", between)
    row = between.join(["1.wav", "64044.0", "no, thank you"])
    file = write_csv(tmp_path / "t.csv", row, row, header=header)
    found = CsvManifest(file, file).utterances("train")
    assert [(u.filesize, u.transcript) for u in found] == [(64044, "no, thank you")] * 2


def test_a_missing_csv_and_no_csv_say_what_to_do(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read the manifest .*gone\.csv"):
        CsvManifest(str(tmp_path / "gone.csv")).utterances("train")
    with pytest.raises(UserError, match=r"data\.train="):
        CsvManifest().utterances("train")


# ---- bad rows, each refused at setup with file and line, each skipped on request


def test_a_missing_audio_file_is_named_with_its_line(tmp_path: Path):
    error = refused(tmp_path, "good.wav,1,fine", "gone.wav,2,lost")
    assert "train.csv, line 3" in error and "gone.wav: there is no such file" in error


def test_a_truncated_audio_file_is_named_with_its_line(tmp_path: Path):
    cut = write_sound(tmp_path / "cut.wav")
    cut.write_bytes(cut.read_bytes()[:9000])
    error = refused(tmp_path, "cut.wav,1,short")
    assert "train.csv, line 2" in error and "cut.wav is truncated" in error


def test_an_empty_transcript_is_named_with_its_line(tmp_path: Path):
    assert "train.csv, line 2: the transcript of" in refused(tmp_path, "good.wav,1,")
    assert "is empty" in refused(tmp_path, "good.wav,1,   ")


def test_a_character_outside_the_alphabet_is_named_with_its_line(tmp_path: Path):
    error = refused(tmp_path, "good.wav,1,fine", "good.wav,2,Fine")
    assert "train.csv, line 3" in error and "'F'" in error


def test_a_transcript_longer_than_its_frames_is_named_with_its_line(tmp_path: Path):
    error = refused(tmp_path, f"good.wav,1,{'ab' * 30}")
    assert "train.csv, line 2" in error and "60 characters need 60 feature frames" in error


def test_the_room_ctc_needs_counts_repeats_and_the_models_stride():
    assert frames_needed([1, 2, 3], 1) == 3
    assert frames_needed([1, 1, 1], 1) == 5  # a blank between equal neighbours
    assert frames_needed([1, 1, 1], 2) == 9  # 9 frames are 5 outputs of 2


def test_frames_per_output_is_respected_by_the_checks(tmp_path: Path):
    sound = write_sound(tmp_path / "a.wav", seconds=0.112)  # 5 frames
    utterance = Utterance("a", "aaa", (AudioClip(str(sound)),))
    assert check_all([utterance], Alphabet(), Features(), 1)[0][0].samples == 1792
    with pytest.raises(UserError, match="need 9 feature frames, the sound has 5"):
        check_all([utterance], Alphabet(), Features(), 2)


def test_an_empty_data_set_is_refused(tmp_path: Path):
    assert "the train set" in refused(tmp_path) and "empty" in refused(tmp_path)


def test_skip_bad_leaves_out_and_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cut = write_sound(tmp_path / "cut.wav")
    cut.write_bytes(cut.read_bytes()[:9000])
    rows = ["gone.wav,1,lost", "cut.wav,2,cut", "good.wav,3,", "good.wav,4,É", "good.wav,5,fine"]
    data = module(tmp_path, *rows, f"good.wav,6,{'a' * 99}", skip_bad=True)
    data.setup("fit")
    assert [u.transcript for u in data.batches("train").utterances] == ["fine"]
    assert len(data.skipped["train"]) == 5 and data.skipped["val"] == []
    (line,) = caplog.messages
    assert line.startswith("train: skipped 5 of 6 utterances")
    for fragment in ("gone.wav", "cut.wav", "line 4", "line 5", "line 7"):
        assert fragment in line
    assert "(data.skip_bad=true leaves such files out)" in refused(tmp_path, *rows)


def test_a_warning_of_very_many_skipped_utterances_names_only_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    bad = [f"gone{n}.wav,1,lost" for n in range(100)]
    module(tmp_path, "good.wav,1,fine", *bad, skip_bad=True).setup("fit")
    assert caplog.text.count("gone") == 20 and "and 80 more" in caplog.text


def test_only_the_first_rank_names_what_was_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    module(tmp_path, "good.wav,1,fine", "gone.wav,1,lost", skip_bad=True).setup("fit")
    assert caplog.messages == []


def test_each_stage_reads_its_own_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, read = module(tmp_path, "good.wav,1,fine"), []
    load = data._load
    monkeypatch.setattr(data, "_load", lambda split: read.append(split) or load(split))
    data.setup(TrainerFn.TESTING)  # as Lightning calls it
    assert read == ["test"]
    data.setup(TrainerFn.FITTING)
    assert read == ["test", "train", "val"]


def test_skipping_everything_is_an_error(tmp_path: Path):
    with pytest.raises(UserError, match=r"all 2 utterances are bad; the first: .*gone\.wav"):
        module(tmp_path, "gone.wav,1,lost", "off.wav,2,lost", skip_bad=True).setup("fit")


def test_a_file_damaged_after_the_check_is_named_or_skipped(tmp_path: Path):
    for skip in (False, True):
        data = module(tmp_path, "good.wav,1,fine", "late.wav,1,fine", skip_bad=skip)
        late = write_sound(tmp_path / "late.wav")
        data.setup("fit")
        late.write_bytes(late.read_bytes()[:9000])
        if skip:
            assert [Path(f).name for f in data.batches("train")[0]["files"]] == ["good.wav"]
        else:
            with pytest.raises(UserError, match=r"late\.wav is truncated"):
                data.batches("train")[0]


# ---- LibriSpeech


def test_librispeechs_layout_is_read_and_lower_cased(tmp_path: Path):
    for split in ("train-clean-100", "dev-clean", "test-clean"):
        chapter = tmp_path / "LibriSpeech" / split / "19" / "198"
        write_sound(chapter / "19-198-0001.flac")
        write_sound(chapter / "19-198-0000.flac")
        text = "19-198-0000 NORTHANGER ABBEY\n19-198-0001 IT'S A NOVEL\n"
        (chapter / "19-198.trans.txt").write_text(text)
    for root in (tmp_path, tmp_path / "LibriSpeech"):
        found = LibriSpeech(str(root)).utterances("train")
        assert [u.transcript for u in found] == ["northanger abbey", "it's a novel"]
        assert found[0].speaker == "19" and found[1].origin.endswith("19-198.trans.txt, line 2")
        assert found[0].load(16000).shape == (16000,)
    both = LibriSpeech(str(tmp_path), train="dev-clean, test-clean").utterances("train")
    assert len(both) == 4
    transcripts = tmp_path / "LibriSpeech" / "dev-clean" / "19" / "198" / "19-198.trans.txt"
    transcripts.write_bytes("\ufeff19-198-0000\tNO\u2028NO\r\n\r\n19-198-0001 YES\r\n".encode())
    found = LibriSpeech(str(tmp_path)).utterances("val")
    assert [u.transcript for u in found] == ["no\u2028no", "yes"]
    assert found[0].name.endswith("19-198-0000.flac")
    with pytest.raises(UserError, match="no train-other-500"):
        LibriSpeech(str(tmp_path), train="train-other-500").utterances("train")


def test_librispeech_names_a_missing_flac_with_the_transcripts_line(tmp_path: Path):
    chapter = tmp_path / "dev-clean" / "1" / "2"
    chapter.mkdir(parents=True)
    (chapter / "1-2.trans.txt").write_text("1-2-0000 HELLO\n")
    data = SpeechDataModule(LibriSpeech(str(tmp_path), train="dev-clean"))
    with pytest.raises(UserError, match=r"1-2.trans.txt, line 1: .*0000.flac: there is no such"):
        data.setup("fit")


# ---- FSDD


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Two speakers, ten digits, takes 0 to 11, at 8 kHz."""
    for speaker in ("ann", "bob"):
        for digit in range(10):
            for take in range(12):
                name = f"{digit}_{speaker}_{take}.wav"
                write_sound(tmp_path / "recordings" / name, 0.1, rate=8000)
    return tmp_path


def recordings(found: list[Utterance]) -> Counter[str]:
    return Counter(Path(clip.path).name for u in found for clip in u.clips)


def takes(found: list[Utterance]) -> set[int]:
    return {int(Path(clip.path).stem.split("_")[2]) for u in found for clip in u.clips}


def test_fsdd_takes_are_split_by_its_convention(digits: Path):
    source = Fsdd(str(digits), train_sequences=50)
    assert takes(source.utterances("test")) == {0, 1, 2, 3, 4}
    assert takes(source.utterances("val")) == {5, 6, 7, 8, 9}
    assert takes(source.utterances("train")) == {10, 11}
    assert len(source.utterances("train")) == 50


@pytest.mark.few(1)
@pytest.mark.parametrize("passes", [1, 3])
def test_every_held_out_recording_is_used_exactly_passes_times(digits: Path, passes: int):
    found = Fsdd(str(digits / "recordings"), passes=passes).utterances("test")
    used = recordings(found)
    assert len(used) == 100 and set(used.values()) == {passes}


def test_a_sequence_has_one_speaker_its_digits_words_and_its_pauses(digits: Path):
    source = Fsdd(str(digits), min_digits=2, max_digits=4, min_gap_s=0.05, max_gap_s=0.1)
    lengths = set()
    for utterance in source.utterances("train")[:60]:
        stems = [Path(clip.path).stem.split("_") for clip in utterance.clips]
        assert utterance.transcript == " ".join(WORDS[int(stem[0])] for stem in stems)
        assert {stem[1] for stem in stems} == {utterance.speaker}
        lengths.add(len(stems))
        gaps = [clip.gap_s for clip in utterance.clips]
        assert gaps[0] == 0 and all(0.05 <= gap <= 0.1 for gap in gaps[1:])
        sound = utterance.load(16000)
        assert abs(len(sound) - utterance.measure(16000)) <= len(stems)
        assert abs(len(sound) / 16000 - 0.1 * len(stems) - sum(gaps)) < 0.001
    assert lengths == {2, 3, 4}


def test_sequences_follow_from_the_seed(digits: Path):
    make = {seed: Fsdd(str(digits), train_sequences=20, seed=seed).utterances for seed in (1, 2)}
    again = Fsdd(str(digits), train_sequences=20, seed=1).utterances
    for split in ("train", "val", "test"):
        assert make[1](split) == again(split) != make[2](split)


def test_fsdd_says_what_it_expects(tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.root="):
        Fsdd().utterances("train")
    with pytest.raises(UserError, match="no recordings named"):
        Fsdd(str(tmp_path)).utterances("train")
    with pytest.raises(UserError, match=r"min_digits=3, data\.max_digits=2"):
        Fsdd(str(tmp_path), min_digits=3, max_digits=2).utterances("train")


def real_fsdd() -> Path | None:
    places = [os.environ.get("HYBRIDTRAIN_FSDD"), Path(__file__).parents[4] / "shared/data/fsdd"]
    return next((Path(p) for p in places if p and (Path(p) / "recordings").is_dir()), None)


@pytest.mark.skipif(
    real_fsdd() is None, reason="needs the Free Spoken Digit Dataset: set HYBRIDTRAIN_FSDD"
)
def test_the_real_recordings_pass_the_checks():
    data = SpeechDataModule(Fsdd(str(real_fsdd()), train_sequences=200))
    data.setup()
    speakers = {u.speaker for u in data.batches("test").utterances}
    assert sum(recordings(data.batches("test").utterances).values()) == 50 * len(speakers)
    batch = data.batches("train")[3]
    assert batch["features"].isfinite().all() and batch["features"].std() > 0.5


def test_a_quote_that_is_not_closed_is_named_and_takes_no_rows_along(tmp_path: Path):
    rows = [f"{n}.wav,{n},row {n}" for n in range(9)]
    file = write_csv(tmp_path / "t.csv", *rows[:3], '3.wav,3,"word', *rows[4:])
    with pytest.raises(UserError, match=r"t\.csv, line 5: a quoted cell goes on"):
        CsvManifest(file).utterances("train")
