"""Every utterance is looked at before training: bad input is named at the start, or skipped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.features import Features
from hybridtrain.tasks.speech.sources.utterance import Utterance, frames_needed

log = logging.getLogger(__name__)
SLOW = 5000  # utterances; above, a progress bar (0.1 ms per file on a local disk, more on others)


def check(
    utterance: Utterance, alphabet: Alphabet, features: Features, frames_per_output: int = 1
) -> Utterance:
    """The utterance with its length filled in; ``UserError`` if a model cannot learn from it.

    Only headers are read. ``frames_per_output``: feature frames per output of the model.
    """
    try:
        if not utterance.transcript.strip():
            raise UserError(f"the transcript of {utterance.name} is empty")
        labels = alphabet.encode(utterance.transcript)
        samples = utterance.measure(features.sample_rate)
        _require_room(utterance, labels, features.frames(samples), frames_per_output)
    except UserError as error:
        where = f"{utterance.origin}: " if utterance.origin else ""
        raise UserError(f"{where}{error}") from error
    return replace(utterance, samples=samples)


def check_all(
    found: list[Utterance],
    alphabet: Alphabet,
    features: Features,
    frames_per_output: int = 1,
    skip_bad: bool = False,
) -> tuple[list[Utterance], list[str]]:
    """The good utterances, and one message for each that was skipped.

    Without ``skip_bad`` the first bad one raises ``UserError``; with it, all bad ones do.
    """
    good: list[Utterance] = []
    problems: list[str] = []
    for utterance in _with_progress(found):
        try:
            good.append(check(utterance, alphabet, features, frames_per_output))
        except UserError as error:
            if not skip_bad:
                raise UserError(f"{error} (data.skip_bad=true leaves such files out)") from error
            problems.append(str(error))
    if problems and not good:
        raise UserError(f"all {len(problems)} utterances are bad; the first: {problems[0]}")
    return good, problems


def _require_room(
    utterance: Utterance, labels: list[int], frames: int, frames_per_output: int
) -> None:
    needed = frames_needed(labels, frames_per_output)
    if needed > frames:
        raise UserError(
            f"the transcript {utterance.transcript!r} is too long for {utterance.name}: its"
            f" {len(labels)} characters need {needed} feature frames, the sound has {frames}"
        )


def _with_progress(found: list[Utterance]) -> Iterator[Utterance] | Iterable[Utterance]:
    if len(found) < SLOW or found[0].clips[0].path.endswith(".npy"):
        return found
    from rich.progress import track

    return track(found, description="Checking the audio files", transient=True)
