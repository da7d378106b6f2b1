"""One pass finds out whether a worker's gradients are numbers."""

from __future__ import annotations

import pytest
import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.worker.finite import FiniteCheck

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def make(dtype: torch.dtype = torch.float32) -> tuple[Store, FiniteCheck]:
    tensors = [("a", torch.zeros(3, dtype=dtype)), ("b", torch.zeros(2, 40, dtype=dtype))]
    tensors += [("c", torch.zeros((), dtype=dtype)), ("d", torch.zeros(0, dtype=dtype))]
    store = Store(Layout.of([*tensors, ("e", torch.zeros(5))]), 2, False)
    return store, FiniteCheck(store, 1)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_parameter_that_is_not_finite_is_named(dtype: torch.dtype, value: float) -> None:
    store, check = make(dtype)
    everything = tuple(range(5))
    assert check.offender(everything, ()) is None
    for number, where in ((4, (1,)), (1, (1, 7)), (0, (2,))):
        store.gradient(1, store.layout.slots[number])[where] = value
        assert check.offender(everything, ()) == number
    assert check.count(0) == (1, 3)
    assert check.offender((1, 2), ()) == 1
    assert check.offender(everything, (0, 1)) == 4, "what is absent is not looked at"
    assert check.offender((2, 3), ()) is None
    assert FiniteCheck(store, 0).offender(everything, ()) is None, "another worker's row"
    check.forget()
    assert check.offender(everything, ()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_gradients_whose_sum_is_not_are_accepted(dtype: torch.dtype) -> None:
    store, check = make(dtype)
    store.gradient(1, store.layout.slots[1]).fill_(torch.finfo(dtype).max)
    assert check.offender((0, 1, 2, 3), ()) is None


def test_opposite_infinities_do_not_cancel() -> None:
    store, check = make()
    row = store.gradient(1, store.layout.slots[1])
    row[0, 0], row[0, 1] = torch.inf, -torch.inf
    assert check.offender((0, 1, 2, 3, 4), ()) == 1
