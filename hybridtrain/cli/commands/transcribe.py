"""Speech to text with a trained model.

    python -m hybridtrain transcribe ckpt=best.ckpt audio.wav [more.flac ...] [option=value ...]

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

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hybridtrain.cli.validation.checkpoint_checks import load_checkpoint
from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.alphabet import Alphabet
from hybridtrain.tasks.speech.decoding import Decoder, DecoderOptions, build_decoder
from hybridtrain.tasks.speech.features import Features
from hybridtrain.tasks.speech.module import SpeechModule
from hybridtrain.util.arguments import command, value_of

OPTIONS = ("ckpt", "decoder", "beam_width", "lm", "lexicon", "lm_alpha", "lm_beta")


def load_module(path: str | Path) -> SpeechModule:
    """Load the speech model of a checkpoint, in evaluation mode.

    Nothing in the file is executed (``weights_only``). ``UserError`` if it is missing, damaged,
    contains code, or is not a speech model's.
    """
    checkpoint = load_checkpoint(Path(path))
    settings = checkpoint.get("hyper_parameters") if isinstance(checkpoint, dict) else None
    if not isinstance(settings, dict) or not {"net", "alphabet", "features"} <= set(settings):
        raise UserError(f"{path} is not the checkpoint of a speech model (task=speech)")
    known = {key: settings[key] for key in ("net", "alphabet", "features")}
    try:
        with torch.device("meta"):  # settings of a few bytes may describe a net of terabytes
            described = SpeechModule(**known).state_dict()
        if other := [x for x, value in described.items() if _shape(checkpoint, x) != value.shape]:
            raise UserError(
                f"{other[0]} has shape {tuple(_shape(checkpoint, other[0]))} in the file, and"
                f" {tuple(described[other[0]].shape)} by its settings"
            )
        module = SpeechModule(**known)
        module.load_state_dict(checkpoint["state_dict"])
    except (RuntimeError, KeyError, TypeError, AttributeError, UserError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} does not fit the speech model it describes: {reason}") from error
    return module.eval()


def _shape(checkpoint: Mapping[str, Any], name: str) -> torch.Size:
    return torch.Size(checkpoint["state_dict"][name].shape)


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


def parse(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options and sound files; ``name=value`` is an option unless such a file exists."""
    options: dict[str, str] = {}
    files = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if name in OPTIONS and separator:
            options[name] = value
        elif separator and "/" not in name and not Path(argument).exists():
            raise UserError(f"unknown option {name!r}: choose from {', '.join(OPTIONS)}")
        else:
            files.append(argument)
    if "ckpt" not in options:
        raise UserError("ckpt=FILE is missing: name the checkpoint of a speech run")
    if not files:
        raise UserError("no sound file given: name at least one, e.g. audio.wav")
    return options, files


def run(arguments: Sequence[str]) -> int:
    """Transcribe the files named and print their texts; 2 if some could not be."""
    options, files = parse(arguments)
    module = load_module(options.pop("ckpt"))
    kind = options.pop("decoder", "greedy")
    numbers = {name: value_of(text) for name, text in options.items()}
    settings = DecoderOptions.of({"kind": kind, **numbers})
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
    return command(run, __doc__, arguments)
