"""Which parameters share memory, and which only look as if they did."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from hybridtrain.engine.memory import overlapping


def named(*tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(zip("abcdef", tensors, strict=False))


def test_parts_of_one_storage_that_do_not_touch_are_no_overlap() -> None:
    flat = torch.zeros(12)
    assert overlapping(named(Parameter(flat[:5]), Parameter(flat[5:12]))) is None
    assert overlapping(named(Parameter(flat[::2]), Parameter(flat[1::2]))) is None
    table = torch.zeros(4, 6)
    assert overlapping(named(Parameter(table[:, :3]), Parameter(table[:, 3:]))) is None


def test_two_parameters_that_share_elements_are_both_named() -> None:
    flat = torch.zeros(12)
    assert overlapping(named(Parameter(flat[:7]), Parameter(flat[6:]))) == ("a", "b")
    table = torch.zeros(4, 6)
    assert overlapping(named(Parameter(table[:, :3]), Parameter(table[1]))) == ("a", "b")
    assert overlapping(named(Parameter(flat), Parameter(flat))) == ("a", "b")
    assert overlapping(named(Parameter(flat), Parameter(flat.view(torch.int32), False)))


def test_an_overlap_is_found_behind_a_short_one_in_between() -> None:
    flat = torch.zeros(100)
    parts = (Parameter(flat[:50]), Parameter(torch.zeros(3)), Parameter(flat[60:70]))
    assert overlapping(named(*parts, Parameter(flat[49:65]))) in {("a", "d"), ("d", "c")}
    whole = Parameter(flat)
    assert overlapping(named(whole, Parameter(flat[2:3]), Parameter(flat[90:91]))) == ("a", "b")


def test_a_parameter_whose_own_elements_share_memory_is_named() -> None:
    assert overlapping(named(Parameter(torch.zeros(1).expand(3)))) == ("a", "a")
    assert overlapping(named(Parameter(torch.zeros(1).expand(1)))) is None


def test_one_parameter_under_two_names_is_tied_not_overlapping() -> None:
    tied = Parameter(torch.zeros(3))
    assert overlapping(named(tied, torch.zeros(2), tied)) is None


def test_what_has_no_memory_of_its_own_is_left_out() -> None:
    meta = [torch.empty(3, device="meta") for _ in range(2)]
    empty = torch.zeros(4)
    lazy = torch.nn.LazyLinear(3)
    assert overlapping(named(*meta, empty[:0], empty[2:2], *lazy.parameters())) is None
