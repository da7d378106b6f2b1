"""What scripts/gpu_check.sh makes of host memory: what is left behind, what may be page-locked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_check import __main__ as main
from gpu_check import check, host, plan
from pytorch_lightning.accelerators import AcceleratorRegistry

from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.device.cuda import CudaStreams
from tests.standin.accelerator import StandInAccelerator
from tests.standin.device import name_it
from tests.standin.state import NAME, SETTINGS

MIB, GIB = 2**20, 2**30
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")


@pytest.mark.parametrize("name", ["page-locking under a low ulimit -l", "host memory left behind"])
def test_checks_of_host_memory_are_left_out_without_a_gpu_and_have_a_time_limit(name: str) -> None:
    (found,) = [each for each in plan.checks() if each.name == name]
    assert 0 < found.limit_s <= 150 and callable(getattr(host, found.function.partition(":")[2]))
    verdict = main.judge(found, False, 99.0)
    assert (verdict.right, verdict.found) == (check.LEFT_OUT, "there is no GPU")


# ---- what is left behind -------------------------------------------------------------------------

STEADY = [[9 * GIB] * 5]


def falling(by: int, n: int = 5) -> list[int]:
    """MiB less each time, of 9 GiB."""
    return [9 * GIB - number * by * MIB for number in range(n)]


@pytest.mark.parametrize(
    ("after", "within", "said"),
    [
        (falling(0), STEADY, None),
        (falling(31), STEADY, None),  # less than half of the parameters
        (falling(64), STEADY, "a fit leaves memory behind"),
        ([9 * GIB, *[8 * GIB] * 4], STEADY, None),  # the first fit has loaded libraries
        ([9 * GIB, 8 * GIB, 8 * GIB + MIB, 7 * GIB, 6 * GIB], STEADY, None),  # others', not each
        (falling(0), [*STEADY, falling(40)], "steps take more and more memory"),
        (falling(0), [[9 * GIB, *[8 * GIB] * 4]], None),  # it began to step
    ],
)
def test_memory_counts_as_left_behind_only_if_some_is_missing_after_each_fit(
    after: Sequence[int], within: Sequence[Sequence[int]], said: str | None
) -> None:
    found = host.judged(after, within, 64 * MIB)
    assert found.right is (said is None)
    assert found.text.startswith("5 fits of a model of 64 MiB: ")
    assert said is None or found.text.endswith(f"; {said}")


def test_noise_in_a_small_models_memory_is_not_taken_for_a_leak() -> None:
    assert host.judged(falling(15), STEADY, MIB).right
    assert "17 MiB less available from fit to fit" in host.judged(falling(17), STEADY, MIB).text
    assert not host.judged(falling(17), STEADY, MIB).right


# ---- page-locking --------------------------------------------------------------------------------

LOCKED = {"pageable": {"up_GB_s": 8.5}, "locked": {"up_GB_s": 53.0}, "refused": ""}
REFUSED = {"pageable": {"up_GB_s": 8.5}, "refused": "CUDA error 2"}


@pytest.mark.parametrize(
    ("probes", "fitted", "right", "said"),
    [
        ({"user": LOCKED}, (True, ""), True, "as user page-locked all the same, 53.0 GB/s"),
        ({"user": REFUSED}, (True, "1 MiB could not"), True, "(CUDA error 2), copies go at 8.5"),
        ({"user": REFUSED}, (True, "1 MiB could not"), True, "trains and says what it costs"),
        ({"user": REFUSED}, (True, ""), False, "a fit does not say so"),
        ({"user": REFUSED}, (False, "a\nEOFError: b"), False, "a fit fails: EOFError: b"),
        ({"root": LOCKED, "nobody": REFUSED}, (True, ""), True, "as nobody refused"),
        ({"root": LOCKED, "nobody": {"error": "no"}}, (True, ""), True, "not tried (no)"),
        ({"user": {"error": "took long"}}, (True, ""), False, "as user not tried (took long)"),
    ],
)
def test_a_user_who_may_lock_little_memory_must_train_and_be_told_of_it(
    probes: dict[str, Any], fitted: tuple[bool, str], right: bool, said: str
) -> None:
    found = host.concluded(probes, fitted, 64)
    assert found.right is right and said in found.text, found.text
    assert found.text.startswith("ulimit -l 64: ")


# ---- on the stand-in -----------------------------------------------------------------------------


@pytest.fixture
def on_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    if NAME not in AcceleratorRegistry:
        AcceleratorRegistry.register(NAME, StandInAccelerator)
    name_it()


@pytest.mark.slow
@pytest.mark.parametrize("lockable", [float("inf"), 2**16])
def test_page_locking_is_tried_with_a_fit(
    on_the_stand_in: None, lockable: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SETTINGS, "lockable_bytes", lockable)
    found = host.little_lockable(NAME, n_bytes=2**21)
    assert found.right, found.text
    assert ("says what it costs" in found.text) is (lockable == 2**16)
    assert ("copies to and from its device" in found.figures["fit"]) is (lockable == 2**16)


@pytest.mark.slow
def test_memory_is_looked_at_in_each_fit_and_after_it(on_the_stand_in: None) -> None:
    figures = host.growth(NAME, n_fits=2, n_steps=10, width=32).figures
    assert len(figures["after"]) == 2
    assert [len(each) for each in figures["within"]] == [5, 5]
