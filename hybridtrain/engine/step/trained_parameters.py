"""Order and number the parameters to train, and write an optimizer by these numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybridtrain.engine.updates.groups import takes_sparse
from hybridtrain.engine.updates.serialize import dump
from hybridtrain.errors import UserError


def ordered_parameters(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[str, torch.nn.Parameter]]:
    """The module's parameters, those of the optimizers first and group by group.

    Raises:
        UserError: if there is nothing to train, or an optimizer has parameters of its own.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    if not any(p.requires_grad for p in module.parameters()):
        raise UserError(
            f"{type(module).__name__} has no parameters that need gradients; there is nothing to "
            "train: check requires_grad, or use trainer.test"
        )
    found: dict[int, torch.nn.Parameter] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            if id(parameter) not in names:
                raise UserError(
                    f"{type(optimizer).__name__} was given a tensor of shape "
                    f"{tuple(parameter.shape)} that is not a parameter of {type(module).__name__}; "
                    "register it on the module (torch.nn.Parameter), so that it can be shared"
                )
            found[id(parameter)] = parameter
    found |= {id(p): p for p in module.parameters()}
    return [(names[key], parameter) for key, parameter in found.items()]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All of them, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def slot_numbers(optimizer: torch.optim.Optimizer, number_of: Mapping[int, int]) -> tuple[int, ...]:
    """The slot number of each parameter, group by group.

    Raises:
        UserError: if one has come into being after the parameters were laid out.
    """
    for parameter in parameters_of(optimizer):
        if id(parameter) not in number_of:
            raise UserError(
                f"{type(optimizer).__name__} was given a parameter of shape "
                f"{tuple(parameter.shape)} that the module did not have when training began; "
                "create it in __init__, configure_model or configure_optimizers (frozen, with "
                "requires_grad=False, if it is to be trained only later)"
            )
    return tuple(number_of[id(parameter)] for parameter in parameters_of(optimizer))


def sparse_numbers(
    optimizers: Sequence[torch.optim.Optimizer], numbers: Sequence[tuple[int, ...]]
) -> set[int]:
    """Slot numbers of the parameters whose every optimizer takes sparse gradients."""
    known = list(zip(map(takes_sparse, optimizers), numbers, strict=True))
    dense = {n for takes, inside in known if not takes for n in inside}
    return {n for takes, inside in known if takes for n in inside} - dense


def sparse_slots(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    number_of: Mapping[int, int],
) -> set[int]:
    """The numbers of tables whose gradients are a few rows, and stay so."""
    tables = {number_of[key] for key in sparse_tables(module)}
    numbers = [slot_numbers(optimizer, number_of) for optimizer in optimizers]
    return tables & sparse_numbers(optimizers, numbers)


def sparse_tables(module: torch.nn.Module) -> set[int]:
    """The ids of parameters that nothing but embeddings with ``sparse=True`` uses."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    found: set[int] = set()
    others: set[int] = set()
    for each in module.modules():
        is_sparse = isinstance(each, kinds) and each.sparse
        (found if is_sparse else others).update(map(id, each.parameters(recurse=False)))
    return found - others


def dumped(optimizer: torch.optim.Optimizer, number_of: Mapping[int, int]) -> bytes:
    """The optimizer, ready to travel.

    Raises:
        UserError: if it cannot.
    """
    try:
        return dump(optimizer, number_of)
    except Exception as error:
        raise UserError(
            f"the optimizer {type(optimizer).__name__} cannot be handed to the server, because "
            f"something it holds cannot be pickled ({error}); keep only plain data and tensors "
            "on the optimizer"
        ) from error
