"""Codecs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridtrain.exchanges.compression.compressor import Codec, TopK, int4, int8
from hybridtrain.exchanges.compression.power_sgd import PowerSGD
from hybridtrain.util.option_types import choose

CodecSpec = str | Mapping[str, Any] | Codec | None  # a name, {"name": ...}, an object

CODECS: dict[str, Callable[..., Codec]] = {
    "int8": int8,
    "int4": int4,
    "topk": TopK,
    "power_sgd": PowerSGD,
}


def make_codec(given: CodecSpec) -> Codec | None:
    """A codec from its name, its name and parameters, or the object itself; ``None``: none.

    Raises:
        UserError: if the name is not known, or the parameters make no sense.
    """
    if given is None:
        return None
    return choose("exchange.compress", given, CODECS, Codec)  # type: ignore[type-abstract]
