"""Messages between processes as bytes: no tensor of a device is in them."""

from __future__ import annotations

import copyreg
import io
import pickle
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch

from hybridtrain.protocol.messages import Draw, Push, Released, Ticket


def _on_the_host(tensor: torch.Tensor) -> Any:
    """How a tensor is pickled: as one in host memory, wherever it lies.

    A tensor of a device would initialise that device where it is read: in the parent, whose forked
    workers could not use it any more, or on a device that is another worker's.
    """
    if tensor.device.type in ("cpu", "meta"):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    here = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        here = torch.nn.Parameter(here, tensor.requires_grad)
    return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _by_arguments(kind: type[Any]) -> None:
    """Pickle these as calls: what dataclasses with slots do is a loop in Python, each way."""
    values = attrgetter(*(each.name for each in fields(kind)))
    copyreg.pickle(kind, lambda message: (kind, values(message)))


for _kind in (Push, Draw, Released, Ticket):  # those of every step
    _by_arguments(_kind)

_OF_TORCH = b"torch"  # the module of what makes a tensor again


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {
        torch.Tensor: _on_the_host,
        torch.nn.Parameter: _on_the_host,
    }


def pickled(message: Any) -> bytes:
    """The message; its tensors as ones in host memory, wherever they lie."""
    plain = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if _OF_TORCH not in plain:  # nearly all have no tensor, and a pickler of one's own is slow
        return plain
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()
