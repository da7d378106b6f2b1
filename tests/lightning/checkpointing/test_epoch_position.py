"""Where in an epoch a worker is: the table of states, and its one owner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridtrain.lightning.checkpointing.epoch_position import EpochPosition
from hybridtrain.lightning.checkpointing.epoch_state import (
    RESUMED,
    TABLE,
    EpochEvent,
    EpochState,
    is_in_end_hook,
    is_settled,
)
from hybridtrain.lightning.checkpointing.mid_epoch import ResumedEpoch

S, E = EpochState, EpochEvent


def test_every_state_can_be_reached_and_every_epoch_ends() -> None:
    for start in S:
        seen, border = {start}, [start]
        while border:
            state = border.pop()
            after = {then for (before, _), then in TABLE.items() if before is state} - seen
            seen |= after
            border += after
        assert seen == set(S), f"from {start}"
    assert {event for _, event in TABLE} == set(E)
    assert {state for state in S if (state, E.CLOSES) in TABLE} == set(S)


def test_only_a_worker_at_its_end_makes_up_for_others_or_is_done() -> None:
    for event in (E.IS_CONTINUED, E.ALL_MEET):
        assert [state for state in S if (state, event) in TABLE] == [S.AT_END]
    assert not {(s, E.REACHES_END) for s in (S.BETWEEN, S.AT_END, S.OVER)} & TABLE.keys()


def position_in(epoch: int) -> tuple[EpochPosition, Any]:
    current = SimpleNamespace(processed=epoch)
    fit_loop = SimpleNamespace(
        epoch_progress=SimpleNamespace(current=current), _combined_loader=None
    )
    return EpochPosition(SimpleNamespace(fit_loop=fit_loop)), current


def test_an_epoch_with_lost_samples_from_its_beginning_to_its_end() -> None:
    position, current = position_in(0)
    states = [position.state]
    assert not position.begin()
    for event in (E.REACHES_END, E.IS_CONTINUED, E.REACHES_END, E.REACHES_END, E.ALL_MEET):
        states += [position.state]
        assert position.on(event) is (event is not E.REACHES_END or states[-1] is not S.AT_END)
    states += [position.state]
    assert states == [S.BETWEEN, S.UNDER_WAY, S.AT_END, S.MADE_UP, S.AT_END, S.AT_END, S.OVER]
    assert not position.is_closing
    current.processed = 1  # Lightning counts it before the callbacks hear of its end
    assert position.is_closing
    position.on(E.CLOSES)
    assert not position.is_closing and position.state is S.BETWEEN


def test_lengths_change_for_the_next_epoch_once() -> None:
    position, _ = position_in(0)
    position.change_lengths()
    assert position.begin() and not position.begin()


@pytest.mark.parametrize("event", [E.RESUMES, E.RESUMES_IN_HOOK, E.RESUMES_AT_END])
def test_a_resumed_epoch_goes_on_before_its_first_mini_batch(event: EpochEvent) -> None:
    position, current = position_in(2)
    position.resume(ResumedEpoch(2, 3, [], event=event))
    assert not position.begin() and position.state in RESUMED
    assert position.on(E.GOES_ON) and position.state is S.UNDER_WAY
    assert not position.on(E.GOES_ON)
    position.on(E.CLOSES)
    current.processed = 3
    assert position.begin() and position.resumed is None, "the loaders are whole again"


def test_a_checkpoint_whose_epoch_lightning_takes_for_over_is_not_gone_on_with() -> None:
    position, _ = position_in(3)
    position.resume(ResumedEpoch(2, 3, None))
    assert position.begin() and position.resumed is None and position.state is S.UNDER_WAY


def test_lightnings_counters_say_what_is_under_way() -> None:
    counts = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    found = []
    for counter in counts:
        counts[counter] = 1
        found += [(is_settled(counts), is_in_end_hook(counts))]
    assert found == [(False, False), (False, False), (True, True), (True, False)]
