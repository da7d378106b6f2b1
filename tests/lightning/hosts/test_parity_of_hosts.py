"""Two hosts with a worker each are one host with two, in everything a user can observe, to the bit.

The cases are those of ``tests/parity``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.schemes import parts_of
from tests.parity.case import Case
from tests.parity.cases import CASES
from tests.parity.compare import compare
from tests.parity.harness import NEVER, read
from tests.parity.play import Run, play
from tests.picking import but_slow
from tests.support.several_hosts import run_hosts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes")
# All of them wait for one another, so one host and two make the same updates.
IN_LOCK_STEP = ("hybrid", "local_sgd", "synchronous", "diloco", "power_sgd", "streaming_diloco")
OF_EACH_HOST = ("module.*", "error.*")  # what is left in the calling process
BESIDES_WIDE = {
    *("callbacks/LearningRateFinder", "callbacks/ModelPruning", "loops/weights loaded before fit"),
    *("loops/weights loaded when training begins", "optimizers/LBFGS", "manual/a closure"),
}


def runs() -> Iterator[tuple[str, str]]:
    """Each case under ``hybrid``, and under one of the others in turn."""
    others = cycle(IN_LOCK_STEP[1:])
    for case in CASES.values():
        if not case.gpu and (case.wide or case.id in BESIDES_WIDE):
            yield case.id, "hybrid"
            if case.id.startswith(("callbacks", "loops", "logged", "loaders")):
                yield case.id, next(others)


def seen(case: Case, strategy: str, hosts: int, folder: Path) -> dict[str, Any]:
    """What the run has left; each worker has one thread, as many of them round otherwise."""
    made = HybridStrategy(**parts_of(strategy), threads_per_worker=1)
    run = Run(made, 2 // hosts, hosts=hosts)
    for host in run_hosts(folder / "logs", partial(play, case, run, folder / "seen"), hosts):
        assert host.status == 0, host.said
    found = read(folder / "seen")
    for path in (folder / "seen").glob("host-*.pt"):
        other = torch.load(path, weights_only=False)
        verdict = compare(other, found, OF_EACH_HOST, (), 0.0)
        assert verdict.compared > 0 and not verdict.differences, verdict.explain()
    return found


@pytest.mark.sampled(25)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "strategy"),
    but_slow([*runs()], lambda run, _: run != ("callbacks/LearningRateFinder", "hybrid")),
)
def test_two_hosts_are_one(tmp_path: Path, name: str, strategy: str) -> None:
    case = CASES[name]
    two, one = (seen(case, strategy, hosts, tmp_path / str(hosts)) for hosts in (2, 1))
    verdict = compare(two, one, case.facets, (*NEVER, *case.ignore), 0.0)
    assert verdict.compared > 0 and not verdict.differences, verdict.explain()
