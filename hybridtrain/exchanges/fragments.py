"""Which parameters travel together, where they do not all travel at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridtrain.errors import UserError


def fragments_of(tensors: Sequence[torch.Tensor], number: int) -> list[list[int]]:
    """The places of each of so many fragments: layer i is part of fragment i mod ``number``.

    A layer is a tensor of two dimensions or more, and the smaller ones behind it. If there are
    fewer layers than fragments, each tensor is one.

    Raises:
        UserError: if there are fewer tensors than fragments.
    """
    check_tensors(len(tensors), number)
    layers: list[list[int]] = []
    for place, tensor in enumerate(tensors):
        if tensor.ndim > 1 or not layers:
            layers.append([])
        layers[-1].append(place)
    if len(layers) < number:
        layers = [[place] for place in range(len(tensors))]
    return [[p for layer in layers[first::number] for p in layer] for first in range(number)]


def check_tensors(n_tensors: int, number: int) -> None:
    """Each fragment has whole tensors, one at least.

    Raises:
        UserError: if there are too few.
    """
    if n_tensors < number:
        raise UserError(
            f"exchange.fragments={number} was given, but only {n_tensors} parameters are trained, "
            f"and a fragment has whole ones; give from 1 to {n_tensors}"
        )


def check_fragments(every: int, number: int, overlap: int) -> None:
    """What makes sense without knowing the parameters.

    Raises:
        UserError: naming what does not.
    """
    if number > every:
        raise UserError(
            f"exchange.fragments={number} was given with every={every}, but each fragment has a "
            f"step of its own among these; give from 1 to {every}, or a larger every"
        )
    apart = every // number
    if overlap >= apart:
        raise UserError(
            f"exchange.overlap={overlap!r} was given; it must be a whole number from 0 to "
            f"{apart - 1}, for the next fragment travels after every / fragments = {every} / "
            f"{number} steps"
        )
