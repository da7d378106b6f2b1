"""What every test starts from holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from tests.conftest import CAME_BACK, mark_all_but_few, pytest_runtest_call, sampled
from tests.picking import LOTS, MANY, every_pair, first_of_all


@pytest.mark.parametrize("raises", [False, True])
def test_a_forked_child_does_not_come_back_into_pytest(
    raises: bool, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    if (pid := called(request.node, raises)) == 0:
        os._exit(1)  # the child came back
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == CAME_BACK
    assert ("ValueError: in the child" in capfd.readouterr().err) == raises


def called(item: pytest.Item, raises: bool) -> int:
    """Fork as the body of a test does, inside the hook: the child returns, or raises."""

    @contextmanager
    def hook() -> Iterator[None]:
        yield from pytest_runtest_call(item)

    with hook():
        if (pid := os.fork()) == 0 and raises:
            raise ValueError("in the child")
    return pid


def test_a_test_marked_few_has_every_value_as_far_as_possible() -> None:
    names = [f"test[{strategy}-{workers}]" for strategy in "abc" for workers in "123"]
    assert first_of_all(names, 3) == {"test[a-1]", "test[b-2]", "test[c-3]"}
    assert first_of_all(names, 1) == {"test[a-1]"}
    assert first_of_all(names, 99) == set(names)


class Case:
    """A collected case, as far as its markers go."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = nodeid
        self.marks = {each.name: each.mark for each in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks[marker.name] = marker.mark


def test_the_other_cases_of_a_test_marked_few_are_slow() -> None:
    few, slow = pytest.mark.few(2), pytest.mark.slow
    cases = [Case("test[0]", few, slow), *(Case(f"test[{n}]", few) for n in range(1, 5))]
    others = [Case("other[0]"), Case("other[1]")]
    mark_all_but_few(cast(list[pytest.Item], [*cases, *others]))
    assert ["slow" in case.marks for case in cases] == [True, False, False, True, True]
    assert not any("slow" in case.marks for case in others)


def test_slow_cases_have_every_pair_of_values_and_very_many_cases_every_value() -> None:
    few = {f"test[{a}-{b}-{c}]" for a in range(2) for b in range(2) for c in range(3)}
    assert len(few) == MANY and every_pair(sorted(few)) == few
    cube = [f"test[{a}-{b}-{c}]" for a in range(3) for b in range(3) for c in range(3)]
    kept = [name[5:-1].split("-") for name in every_pair(cube)]
    assert len(kept) < len(cube)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert len({(values[i], values[j]) for values in kept}) == 9
    square = [f"test[v{a}-{b}]" for a in range(LOTS + 5) for b in range(3)]
    kept = [name[5:-1].split("-") for name in every_pair(square)]
    assert len(kept) <= LOTS + 7 and len({a for a, _ in kept}) == LOTS + 5
    assert len(every_pair([f"test[{a}-{b}]" for a in range(20) for b in range(20)])) == LOTS


def test_seeds_need_not_all_occur_and_of_a_sampled_test_as_many_run_as_its_mark_says() -> None:
    drawn = [f"test[{'ab'[n % 2]}-{n}]" for n in range(4 * LOTS)]
    kept = every_pair(drawn)
    assert len(kept) == LOTS and {name[5] for name in kept} == {"a", "b"}
    both = [*drawn, "test[a]", *(f"other[{n}]" for n in range(10))]
    chosen = every_pair(both, {"test": 7})
    assert sum(name.startswith("test") for name in chosen) == 7 and len(chosen) == 17
    assert every_pair(both, {"test": 7}) == chosen, "the same each time"
    marked = cast(list[pytest.Item], [Case("test[a]", pytest.mark.sampled(7)), Case("other[0]")])
    assert sampled(marked) == {"test": 7}
