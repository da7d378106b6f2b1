"""What a checksum in a record tells apart."""

from __future__ import annotations

import io

import torch

from hybridtrain.engine.memory.sparse_rows import Packed
from hybridtrain.engine.protocol.checksums import checksum_of, checksum_of_state
from hybridtrain.engine.protocol.messages import Average, Changes, Clip, GradientPush, Push, Row


def saved(value: float) -> bytes:
    buffer = io.BytesIO()
    torch.save({0: {"momentum_buffer": torch.full((8,), value)[:4]}}, buffer)
    return buffer.getvalue()


def indices(*rows: int) -> tuple[Packed, ...]:
    return (Packed(0, 1, torch.tensor(rows).numpy().tobytes()),)


PUSHES = [
    Push(0, 4.0),
    GradientPush(0, 4.0, clip=Clip("norm", 1.0)),
    GradientPush(0, 4.0, clip=Clip("norm", 2.0)),
    GradientPush(0, 4.0, clip=Clip("value", 2.0)),
    Push(0, 4.0, Row(packed=indices(1, 2))),
    Push(0, 4.0, Row(packed=indices(1, 3))),
    Push(0, 4.0, Row(packed=indices(*range(9999), 10_000))),
    Push(0, 4.0, Row(packed=indices(*range(1, 10_001)))),
    Push(0, 4.0, changes=Changes(state=saved(1.0))),
    Push(0, 4.0, changes=Changes(state=saved(2.0))),
]


def test_contributions_that_differ_in_indices_clipping_or_state_have_other_checksums() -> None:
    assert len({checksum_of(push, 0, None) for push in PUSHES}) == len(PUSHES)
    assert checksum_of(PUSHES[8], 0, None) == checksum_of(
        Push(0, 4.0, changes=Changes(state=saved(1.0))), 0, None
    )
    averages = [Average(1.0), *[Average(1.0, Row(packed=indices(1, n))) for n in (2, 3)]]
    assert len({checksum_of(each, 0, None) for each in averages}) == 3


def test_sparse_states_differ_in_their_rows_and_values() -> None:
    def state(row: int, value: float) -> list[torch.Tensor]:
        return [torch.sparse_coo_tensor([[row]], [value], (4,), check_invariants=True)]

    states = [state(1, 2.0), state(2, 2.0), state(1, 3.0)]
    assert len({checksum_of_state(each) for each in states}) == 3
    assert checksum_of_state(state(1, 2.0)) == checksum_of_state(state(1, 2.0))
