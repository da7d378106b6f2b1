"""A policy, an exchange and an update of one's own on every command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.commands.simulate import main as simulate
from hybridtrain.engine.recording import find_record, read_record
from tests.cli.conftest import Command, Replay
from tests.cli.tiny import TINY
from tests.plan.test_plan import left, planned, refused
from tests.support.strangers import give_away

HERE = "tests.support.own_parts"
QUIET = ["logger=none", "test=false", "trainer.enable_progress_bar=false", "trainer.devices=2"]
RUN = [*TINY, *QUIET, "hydra.run.dir=run"]
PARTS = {
    "policy": (f"strategy.policy={{_target_: {HERE}.Quorum, least: 1}}", "Quorum(least=1)"),
    "exchange": (f"strategy.exchange={{_target_: {HERE}.Every, n: 3}}", "Every(n=3)"),
    "update": (f"strategy.update={{_target_: {HERE}.Largest, more: 0.5}}", "Largest(more=0.5)"),
}
EACH = pytest.mark.parametrize("part", PARTS)


def described(part: str, record: str = "run") -> str:
    return str(read_record(find_record(record)).header[part])


@EACH
def test_a_run_with_a_part_of_ones_own_is_replayed(
    command: Command, replay: Replay, part: str
) -> None:
    given, said = PARTS[part]
    assert command(*RUN, given).code == 0
    assert f"{HERE}.{said}" in described(part)
    result = replay("run=run")
    assert (result.code, result.err) == (0, "") and "equal to the bit" in result.out


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "part", "given"),
    [
        ("async", "policy", ["strategy.policy._target_={}.Quorum", "strategy.policy.least=1"]),
        ("diloco", "exchange", ["strategy.exchange={{_target_: {}.Every, n: 3}}"]),
        ("diloco", "policy", ["strategy.policy={{_target_: {}.Quorum, least: 1}}"]),
    ],
    ids=["policy by keys", "exchange", "policy"],
)
def test_an_own_part_replaces_the_strategys_part_also_in_a_resumed_run(
    command: Command, replay: Replay, strategy: str, part: str, given: list[str]
) -> None:
    asked = [each.format(HERE) for each in given]
    assert command(*RUN, f"strategy={strategy}", *asked).code == 0
    said = described(part)
    assert HERE in said
    assert command("resume=run", "trainer.max_epochs=3", "resume_override=true").code == 0
    assert described(part, "run/record-2.bin") == said
    assert replay("run=run").code == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["resume=auto", "sweep", "search"])
def test_a_run_a_sweep_and_a_search_go_on_with_it(command: Command, how: str) -> None:
    own = [f"strategy.policy={{_target_: {HERE}.Quorum}}", "strategy=async"]
    given = [*RUN[:-1], *own]
    if how == "resume=auto":  # there is none
        assert command(*RUN, *own, how).code == 0
        return
    if how == "sweep":
        more, longer = ["seed=1,2"], []
    else:
        many, space = "hydra.sweeper.n_trials=", "strategy.policy.least=choice(1,2)"
        more = ["hydra/sweeper=optuna", "task.metric=train/loss", f"{many}1", space]
        longer = [f"{many}2"]
    assert command("-m", *given, *more, "hydra.sweep.dir=sweep").code == 0
    assert HERE in described("policy", "sweep/0")
    if longer:
        result = command("-m", "resume=sweep", *longer)
        assert result.code == 0 and HERE in described("policy", "sweep/1"), result.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["strategy=ddp", PARTS["policy"][0]], "takes no policy"),
        ([f"strategy.policy={{_target_: {HERE}.Largest}}"], "is no Policy: it lacks begin, on"),
        ([f"strategy.policy={{_target_: {HERE}.Quorum, lest: 1}}"], "(did you mean least?)"),
        ([f"strategy.policy={{_target_: {HERE}.Quorum, least: 0}}"], "least=0 makes no update"),
        (["strategy.policy={_target_: nowhere_at_all.Q}"], "or add that to PYTHONPATH)"),
        (["strategy.update={_target_: torch.optim.SGD, lr: 1}"], "a class of optimizers"),
        ([f"strategy.policy={{_target_: {HERE}.Quorum}}", "strategy.exchange=in_place",
          "strategy.update=sgd"], "workers step the parameters"),
    ],
    ids=["ddp", "another part", "argument", "value", "module", "optimizer", "exchange"],
)  # fmt: skip
def test_what_does_not_go_is_one_line_before_anything_starts(
    command: Command, given: list[str], said: str
) -> None:
    result = command(*RUN, *given)
    assert result.code == 2 and said in result.complaint and "0x" not in result.complaint
    assert not Path("run/record.bin").exists()


# ---- in virtual time -----------------------------------------------------------------------------


def figures(*arguments: str) -> list[dict[str, Any]]:
    assert simulate([*arguments, "json=rows.json"]) == 0
    rows: list[dict[str, Any]] = json.loads(Path("rows.json").read_text())
    return [{k: v for k, v in row.items() if k != "events_per_s"} for row in rows]


def test_all_spellings_of_a_policy_are_simulated_alike() -> None:
    length = ["mini_batches=200", "workers=4"]
    spelled, mapped = figures(
        f"strategy={HERE}.Quorum:least=3,{{_target_: {HERE}.Quorum, least: 3}}", *length
    )
    (asked,) = figures(f"strategy.policy={{_target_: {HERE}.Quorum, least: 3}}", *length)
    assert spelled == mapped == asked
    assert spelled["strategy"] == f"{HERE}.Quorum:least=3"
    (other,) = figures(f"strategy={HERE}.Quorum:least=1", *length)
    assert other["updates"] > spelled["updates"]


@pytest.mark.parametrize("part", ["exchange", "update"])
@pytest.mark.parametrize("prefix", ["", "strategy."])
def test_exchanges_and_updates_are_simulated_with_a_task(part: str, prefix: str) -> None:
    given = prefix + PARTS[part][0].removeprefix("strategy.")
    task = ["task=parabola", "trainer.max_epochs=4", "workers=2", "strategy=hybrid"]
    (own,), (usual,) = figures(given, *task), figures(*task)
    assert own["loss"] != usual["loss"]


def test_another_policy_of_ones_own_is_tried_with_a_recorded_run(
    command: Command, replay: Replay
) -> None:
    assert command(*RUN).code == 0
    for given in (
        [f"policy={{_target_: {HERE}.Quorum, least: 1}}"],
        [f"policy={HERE}.Quorum", "policy.least=1"],
    ):
        result = replay("run=run", *given)
        assert (result.code, result.err) == (0, "") and "simulated" in result.out


# ---- planned -------------------------------------------------------------------------------------


def test_a_run_with_a_policy_of_ones_own_is_planned_with_and_called_by_its_class(
    tmp_path: Path,
) -> None:
    target = {"_target_": f"{HERE}.Quorum", "least": 2}
    run = left(tmp_path / "run", policy=target)
    own, usual = (
        planned(tmp_path, f"run={run}", f"strategy={each}", "hosts=1x4")[0]
        for each in (f"{HERE}.Quorum:least=2", "hybrid")
    )
    assert own["strategy"] == f"{HERE}.Quorum:least=2"
    assert own["updates_per_s"] == pytest.approx(2 * usual["updates_per_s"], rel=0.2)


@pytest.mark.parametrize("nested", [False, True], ids=["policy", "part of a policy"])
def test_a_class_that_another_users_run_names_is_not_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nested: bool,
) -> None:
    target = {"_target_": "nowhere_at_all.Q"}
    policy = {"name": "switch", "first": target, "at_update": 3} if nested else target
    run = left(tmp_path / "run", policy=policy)
    give_away(run / "record.bin", monkeypatch)
    assert "belongs to another user" in refused(capsys, f"run={run}", "strategy=hybrid")
