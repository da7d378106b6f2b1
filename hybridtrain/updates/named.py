"""Updates by name: how the masters move, where that is not the user's own optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.util.named_choice import hint

UpdateSpec = str | Mapping[str, Any] | None  # a name, or {"name": ..., arguments}

USER, MEAN = "user", "mean"
KNOWN: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
}


@dataclass(frozen=True)
class NamedUpdate:
    """An optimizer of ``torch.optim`` with its arguments; ``"mean"``: what is handed over, once.

    What is not given and the module's own optimizer has as well (the learning rate, and whatever a
    schedule changes) follows the module's own.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_users(self) -> bool:
        """Whether the module's own optimizer is meant."""
        return self.name == USER

    @property
    def _kind(self) -> type[torch.optim.Optimizer]:
        return torch.optim.SGD if self.name == MEAN else KNOWN[self.name]

    def follows(self, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """The hyper-parameters that are those of the module's own optimizer."""
        if self.is_users:
            return frozenset(optimizer.defaults)
        if self.name == MEAN:
            return frozenset()
        return frozenset(inspect.signature(self._kind).parameters) & (
            optimizer.defaults.keys() - self.options.keys()
        )

    def over(self, optimizer: torch.optim.Optimizer, inherits: bool) -> torch.optim.Optimizer:
        """One over the same parameters and groups.

        Args:
            optimizer: the module's own.
            inherits: take what is not given from there.

        Raises:
            UserError: if the class refuses its arguments.
        """
        if self.is_users:
            return optimizer
        follows = self.follows(optimizer) if inherits else frozenset()
        groups = [
            {"params": group["params"], **{key: group[key] for key in follows if key in group}}
            for group in optimizer.param_groups
        ]
        options = {"lr": 1.0} if self.name == MEAN else dict(self.options)
        try:
            return self._kind(groups, **options)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"update={self.name} with {dict(self.options)} was given, but "
                f"torch.optim.{self._kind.__name__} refuses that: {error}"
            ) from error


def make_update(given: UpdateSpec) -> NamedUpdate | None:
    """An update from its name, or its name and arguments; ``None``: what goes with the exchange.

    Raises:
        UserError: if there is no such name or argument.
    """
    if given is None:
        return None
    options = {"name": given} if isinstance(given, str) else {str(k): v for k, v in given.items()}
    name = str(options.pop("name", None)).lower()
    known = {USER, MEAN, *KNOWN}
    if name not in known:
        raise UserError(
            f"update={given!r} was given{hint(name, known)}; known are {USER} (the module's own "
            f"optimizer), {MEAN}, and of torch.optim {', '.join(sorted(KNOWN))}"
        )
    takes = set(inspect.signature(KNOWN[name]).parameters) - {"params"} if name in KNOWN else set()
    for option in options:
        if option not in takes:
            raise UserError(
                f"update.{option} was given{hint(option, takes)}; {name} takes "
                f"{', '.join(sorted(takes)) or 'no arguments'}"
            )
    return NamedUpdate(name, options)
