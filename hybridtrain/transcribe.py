"""Speech to text with a trained model.

    python -m hybridtrain.transcribe ckpt=best.ckpt audio.wav [more.flac ...] [option=value ...]

Prints the text, or `file: text` for several files. Any sample rate; WAV, FLAC, OGG and MP3.
A file that cannot be read is a line on standard error, and status 2 in the end.

Options:
  ckpt=FILE        checkpoint of a speech run (required); read as data, code in it is refused
  decoder=KIND     greedy (default) or beam
  beam_width=N     how many prefixes the beam search keeps (default 1024)
  lm=FILE          n-gram language model, ARPA or KenLM binary (with decoder=beam; extra `lm`)
  lexicon=FILE     the words to choose from, one per line (default: those of the ARPA model)
  lm_alpha=X       weight of the language model (default 0.931289039105002)
  lm_beta=X        reward per word (default 1.1834137581510284)
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.decoding import Decoder, DecoderOptions, build_decoder
from hybridtrain.tasks.speech.features import Features
from hybridtrain.tasks.speech.module import SpeechModule
from hybridtrain.util.arguments import command
from hybridtrain.util.files import check_input

OPTIONS: dict[str, type] = {
    "ckpt": str,
    "decoder": str,
    "beam_width": int,
    "lm": str,
    "lexicon": str,
    "lm_alpha": float,
    "lm_beta": float,
}


def load_module(path: str | Path) -> SpeechModule:
    """Load the speech model of a checkpoint, in evaluation mode.

    Nothing in the file is executed (``weights_only``). ``UserError`` if it is missing, damaged,
    contains code, or is not a speech model's.
    """
    checkpoint = _read(Path(path))
    settings = checkpoint.get("hyper_parameters") if isinstance(checkpoint, dict) else None
    if not isinstance(settings, dict) or not {"net", "alphabet", "features"} <= set(settings):
        raise UserError(f"{path} is not the checkpoint of a speech model (task=speech)")
    known = {key: settings[key] for key in ("net", "alphabet", "features")}
    try:
        module = SpeechModule(**known)
        module.load_state_dict(checkpoint["state_dict"])
    except (RuntimeError, KeyError, TypeError, AttributeError, UserError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} does not fit the speech model it describes: {reason}") from error
    return module.eval()


def _read(path: Path) -> Any:
    """Load plain data and tensors; raises UserError for a damaged file, and for code in it."""
    check_input(path, "the checkpoint")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, about unusual pickles
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "GLOBAL" in str(error):
            raise UserError(
                f"{path} contains code, not only weights; it was not run and is not loaded"
            ) from error
        raise UserError(f"{path} is not a checkpoint, or is damaged") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path} is not a checkpoint, or is damaged") from error


@torch.inference_mode()
def transcribe(module: SpeechModule, decoder: Decoder, file: str | Path) -> str:
    """The text of one sound file, of any length and sample rate."""
    from hybridtrain.tasks.speech.sources.utterance import (
        load_audio,  # here: it raises without extra `speech`
    )

    features = Features(**module.hparams["features"])
    frames = features(load_audio(file, features.sample_rate))  # (T, F)
    log_probs, lengths = module(frames[None], torch.tensor([len(frames)]))
    return decoder(log_probs, lengths)[0]


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options and sound files; ``name=value`` is an option unless such a file exists."""
    options: dict[str, Any] = {}
    files = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if name in OPTIONS and separator:
            options[name] = _value(name, value)
        elif separator and "/" not in name and not Path(argument).exists():
            raise UserError(f"unknown option {name!r}: choose from {', '.join(OPTIONS)}")
        else:
            files.append(argument)
    if "ckpt" not in options:
        raise UserError("ckpt=FILE is missing: name the checkpoint of a speech run")
    if not files:
        raise UserError("no sound file given: name at least one, e.g. audio.wav")
    return options, files


def _value(name: str, text: str) -> Any:
    try:
        return OPTIONS[name](text)
    except ValueError:
        raise UserError(f"{name}={text}: expected a number") from None


def run(arguments: Sequence[str]) -> int:
    """Transcribe the files named and print their texts; 2 if some could not be."""
    options, files = parse(arguments)
    module = load_module(options.pop("ckpt"))
    kind = options.pop("decoder", "greedy")
    settings = DecoderOptions.of({"kind": kind, **options})
    decoder = build_decoder(settings, Alphabet(module.hparams["alphabet"]))
    status = 0
    for file in files:
        try:
            text = transcribe(module, decoder, file)
        except (UserError, OSError) as error:  # the others may be good
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = 2
            continue
        print(text if len(files) == 1 else f"{file}: {text}", flush=True)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 2 after one line on standard error."""
    given = sys.argv[1:] if arguments is None else arguments
    return command(run, __doc__, given or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
