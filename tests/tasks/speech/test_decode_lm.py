"""The n-gram language model, and beam search with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech import lm
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.decoding import DecoderOptions, GreedyDecoder, build_decoder
from hybridtrain.tasks.speech.lm import BEGIN, END, NEVER, UNKNOWN, NgramModel, estimate

TEXT = ["the cat sat on the mat", "the dog sat on the cat", "a cat sat", "the dog on a mat"]
CONTEXTS = [
    (),
    (BEGIN,),
    (BEGIN, "the"),
    ("the",),
    ("the", "cat"),
    ("sat", "on"),
    ("mat", "mat"),  # never seen
    ("zebra",),  # not a word
    ("on", "the", "dog", "sat"),  # longer than the order
]


def sentences() -> list[list[str]]:
    return [line.split() for line in TEXT]


@pytest.fixture
def arpa(tmp_path: Path) -> str:
    estimate(sentences()).write(tmp_path / "cats.arpa")
    return str(tmp_path / "cats.arpa")


def score(model: NgramModel, word: str, history: Sequence[str] = ()) -> float:
    """log10 P(word | history) as readers of ARPA text have it; unknown words are ``<unk>``."""
    known = [w if (w,) in model.log10 else UNKNOWN for w in (*history, word)]
    *before, word = known
    context = tuple(before[max(0, len(before) - model.order + 1) :])
    penalty = 0.0
    while context and (*context, word) not in model.log10:
        penalty += model.backoff.get(context, 0.0)
        context = context[1:]
    return penalty + model.log10.get((*context, word), NEVER)


def posteriors(text: str, confidence: float = 0.9) -> Tensor:
    """Three frames per letter, two of it and one blank; the rest spread evenly, (1, T, 29)."""
    labels = [s for letter in Alphabet().encode(text) for s in (letter, letter, 28)]
    rows = torch.full((len(labels), 29), (1 - confidence) / 28)
    rows[range(len(labels)), labels] = confidence
    return rows.log()[None]


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("context", CONTEXTS)
def test_probabilities_sum_to_one_when_read_back(
    order: int, context: tuple[str, ...], tmp_path: Path
) -> None:
    estimate(sentences(), order).write(tmp_path / "model.arpa")
    model = NgramModel.read(tmp_path / "model.arpa")
    assert model.order == order
    assert set(model.words) == {word for words in sentences() for word in words}
    total = sum(10 ** score(model, word, context) for word in [*model.words, END, UNKNOWN])
    assert total == pytest.approx(1.0, abs=1e-5)


def test_likely_words_are_likely_and_unknown_ones_possible() -> None:
    model = estimate(sentences())
    assert score(model, "the", ["sat", "on"]) > score(model, "a", ["sat", "on"])
    assert score(model, "sat", ["the", "cat"]) > score(model, "sat", ["the", "mat"])
    assert -6 < score(model, "zebra", ["the"]) < score(model, "mat", ["the"])


def test_kneser_ney_by_hand() -> None:
    # Bigrams of "a b" and "a c": <s>a 2, ab, ac, b</s>, c</s> once each: D = 4 / (4 + 2) = 2/3.
    model = estimate([["a", "b"], ["a", "c"]], 2)
    # One word goes before each of a, b and c, two before </s>: D = 3 / (3 + 2) = 3/5 of 5.
    unigram = (1 - 3 / 5) / 5 + (3 / 5) * 4 / 5 / 5  # 5 words with </s> and <unk>
    assert 10 ** score(model, "b") == pytest.approx(unigram)
    assert 10 ** score(model, "b", ["a"]) == pytest.approx((1 - 2 / 3) / 2 + 2 / 3 * unigram)


def test_flashlight_reads_our_arpa_and_scores_it_as_we_do(arpa: str) -> None:
    pytest.importorskip("flashlight.lib.text", reason="needs the extra lm (Python below 3.13)")
    decoder = build_decoder(DecoderOptions(kind="beam", lm=arpa), Alphabet())
    model = NgramModel.read(arpa)
    state, history = decoder._lm.start(False), [BEGIN]  # type: ignore[attr-defined]
    for word in ["the", "dog", "sat", "on", "a", "cat"]:
        index = decoder.words.index(word)  # type: ignore[attr-defined]
        state, found = decoder._lm.score(state, index)  # type: ignore[attr-defined]
        assert found == pytest.approx(score(model, word, history), abs=1e-4)
        history.append(word)


def test_the_language_model_corrects_spelling_and_blanks(arpa: str) -> None:
    pytest.importorskip("flashlight.lib.text", reason="needs the extra lm (Python below 3.13)")
    decoder = build_decoder(DecoderOptions(kind="beam", lm=arpa, beam_width=200), Alphabet())
    for spoken in ["the cat sat on the mat", "the kat sat on the mat", " the catsat on the mat "]:
        log_probs = posteriors(spoken)
        length = torch.tensor([log_probs.shape[1]])
        assert GreedyDecoder(Alphabet())(log_probs, length) == [spoken]
        assert decoder(log_probs, length) == ["the cat sat on the mat"]
    assert decoder(log_probs * torch.nan, length) == [""]


def test_alpha_decides_between_what_is_heard_and_what_is_likely(arpa: str) -> None:
    pytest.importorskip("flashlight.lib.text", reason="needs the extra lm (Python below 3.13)")
    log_probs = posteriors("the mat sat")
    log_probs[0, 12:14, Alphabet().encode("c")] += 3.0  # the m might have been a c
    length = torch.tensor([log_probs.shape[1]])
    heard = []
    for alpha in (0.0, 5.0):
        options = DecoderOptions(kind="beam", lm=arpa, lm_alpha=alpha)
        heard += build_decoder(options, Alphabet())(log_probs, length)
    assert heard == ["the mat sat", "the cat sat"]


def test_a_lexicon_limits_the_words(arpa: str, tmp_path: Path) -> None:
    pytest.importorskip("flashlight.lib.text", reason="needs the extra lm (Python below 3.13)")
    (tmp_path / "words.txt").write_text("the\ncat\nüber\n", encoding="utf-8")
    options = DecoderOptions(kind="beam", lm=arpa, lexicon=str(tmp_path / "words.txt"))
    decoder = build_decoder(options, Alphabet())
    log_probs = posteriors("the mat")
    assert decoder(log_probs, torch.tensor([log_probs.shape[1]])) == ["the cat"]


def test_without_the_extra_one_line_says_how_to_get_it(
    arpa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashlight.lib.text", None)
    with pytest.raises(UserError, match=r"hybridtrain\[lm\]") as error:
        build_decoder(DecoderOptions(kind="beam", lm=arpa), Alphabet())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "this is no model\n", "\\1-grams:\nx y z\n"])
def test_a_bad_language_model_is_named(content: str | None, tmp_path: Path) -> None:
    pytest.importorskip("flashlight.lib.text", reason="needs the extra lm (Python below 3.13)")
    path = tmp_path / "bad.arpa"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"bad\.arpa"):
        build_decoder(DecoderOptions(kind="beam", lm=str(path)), Alphabet())


def test_the_command_line_makes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.arpa"
    text.write_text("\n".join(TEXT))
    assert lm.main([f"text={text}", "order=2", f"out={out}"]) == 0
    assert "7 words" in capsys.readouterr().out
    assert NgramModel.read(out).order == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out=x.arpa"], "text=... is missing"),
        (["text=/nowhere.txt", "out=x.arpa"], "/nowhere.txt"),
        (["text={text}", "order=11", "out=x.arpa"], "order 1 to 10"),
        (["text={empty}", "out=x.arpa"], "no words"),
        (["text={text}", "colour=red"], "colour"),
        (["text={marks}", "out=x.arpa"], "marks"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {name: tmp_path / name for name in ("text", "empty", "marks")}
    for file, content in zip(files.values(), [TEXT[0], "\n\n", "a </s> b"], strict=True):
        file.write_text(content)
    assert lm.main([argument.format(**files) for argument in arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
