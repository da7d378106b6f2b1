"""A case: one module, one set of data, the trainer's arguments, and what is expected of them.

Cases are registered by theme in ``tests/parity/cases``; the harness runs each under several
strategies and compares everything that a user could observe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl

Act = Callable[[pl.Trainer, pl.LightningModule, Mapping[str, Any]], Any]
Loaders = Callable[[int], Mapping[str, Any]]  # mini-batch of one worker -> arguments of ``fit``
Options = Callable[[Path], Mapping[str, Any]]  # folder of the run -> arguments of the trainer


class Grade(IntEnum):
    """How near two runs are, best first."""

    BITWISE = 0
    ROUNDING = 1
    DIFFERS = 2

    def __str__(self) -> str:
        return ("bitwise", "within rounding", "differs")[self]


def fit(trainer: pl.Trainer, module: pl.LightningModule, data: Mapping[str, Any]) -> Any:
    """What is done with trainer, module and data, unless a case says otherwise."""
    return trainer.fit(module, **data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to run and what to expect.

    Args:
        name: unique within the theme.
        theme: the file's subject.
        module: makes the module, after the seed has been set.
        data: makes the arguments of ``fit`` from the mini-batch size of one worker.
        trainer: makes arguments of the trainer, over the quiet defaults.
        act: what is done with them.
        ddp: the variant of DDP that accepts the module.
        versus: what ``hybrid`` must equal: ``ddp``, or ``union``, one worker without any strategy
            that sees the union of all mini-batches, where DDP pads, refuses or hangs.
        expect: the worst grade allowed against that, with two workers. With three, sums are
            rounded in another order than DDP's, so at best rounding is expected there.
        reason: why DDP is not the reference, or why only rounding can be expected.
        facets: what is compared, as patterns of dotted names; all, unless said otherwise.
        ignore: what is not, also patterns.
        rtol: the largest relative difference that is called rounding.
        wide: run by default, with three workers; the slow tests run all, with two and three.
        batch: mini-batch of one worker.
        gpu: needs CUDA.
        on_cpu: a CPU would compute the same, so that DDP on one is a reference for others.
        raises: the error that every strategy must end with; none, unless said otherwise.
        limit_s: after so many seconds a run counts as hung.
    """

    name: str
    theme: str
    module: Callable[[], pl.LightningModule]
    data: Loaders
    trainer: Options = lambda folder: {}
    act: Act = fit
    ddp: str = "ddp_fork"
    versus: Literal["ddp", "union"] = "ddp"
    expect: Grade = Grade.ROUNDING
    reason: str = ""
    facets: tuple[str, ...] = ("*",)
    ignore: tuple[str, ...] = ()
    rtol: float = 1e-4
    wide: bool = False
    batch: int = 4
    gpu: bool = False
    on_cpu: bool = True
    raises: str = ""
    limit_s: float = 30.0

    @property
    def id(self) -> str:
        return f"{self.theme}/{self.name}"

    def ends_well(self, error: str | None) -> bool:
        """Whether a run may end with this error, or with none."""
        return self.raises in (error or "") if self.raises else error is None

    def allowed(self, workers: int) -> Grade:
        """The worst grade with so many workers."""
        return self.expect if workers <= 2 else max(self.expect, Grade.ROUNDING)


@dataclass
class Theme:
    """Registers the cases of one file.

    Args:
        name: the theme.
        data: the loaders of cases that bring none of their own.
    """

    name: str
    data: Loaders
    cases: dict[str, Case] = field(default_factory=dict)

    def add(self, name: str, module: Callable[[], pl.LightningModule], **options: Any) -> None:
        """Register one more."""
        assert name not in self.cases, f"{self.name} has two cases called {name}"
        trainer = options.pop("trainer", {})
        make = trainer if callable(trainer) else lambda folder: dict(trainer)
        options.setdefault("data", self.data)
        self.cases[name] = Case(name=name, theme=self.name, module=module, trainer=make, **options)
