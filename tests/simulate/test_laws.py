"""What theory knows of waiting and staleness holds in the simulator (scripts/theory).

Small sizes here, so tolerances are about three standard errors; `scripts/laws.py` prints more exact
figures, and `-m slow` checks them.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from theory import local
from theory import waiting as laws
from theory.law import About, AtMost, Law, Same

from hybridtrain.engine.policies import OnArrival
from hybridtrain.errors import UserError
from hybridtrain.virtual.virtual_world import VirtualWorld

ROOT = Path(__file__).parents[2]


def check(found: Iterable[About], tolerance: float) -> None:
    wrong = {f"{x.group}: {x.case}": x for x in found if abs(x.difference) > tolerance}
    assert wrong == {}


@pytest.mark.slow
def test_times_per_update_of_the_four_schemes_are_order_statistics() -> None:
    found = laws.four_schemes(updates=2500)
    assert len(found) == 14
    check(found, tolerance=0.05)


@pytest.mark.slow
def test_backup_workers_cost_what_order_statistics_say() -> None:
    check(laws.backup_workers(updates=1200), tolerance=0.05)


@pytest.mark.slow
def test_softsync_is_as_stale_as_contributions_come_in_an_update() -> None:
    check(laws.softsync(updates=4000), tolerance=0.06)


@pytest.mark.slow
def test_a_bounded_lead_is_bounded_and_costs_less_the_larger_it_is() -> None:
    found = laws.bounded_lead(mini_batches=16_000)
    check([law for law in found if law.group == "largest lead"], tolerance=0.0)
    times = [law for law in found if law.group == "time per clock"]
    check(times, tolerance=0.05)
    measured = [law.measured for law in times]
    assert measured == sorted(measured, reverse=True)


@pytest.mark.slow
def test_delayed_gradients_are_stable_up_to_the_known_edge() -> None:
    """To three digits, so a staleness that is off by one would be seen at once."""
    check(laws.stability_edge(updates=400, halvings=9), tolerance=0.003)


def test_one_update_behind_half_the_rate_is_stable_and_less_with_extrapolation() -> None:
    check(laws.one_update_behind(updates=300, halvings=6), tolerance=0.01)


@pytest.mark.slow
def test_asynchrony_begets_momentum() -> None:
    found = laws.momentum(replicas=1500, counts=(2, 8))
    check([law for law in found if law.group == "momentum"], tolerance=0.03)
    check([law for law in found if law.group == "rate"], tolerance=0.12)


def test_the_path_that_follows_from_the_ages_is_the_one_that_is_trained() -> None:
    """So that what is fitted for many runs at once is what real updates do."""
    ages = laws.ages_of(workers=5, updates=60, seed=3)
    path = [1.0]
    for t, age in enumerate(ages):
        path.append(path[t] - 0.2 * path[t - age])
    world = VirtualWorld(
        OnArrival(),
        5,
        laws.EXPONENTIAL,
        seed=3,
        task=laws.Quadratic(),
        optimizer=lambda masters: torch.optim.SGD(masters, lr=0.2),
    )
    world.run(updates=60)
    assert float(world.parameters()[0]) == pytest.approx(path[-1], rel=1e-12)
    assert float(laws.mean_path(torch.tensor([ages]), 0.2)[-1]) == path[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("law", "n"),
    [
        (laws.four_schemes, 10_000),
        (laws.backup_workers, 10_000),
        (laws.softsync, 15_000),
        (laws.bounded_lead, 80_000),
        (laws.momentum, 5_000),
    ],
)
def test_the_laws_hold_to_a_percent_or_two(law: Callable[[int], list[About]], n: int) -> None:
    check(law(n), tolerance=0.06 if law is laws.momentum else 0.02)


CHEAP = [local.endless_window, local.post_local, local.averaged_iterate]


@pytest.mark.parametrize("law", CHEAP)
def test_laws_of_workers_that_train_on_their_own_hold(law: Callable[[], list[Law]]) -> None:
    found = law()
    assert found and [each for each in found if not each.holds] == []


@pytest.mark.slow
@pytest.mark.parametrize("law", [local.elastic_edge, local.linear_scaling, local.deferred_momentum])
def test_edges_and_variances_are_those_of_theory(law: Callable[[], list[Law]]) -> None:
    found = law()
    assert found and [each for each in found if not each.holds] == []


def test_what_does_not_hold_is_said() -> None:
    far = [About("a", "b", 1.0, 1.03), AtMost("a", "b", 1e-11), Same("a", "b", 1, 2)]
    near = [
        About("a", "b", 1.0, 1.01),
        AtMost("a", "b", 1e-13),
        Same("a", "b", 1, 1),
    ]
    assert [law.holds for law in (*far, *near)] == [False] * 3 + [True] * 3


def test_the_script_shows_laws_and_refuses_nonsense(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra `report`")
    script = runpy.run_path(str(ROOT / "scripts" / "laws.py"))
    found = [*laws.softsync(updates=50), *laws.backup_workers(updates=20), *local.post_local()]
    picture = tmp_path / "laws.png"
    script["draw"](found, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert script["table"](found).row_count == len(found)
    assert script["run"](["only=post_local"]) == 0
    for wrong in ("updates=few", "updates=1", "'update=5'", "'plot'", "only=elasti"):
        with pytest.raises(UserError, match=f"^{wrong}"):
            script["run"]([wrong.strip("'")])
