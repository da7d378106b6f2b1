"""The model of a run, an array, a tensor, a dict of them or a module, as named parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from hybridtrain.engine.memory import overlapping
from hybridtrain.engine.step.shared_buffers import lies_apart
from hybridtrain.engine.step.trained_parameters import ordered_parameters
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import hint, shown

ALONE = "parameters"  # the name of an array that is given alone


class Model:
    """A user's model in one process.

    Args:
        given: a numpy array or torch tensor, a mapping of names to them, or a module.

    Raises:
        UserError: if something else is given, or something that has no gradient.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.module = given if isinstance(given, torch.nn.Module) else None
        self._arrays = {} if self.module is not None else _arrays(given)
        tensors: Iterable[tuple[str, torch.Tensor]]
        if self.module is not None:
            self.named = list(self.module.named_parameters())
            tensors = self.module.named_parameters(remove_duplicate=False)
        else:
            self.named = [(n, torch.nn.Parameter(_tensor(a))) for n, a in self._arrays.items()]
            tensors = [(n, _view(a)) for n, a in self._arrays.items()]
        if found := overlapping(tensors):
            raise UserError(
                f"the parameters {found[0]!r} and {found[1]!r} share memory, and would be trained "
                "apart; give each once, or a copy of one, or tie them by one torch.nn.Parameter"
            )
        self.numbers = {name: number for number, (name, _) in enumerate(self.named)}

    def check_finite(self, values: Mapping[str, torch.Tensor], where: str) -> None:
        """Raises ``UserError`` if a trained parameter among these is NaN or infinite somewhere."""
        trained = {name for name, parameter in self.named if parameter.requires_grad}
        for name, value in values.items():
            if name in trained and not (finite := value.isfinite()).all():
                raise UserError(
                    f"{where}: parameter {name} has {int((~finite).sum())} of {value.numel()} "
                    "elements that are NaN or infinite; give finite ones"
                )

    def ordered(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters, those of the optimizer first, as they are laid out."""
        if self.module is None:
            return self.named
        return ordered_parameters(self.module, [optimizer])

    @property
    def visible(self) -> Any:
        """The model in the form in which it was given, with the parameters as they are now."""
        if self.module is not None:
            return self.module
        return self._in_form(dict(self.named))

    def _in_form(self, values: Mapping[str, torch.Tensor]) -> Any:
        """Values in the form in which arrays were given."""
        seen = {
            name: each if isinstance(self._arrays[name], torch.Tensor) else each.detach().numpy()
            for name, each in values.items()
        }
        return seen if isinstance(self.given, Mapping) else seen[ALONE]

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The parameters by name."""
        return {name: parameter.detach() for name, parameter in self.named}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's dense buffers (BatchNorm's running statistics) by name."""
        named = () if self.module is None else self.module.named_buffers()
        return {name: buffer for name, buffer in named if lies_apart(buffer)}

    @torch.no_grad()
    def take_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write these values into the user's module; one of another shape replaces the buffer."""
        for name, buffer in self.buffers.items():
            value = values.get(name, buffer)
            if value.shape == buffer.shape:
                buffer.copy_(value)
            elif self.module is not None:
                path, _, last = name.rpartition(".")
                setattr(self.module.get_submodule(path), last, value.clone())

    @torch.no_grad()
    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write these values into the arrays that the user has given."""
        for name, parameter in self.named:
            parameter.data.copy_(values[name])
            given = self._arrays.get(name)
            if isinstance(given, torch.Tensor):
                given.copy_(values[name])
            elif given is not None:
                given[...] = values[name].numpy()

    def copies(self, values: Mapping[str, torch.Tensor]) -> Any:
        """Values in the form in which the model was given; a module's by name."""
        plain = {name: each.clone() for name, each in values.items()}
        return plain if self.module is not None else self._in_form(plain)

    # ---- other places ---------------------------------------------------------------------------

    @torch.no_grad()
    def renewed(self) -> Model:
        """The same model as it is now: the user may have put other arrays or layers into it.

        Raises:
            UserError: if they have other names, shapes or types.
        """
        if self._has_same_arrays():
            for name, parameter in self.named:
                parameter.data.copy_(_view(self._arrays[name]))
            return self
        now = Model(self.given)
        kinds = [{name: (p.dtype, tuple(p.shape)) for name, p in m.named} for m in (self, now)]
        for name in kinds[0] | kinds[1]:
            was, found = (kind.get(name, "missing") for kind in kinds)
            if was != found:
                raise UserError(
                    f"the model was changed: {name} is {found}, and was {was} at first; make "
                    "another Server for it"
                )
        return now

    def _has_same_arrays(self) -> bool:
        """Whether the model is made of the arrays that it was made of at first."""
        if self.module is not None:
            return False
        now = _arrays(self.given)
        return now.keys() == self._arrays.keys() and all(
            now[name] is self._arrays[name] and tuple(now[name].shape) == tuple(p.shape)
            for name, p in self.named
        )

    def apart(self) -> Model:
        """The same model with memory of its own."""
        return Model(self.given if self.module is None else deepcopy(self.module))

    @torch.no_grad()
    def copied_from(self, other: Model) -> Any:
        """The model, with the parameters and buffers of another one, and no gradients."""
        own, theirs = ([p.data for _, p in each.named] for each in (self, other))
        torch._foreach_copy_(own, theirs)
        self.take_buffers(other.buffers)
        self.clear_gradients()
        return self.visible

    def clear_gradients(self) -> None:
        """As ``zero_grad`` does."""
        for _, parameter in self.named:
            parameter.grad = None

    @contextmanager
    def over(self, places: Mapping[str, torch.Tensor]) -> Iterator[Any]:
        """The model with its parameters at these places, for user code that changes them.

        It may also put other arrays, parameters or ``.data`` in their place.
        """
        for name, parameter in self._named_now:
            parameter.data = places.get(name, parameter).data
        seen = self.visible
        kept = dict(seen) if isinstance(seen, dict) else {}
        yield seen
        for name, array in kept.items():
            if seen[name] is not array:
                array[...] = seen[name]
        for name, parameter in self._named_now:
            place = places.get(name, parameter)
            if not parameter.is_set_to(place):
                place.data.copy_(parameter.data)

    @property
    def _named_now(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self.named if self.module is None else list(self.module.named_parameters())

    def update_of(self, gradients: Mapping[str, torch.Tensor]) -> Any:
        """Copies, in the form of the model; of a sparse one its row numbers and their values."""
        seen = {name: self._update_of(name, gradient) for name, gradient in gradients.items()}
        alone = self.module is None and not isinstance(self.given, Mapping)
        return seen[ALONE] if alone else seen

    def _update_of(self, name: str, gradient: torch.Tensor) -> Any:
        plain = isinstance(self._arrays.get(name), np.ndarray)
        if gradient.is_sparse:
            parts = in_rows(gradient)
            return tuple(part.numpy() for part in parts) if plain else parts
        copy = gradient.detach().clone()
        return copy.numpy() if plain else copy

    # ---- gradients ------------------------------------------------------------------------------

    def set_gradients(self, given: Any) -> None:
        """Let the parameters have these gradients.

        Args:
            given: in the form of the model: an array, or a mapping of names to them. An array may
                be dense, a sparse tensor, or the pair (row numbers, their values).

        Raises:
            UserError: if names or shapes are not the model's.
        """
        if not isinstance(given, Mapping):
            if len(self.named) != 1:
                raise UserError(
                    f"gradients of type {type(given).__name__} were pushed; give a mapping of "
                    f"the names {', '.join(self.numbers)} to arrays, or None to abstain"
                )
            given = {self.named[0][0]: given}
        for name in given:
            if name not in self.numbers:
                known = ", ".join(self.numbers)
                raise UserError(
                    f"a gradient of {shown(name)} was pushed{hint(str(name), self.numbers)}; the "
                    f"model has {known}"
                )
        for name, parameter in self.named:
            value = given.get(name)
            parameter.grad = None if value is None else _gradient(name, value, parameter)


def _arrays(given: Any) -> dict[str, Any]:
    found = dict(given) if isinstance(given, Mapping) else {ALONE: given}
    if not found:
        raise UserError("the model has no parameters; give an array, a dict of them, or a module")
    for name, array in found.items():
        what, plain = "model" if name == ALONE else f"parameter {name!r}", np.ndarray
        if not isinstance(array, plain | torch.Tensor):
            raise UserError(
                f"{what}: {shown(array)} was given; give a numpy array, a torch tensor, a dict of "
                "them, or a torch.nn.Module"
            )
        tensor = _from_numpy(what, array) if isinstance(array, plain) else array
        if not tensor.numel():
            raise UserError(f"{what} has no elements, shape {tuple(tensor.shape)}; leave it out")
        if not tensor.is_floating_point():
            raise UserError(f"{what} is of {array.dtype}, which has no gradient; use float32")
        is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not (array.flags.writeable if isinstance(array, plain) else is_dense):
            raise UserError(f"{what} must be dense, in host memory, and free to be written to")
    return found


def _from_numpy(what: str, given: Any) -> torch.Tensor:
    """The array as a tensor; raises ``UserError`` for masks, and types that torch does not have."""
    if isinstance(given, np.ma.MaskedArray):
        raise UserError(f"{what} is a masked array, and a mask has no meaning here; use .filled(0)")
    try:
        return torch.from_numpy(np.require(given, requirements=["C", "W"]))
    except (TypeError, ValueError):
        is_array = isinstance(given, np.ndarray)
        found = f"an array of {given.dtype.str}" if is_array else shown(given)
        raise UserError(
            f"{what} is {found}; give a torch tensor or a numpy array, of float32 or "
            "float64 in this machine's order of bytes"
        ) from None


def _view(array: Any) -> torch.Tensor:
    """The array's memory, as a tensor object of its own: axes that run backwards turned around."""
    if not isinstance(array, np.ndarray):
        return array.detach()
    turned = tuple(slice(None, None, -1 if stride < 0 else None) for stride in array.strides)
    return torch.from_numpy(array[turned] if turned else array)


def _tensor(array: Any) -> torch.Tensor:
    """A copy of its own."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(array).copy().reshape(array.shape))
    return array.detach().clone()


def _gradient(name: str, value: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    shape = tuple(parameter.shape)
    if isinstance(value, tuple) and len(value) == 2:
        return _rows(name, value, parameter)
    if hasattr(value, "tocoo"):  # scipy's
        matrix = value.tocoo()
        where = torch.from_numpy(np.stack([matrix.row, matrix.col]).astype(np.int64))
        data = _from_numpy(f"the gradient of {name}", matrix.data)
        value = torch.sparse_coo_tensor(where, data, matrix.shape, check_invariants=True)
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        value = value.to_sparse()  # of compressed rows
    if not isinstance(value, torch.Tensor):
        value = _from_numpy(f"the gradient of {name}", value)
    if tuple(value.shape) != shape:
        raise UserError(
            f"the gradient of {name} has the shape {tuple(value.shape)}, and the parameter {shape}"
        )
    return _real(name, value).detach().to(parameter.dtype)


def in_rows(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the row numbers of a sparse gradient, and of its rows."""
    gradient = gradient.coalesce()
    places, values = gradient.indices(), gradient.values()
    if gradient.sparse_dim() == 1:
        return places[0].clone(), values.clone()
    numbers, inside = places[0].unique(return_inverse=True)  # of single elements
    rows = values.new_zeros(len(numbers), *gradient.shape[1:])
    rows[(inside, *places[1:])] = values
    return numbers, rows


def _real(name: str, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_complex():
        raise UserError(f"the gradient of {name} is complex, and the parameter real; use .real")
    return gradient


def _rows(name: str, value: Sequence[Any], parameter: torch.nn.Parameter) -> torch.Tensor:
    """A sparse gradient of some rows."""
    numbers, values = np.asarray(value[0]), value[1]
    plain = not isinstance(values, torch.Tensor)
    dense = _real(name, _from_numpy(f"the gradient of {name}", values) if plain else values)
    n_rows, *rest = parameter.shape or (0,)
    if len(value[0]) and numbers.dtype.kind not in "iu":
        raise UserError(
            f"the gradient of {name} has row numbers of {numbers.dtype}; give whole numbers"
        )
    if numbers.ndim != 1 or tuple(dense.shape) != (len(numbers), *rest):
        raise UserError(
            f"the gradient of {name} has {numbers.size} row numbers and values of the shape "
            f"{tuple(dense.shape)}, which must be {(numbers.size, *rest)}"
        )
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < n_rows):
        raise UserError(
            f"the gradient of {name} has rows {numbers.min()} to {numbers.max()}, and the "
            f"parameter has {n_rows}"
        )
    where = torch.from_numpy(numbers.astype(np.int64))[None]
    sparse = torch.sparse_coo_tensor(
        where, dense.detach().to(parameter.dtype), parameter.shape, check_invariants=False
    )
    return sparse.coalesce()
