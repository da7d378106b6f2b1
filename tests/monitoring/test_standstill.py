"""A run in which all wait for ever ends and says so, whatever the reason."""

from __future__ import annotations

import pytest

from hybridtrain.monitoring import standstill
from hybridtrain.monitoring.standstill import Standstill


def seconds_until(
    looks: list[tuple[bool, int]], telling: bool = False, pause_s: float = 1.0
) -> int:
    """Looks, once a ``pause_s``; how many until it stands still, the last one repeated."""
    watch = Standstill()
    for n in range(2000):
        stands, heard = looks[min(n, len(looks) - 1)]
        if watch.look(n * pause_s, stands, heard, telling):
            return n
    return -1


def test_it_stands_still_when_all_wait_and_nothing_is_heard_for_long() -> None:
    assert seconds_until([(True, 5)]) == 30
    assert seconds_until([(True, 5)] * 20 + [(True, 6)]) == 20 + 30
    assert seconds_until([(True, 5)] * 20 + [(False, 5), (True, 5)]) == 20 + 30
    assert seconds_until([(False, 5)]) == -1


def test_who_tells_where_training_is_may_take_its_time() -> None:
    assert seconds_until([(True, 5)], telling=True) == 600


def test_a_pause_of_the_watcher_itself_is_nobodys_fault() -> None:
    assert seconds_until([(True, 5)], pause_s=1000.0) == 30 / standstill._PAUSE_S


@pytest.mark.parametrize("stands", [True, False])
def test_a_first_look_decides_nothing(stands: bool) -> None:
    assert not Standstill().look(1e6, stands, 0)
