"""What every test starts from."""

from __future__ import annotations

import gc
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator

import pytest

import hybridtrain  # noqa: F401  (before Lightning: HYBRIDTRAIN_LIGHTNING may name a package)
from tests.picking import every_pair, first_of_all
from tests.support.warm_up import warm_up
from tests.tiers import mark_wide

# Tests run side by side, and threads that spin for one another made small ones 20 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CAME_BACK = 97  # the exit status of a child that a test has forked and that returns into pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of a slow test with many cases some run (``every_pair``); with this option, all."""
    parser.addoption("--every-case", action="store_true", help="run all cases of slow tests")


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are hidden, unless ``-m`` asks for tests on them.

    A first backward on the CPU starts a thread of Autograd's for each GPU. The stand-in starts its
    own, and torch would wait for ever for the right number of them (in about every fourth process).
    """
    if not asks_for_gpus(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.args_source is pytest.Config.ArgsSource.ARGS and not hasattr(config, "workerinput"):
        # Whoever names files wants all that is in them.
        config.option.markexpr = config.option.markexpr.removeprefix("not wide and ")
    gc.disable()  # what is imported stays: looking through it all took a third of the collection


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto``: slow tests wait half of their time for other processes, so two for each core."""
    asked: str = config.getoption("markexpr") or ""
    slow = re.search(r"(?<!not )\bslow\b", asked) is not None
    return 2 * (os.cpu_count() or 1) if slow else None


def pytest_collection_finish() -> None:
    """Garbage is looked for again, but not among what has been imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Workers are forked from this process by the thousand."""
    warm_up()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around -m and -k
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Mark cases slow or wide, and leave out what was not asked for.

    What needs a GPU runs where ``-m`` asks for it by name; ``-m slow`` alone does not.
    """
    mark_all_but_few(items)
    mark_wide(items)
    yield
    wanted = items
    if not asks_for_gpus(config):
        wanted = [item for item in items if item.get_closest_marker("gpu") is None]
    if not config.getoption("every_case"):
        slow = [each for each in wanted if each.get_closest_marker("slow") is not None]
        names, samples = [each.nodeid for each in slow], sampled(slow)
        left_out = {*names} - every_pair(names, samples)
        wanted = [item for item in wanted if item.nodeid not in left_out]
    kept = {item.nodeid for item in wanted}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = sorted(wanted, key=_first_to_run)


def _first_to_run(item: pytest.Item) -> bool:
    """The longest are not left to the end, where they would run alone."""
    limit = item.get_closest_marker("timeout")
    return limit is None or limit.args[0] < 600


def sampled(items: Iterable[pytest.Item]) -> dict[str, int]:
    """How many cases of a test run with ``-m slow``, by ``@pytest.mark.sampled(n)``."""
    marks = {item.nodeid.partition("[")[0]: item.get_closest_marker("sampled") for item in items}
    return {test: mark.args[0] for test, mark in marks.items() if mark is not None}


def mark_all_but_few(items: list[pytest.Item]) -> None:
    """Of a test with ``@pytest.mark.few(n)``, mark all but n of its cases as slow."""
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        few = item.get_closest_marker("few")
        if few is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0], few.args[0]].append(item)
    for (_, most), group in cases.items():
        kept = first_of_all([item.nodeid for item in group], most)
        for item in group:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.slow)


def asks_for_gpus(config: pytest.Config) -> bool:
    """``-m gpu``, and not ``-m "not gpu"``."""
    asked: str = config.getoption("markexpr") or ""
    return re.search(r"(?<!not )\bgpu\b", asked) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is marked ``own_process`` runs in a fork of this one."""
    __tracebackhide__ = True
    if pyfuncitem.get_closest_marker("own_process") is None:
        return None
    from tests.standin.forked import in_a_fork

    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    in_a_fork(lambda: pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """End a child that a test has forked and that comes back into pytest.

    It would run the tests that are left a second time, and report them to pytest-xdist, which
    then ends the whole session with an internal error.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            traceback.print_exc()
            print(f"{item.nodeid}: a forked child came back", file=sys.stderr, flush=True)
            os._exit(CAME_BACK)


LAUNCHERS = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_GIVEN = {*LAUNCHERS, "PL_GLOBAL_SEED"} - set(os.environ)


def take_back_variables() -> None:
    """Remove what Lightning has put into the environment since the session began."""
    for name in NOT_GIVEN:
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def no_process_group_is_handed_on() -> Iterator[None]:
    """Lightning's ddp leaves its process group behind, and forked ranks of a later test hang in it.

    Also takes back the environment variables that its launchers leave, and Lightning's seed, which
    decides in which order samples are drawn; a fixture of a module may have set them before.
    """
    take_back_variables()
    yield
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    take_back_variables()
