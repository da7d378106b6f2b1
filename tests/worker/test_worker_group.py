"""Which workers train, as one of them knows it."""

from __future__ import annotations

import pytest

from hybridtrain.engine.protocol.messages import Gone
from hybridtrain.engine.worker.worker_group import WorkerGroup


def test_the_lowest_number_that_trains_leads() -> None:
    group = WorkerGroup(1, 3)
    assert not group.is_leader
    group.lose(Gone(0, 4))
    assert group.is_leader and group.there == (1, 2) and group.lost_at == 4


def test_a_restarted_worker_leads_again() -> None:
    group = WorkerGroup(1, 3)
    group.lose(Gone(0, 4, for_now=True))
    assert group.is_leader and group.there == (0, 1, 2) and not group.is_whole
    group.restore(0)
    assert not group.is_leader and group.is_whole


def test_the_worker_that_saves_leads_whatever_its_number() -> None:
    group = WorkerGroup(2, 3)
    group.choose_saver(True)
    assert group.is_leader


@pytest.mark.parametrize(("solo", "place"), [(False, 1), (True, 0)], ids=["all meet", "alone"])
def test_an_item_has_the_place_of_its_worker_among_those_that_met(solo: bool, place: int) -> None:
    group = WorkerGroup(2, 3)
    group.meet((0, 2), remaining=False)
    if solo:
        group.go_alone()
    assert group.place == place


def test_a_restarted_worker_is_alone_until_its_first_step() -> None:
    group = WorkerGroup(0, 2)
    group.rejoin()
    assert group.joins and group.solo and not group.is_whole
    group.rejoin(joined=True)
    assert group.is_whole
