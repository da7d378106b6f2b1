"""Accept the state that any optimizer of torch saves; refuse mistakes in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_content import check_content
from tests.lightning.toys import Regression, make_trainer, regression_data

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [{}, {"amsgrad": True}, {"lr": torch.tensor(0.01)}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
}
KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam")  # which takes sparse gradients only
)
CASES = [(kind, options) for kind in KINDS for options in OPTIONS.get(kind, [{}])]


def content_after_steps(kind: str, **options: Any) -> dict[str, Any]:
    """A checkpoint after two steps; one parameter has had no gradient (LBFGS: all in one group)."""
    weights = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    unused = torch.nn.Parameter(torch.ones(3, 2))
    groups: Any = [{"params": weights[:2]}, {"params": [*weights[2:], unused]}]
    if kind == "LBFGS":
        groups = weights
    optimizer = getattr(torch.optim, kind)(groups, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(weight**2).sum() for weight in weights]).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return {
        "state_dict": {str(n): weight.detach() for n, weight in enumerate([*weights, unused])},
        "pytorch-lightning_version": "2.6.1",
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
    }


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_what_an_optimizer_of_torch_saves_is_taken(kind: str, options: dict[str, Any]) -> None:
    check_content(content_after_steps(kind, **options), "ckpt=x.ckpt", resumes=True)


def test_what_other_optimizers_save_is_taken() -> None:
    """As MADGRAD (a state of no parameter), SM3 (one for each dimension), Shampoo, 8-bit Adam."""
    content = content_after_steps("SGD", momentum=0.9)
    saved, accumulator = content["optimizer_states"][0], torch.ones(3, 1)
    of_two = {"accumulator_0": accumulator, "accumulator_1": accumulator, "shapes": (3, 2)}
    saved["state"] = {
        0: of_two | {"best": float("inf"), "inverses": [accumulator], "quantized": {"map": None}},
        1: {"accumulator_0": torch.tensor(0.0), "shapes": None, "kind": frozenset({1})},
        2: {"accumulator_0": torch.ones(0)},
        "k": torch.tensor([3]),
        "seen": 4,
    }
    saved["param_groups"][0] |= {"lr": None, "betas": (None, 0.9)}
    check_content(content, "ckpt=x.ckpt", resumes=True)


def renumber(state: Any) -> None:
    state["param_groups"][1]["params"] = [5, 6]


def number_twice(state: Any) -> None:
    state["param_groups"][1]["params"] = [1, 2]


def empty_a_moment(state: Any) -> None:
    state["state"][1]["exp_avg"] = None


def empty_all_moments(state: Any) -> None:
    for each in state["state"].values():
        each["exp_avg_sq"] = None


def take_a_moment(state: Any) -> None:
    del state["state"][0]["exp_avg"]


def shrink_a_moment(state: Any) -> None:
    state["state"][1]["exp_avg"] = torch.zeros(2, 2)


def flatten_a_state(state: Any) -> None:
    state["state"][1] = [0.0]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (flatten_a_state, "state of parameter 1 is not whole"),
        (renumber, r"parameters are numbered \[0, 1, 5, 6\]"),
        (number_twice, r"parameters are numbered \[0, 1, 1, 2\]"),
        (empty_a_moment, "exp_avg of parameter 1 is None"),
        (empty_all_moments, "exp_avg_sq of parameter 0 is None"),
        (take_a_moment, "state of parameter 0 is not whole"),
        (shrink_a_moment, r"of parameter 1 have different shapes: exp_avg \(2, 2\), exp_avg_sq "),
    ],
)
def test_a_state_with_a_mistake_is_refused_in_one_line(
    mistake: Callable[[Any], None], said: str
) -> None:
    content = content_after_steps("Adam")
    mistake(content["optimizer_states"][0])
    with pytest.raises(UserError, match=f"^ckpt=x.ckpt: .*{said}") as refused:
        check_content(content, "ckpt=x.ckpt", resumes=True)
    assert "\n" not in str(refused.value)


# ---- the file of a run that was interrupted within an epoch --------------------------------------


class Save(pl.Callback):
    """Writes a checkpoint within the epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint("mid.ckpt")


def make_sparse(content: Any) -> None:
    weights = content["state_dict"]
    weights["net.0.weight"] = weights["net.0.weight"].to_sparse()


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        *places, last = path
        for place in places:
            content = content[place]
        content[last] = value

    return change


HUGE = r"is 2305843009213693952, and must be a whole number from 0 to"
ODD: dict[str, tuple[Callable[[Any], None], str]] = {
    "mini-batches": (put(2**61, "hybridtrain", "batches"), rf"hybridtrain\.batches {HUGE}"),
    "of a loader": (
        put(2**61, "hybridtrain", "loaders", 0, "batches"),
        rf"hybridtrain\.loaders\[0\]\.batches {HUGE}",
    ),
    "version": (put("0.0.1", "pytorch-lightning_version"), "version is 0.0.1, and the loops are"),
    "a metric": (put("x", "hybridtrain", "metrics", "train/loss"), "metrics.train/loss is 'x'"),
    "metrics": (put("x", "hybridtrain", "metrics"), "hybridtrain.metrics is 'x', and must be a"),
    "weight": (make_sparse, r"net.0.weight has shape \(16, 4\) in torch.sparse_coo instead of"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_value_in_a_file_given_from_python_is_one_line_that_names_file_and_entry(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = DataLoader(regression_data(32), 4)
    make_trainer("hybrid", 2, max_epochs=1, callbacks=[Save()]).fit(Regression(), data)
    content = torch.load("mid.ckpt", weights_only=True)
    change, said = ODD[kind]
    change(content)
    torch.save(content, "odd.ckpt")
    with pytest.raises(UserError, match=f"^ckpt_path=odd.ckpt: .*{said}") as refused:
        make_trainer("hybrid", 2, max_epochs=2).fit(Regression(), data, ckpt_path="odd.ckpt")
    assert "\n" not in str(refused.value)
