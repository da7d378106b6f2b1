"""The number of samples in a mini-batch: the weight of its gradient.

Taken from the user (``strategy.num_samples_key``, or the module's method ``num_samples(batch)``),
else from the sampler, else from the first tensor of the batch. A filler has weight 0.

A ``collate_fn`` of the user's may leave samples out. Then the mini-batch has fewer than the sampler
has drawn: all its tensors and lists begin with one smaller number. Shapes that do not agree
(graphs, ragged sequences), and tensors that have time first and the number drawn second, say
nothing of that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, default_collate

from hybridtrain.errors import UserError

Key = str | int


class Scales:
    """Weighs mini-batches.

    Args:
        module: the user's; may have a method ``num_samples(batch) -> int``.
        key: the entry or attribute of a batch with its number of samples, if the user gives one.
    """

    def __init__(self, module: object, key: Key | None = None) -> None:
        self._key = key
        self._hook = _hook(module)

    def weigh(self, batch: Any, known: float | None = None, all_kept: bool = True) -> float:
        """The number of samples.

        Args:
            batch: as the training step gets it.
            known: the sampler's number; 0: a filler; ``None``: unknown.
            all_kept: the mini-batch has all samples that were drawn for it.

        Raises:
            UserError: if the number cannot be found, or the user's key or hook gives no number.
        """
        if known == 0:
            return 0.0
        if self._key is not None:
            where = f"num_samples_key={self._key!r} was given"
            return _number(_entry(batch, self._key), where)
        if self._hook is not None:
            return _number(self._hook(batch), "the method num_samples(batch) was asked", whole=True)
        if known is None:
            return _shown(batch)
        return known if all_kept else _kept(batch, known)


def _hook(module: object) -> Any:
    """The module's ``num_samples``, if it is a method that takes a batch (and nothing else)."""
    method = getattr(module, "num_samples", None)
    if not inspect.ismethod(method):
        return None
    parameters = inspect.signature(method).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return method if len(needed) == 1 else None


def _entry(batch: Any, key: Key) -> Any:
    if isinstance(batch, Mapping):
        if key in batch:
            return batch[key]
    elif isinstance(key, int):
        if isinstance(batch, Sequence) and -len(batch) <= key < len(batch):
            return batch[key]
    elif hasattr(batch, key):
        return getattr(batch, key)
    raise UserError(
        f"num_samples_key={key!r} was given, but a batch is {_described(batch)}; give another key, "
        "or write a method num_samples(batch) -> int on the LightningModule"
    )


def _described(batch: Any) -> str:
    """A batch's type, and the entries that the user could have named."""
    kind = f"of type {type(batch).__name__}"
    if isinstance(batch, Mapping):
        return f"{kind} and has the keys {', '.join(repr(each) for each in batch)}"
    names = getattr(batch, "_fields", None) or sorted(getattr(batch, "__dict__", ()))
    if names:
        return f"{kind} and has the attributes {', '.join(names)}"
    if isinstance(batch, Sequence):
        return f"{kind} and has {len(batch)} entries, counted from 0"
    return f"{kind} and has no entries"


def _number(value: Any, asked: str, whole: bool = False) -> float:
    """The number itself; the first dimension of a tensor; the length of a list."""
    if isinstance(value, torch.Tensor) and value.ndim and not whole:
        return float(value.shape[0])
    if isinstance(value, Sized) and not isinstance(value, str | torch.Tensor) and not whole:
        return float(len(value))
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or number < 0 or number != int(number):
        raise UserError(
            f"{asked} for the number of samples in a batch, and the answer was {value!r}; it must "
            "be a whole number from 0 on" + ("" if whole else ", a tensor or a list")
        )
    return number


def step_fetches(module: Any) -> bool:
    """Whether ``training_step(dataloader_iter)`` takes its mini-batches from the loader itself."""
    return bool(is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True))


def samples_in(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch of any nesting, or ``None``."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif hasattr(batch, "__dataclass_fields__"):
        batch = vars(batch).values()
    elif isinstance(batch, str | Iterator) or not hasattr(batch, "__iter__"):
        return None
    for part in batch:
        if (found := samples_in(part)) is not None:
            return found
    return None


def keeps_all(loader: Any) -> bool:
    """Whether a loader's mini-batches have all samples that were drawn for them: it is torch's."""
    return type(loader) is DataLoader and loader.collate_fn is default_collate


def _kept(batch: Any, drawn: float) -> float:
    """The samples of a mini-batch, of which some may have been left out."""
    if samples_in(batch) == drawn:
        return drawn
    found, time_first = None, True
    for shape in _shapes(batch):
        if shape[0] == drawn or found not in (None, shape[0]):
            return drawn
        found = shape[0]
        time_first = time_first and shape[1:2] == (drawn,)
    return drawn if found is None or found > drawn or time_first else float(found)


def _shapes(batch: Any, within: bool = False) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of tensors and arrays in a batch; a list within an entry holds samples."""
    if hasattr(batch, "shape"):
        if len(batch.shape):
            yield tuple(batch.shape)
        return
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif hasattr(batch, "__dataclass_fields__"):
        parts = vars(batch).values()
    elif isinstance(batch, list | tuple):
        if within and not hasattr(batch, "_fields"):
            yield (len(batch),)
        else:
            parts = batch
    for part in parts:
        yield from _shapes(part, within=True)


def _shown(batch: Any) -> float:
    found = samples_in(batch)
    if found is None:
        raise UserError(
            f"the number of samples in a batch of type {type(batch).__name__} cannot be seen, so "
            "its gradient cannot be weighted; say which entry of the batch tells it "
            "(strategy.num_samples_key=KEY), or write a method num_samples(batch) -> int on the "
            "LightningModule"
        )
    return float(found)
