"""One zygote for the session. Without pytest-xdist, later runs go on while one is judged."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.parity.harness import Harness, Job

JOBS = max(1, min(4, (os.cpu_count() or 2)))


@pytest.fixture(scope="session")
def harness(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Harness]:
    base = tmp_path_factory.getbasetemp()
    shared = hasattr(request.config, "workerinput")
    harness = Harness((base.parent if shared else base) / "parity", 1 if shared else JOBS)
    if not shared:
        for item in request.session.items:
            for job in item.stash.get(JOBS_OF_TEST, ()):
                harness.start(job)
    yield harness
    harness.close()


JOBS_OF_TEST = pytest.StashKey[tuple[Job, ...]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What each test will ask for, so that it can be started in time."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and {"case", "strategy", "workers"} <= callspec.params.keys():
            case, workers = callspec.params["case"], callspec.params["workers"]
            strategies = (case.versus, callspec.params["strategy"])
            item.stash[JOBS_OF_TEST] = tuple(Job(case, s, workers) for s in strategies)
