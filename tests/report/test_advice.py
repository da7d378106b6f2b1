"""What a recorded run is advised: from its own times, with a number, or nothing."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.commands.simulate import main
from hybridtrain.cli.hydra_config import conf_dir
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.recording.observed import MOST_EVENTS, Observed, observe
from hybridtrain.engine.recording.record_file import Writer
from hybridtrain.engine.recording.record_reader import read_record, service_times
from hybridtrain.engine.recording.recorder import KINDS
from hybridtrain.errors import UserError
from hybridtrain.virtual import advice
from hybridtrain.virtual.advice import Advice, advise
from tests.support.headers import header

UPDATE_S = 0.25


def recorded(
    path: Path,
    seconds: Sequence[float],
    rounds: int = 80,
    policy: Any = "hybrid",
    sizes: Sequence[int] = (8, 8, 8, 8),
    epoch: int = 20,  # rounds
    size_bytes: int = 0,
    fetches: bool = False,  # in the middle of each mini-batch
    requirements: Mapping[str, Any] | None = None,
    rests: Sequence[int] = (),  # sizes in an epoch's last round, if they are others
    **strategy: Any,
) -> dict[str, Any]:
    """Write the record of a run in lock-step, with these times; returns its statistics."""
    config = {"seed": 0, "ckpt": None, "trainer": {}, "logger": None}
    config["strategy"] = {"policy": policy, "exchange": None, "update": None, **strategy}
    about = {"config": config, "drawn_seed": None, "checkpoints": [], "directory": "/"}
    told = header(len(seconds)) | {"about": {**about, "run_dir": "/"}}
    if isinstance(own := strategy.get("exchange"), dict) and "every" in own:
        told |= {"steps": own["every"], "requirements": {"parameters": "own"}}
    told |= {} if requirements is None else {"requirements": requirements}
    path.mkdir(exist_ok=True)
    writer, now_s = Writer(path / "record.bin", KINDS), 100.0
    writer.tell({"header": told})
    if size_bytes:
        writer.tell({"begin": {"parameters": "", "bytes": size_bytes}})
    for number in range(rounds):
        last = number % epoch == epoch - 1
        for worker in sorted(range(len(seconds)), key=seconds.__getitem__):
            at_s, part_s = now_s + seconds[worker], seconds[worker] / (1 + fetches)
            if fetches:
                writer.event("Push", worker, 0, now_s + part_s, part_s, 0.0)
            samples = (rests if last and rests else sizes)[worker]
            writer.event("Push", worker, 0, at_s, part_s, samples)
        now_s += max(seconds) + UPDATE_S
        for worker in range(len(seconds) if last else 0):
            writer.event("Gather", worker, 0, now_s, 0.0, 0.0)
    writer.close()
    return {
        "samples_per_s": sum(sizes[: len(seconds)]) / (max(seconds) + UPDATE_S),
        "waiting_share": [1 - each / (max(seconds) + UPDATE_S) for each in seconds],
    }


def figures(command: str, path: Path) -> list[dict[str, Any]]:
    """The rows of a simulation that is asked for on a command line."""
    python, flag, module, name, *arguments = shlex.split(command)
    assert (python, flag, module, name) == ("python", "-m", "hybridtrain", "simulate")
    out = path / "out.json"
    assert main([*arguments, f"json={out}"]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def test_a_straggler_is_named_with_numbers_and_a_command_that_shows_them(tmp_path: Path) -> None:
    stats = recorded(tmp_path, [1.0, 1.0, 4.0, 1.0])
    found = advise(tmp_path, stats)
    assert found is not None
    # In 4.25 s lock-step makes 4 mini-batches, and three workers alone 3 in each 1.25 s.
    assert found.factor == pytest.approx((3 / 1.25) / (4 / 4.25), rel=0.1)
    assert found.strategy == "strategy=backup strategy.policy.k=3"
    start = "worker 2 is 4.0 times slower; 3 of 4 workers waited 76 % of their time: "
    assert found.text.startswith(f"{start}`{found.strategy}` (drops what comes late)")
    assert found.text.endswith(f" {found.factor:.1f} times as many samples a second")
    assert str(found).count("\n") == 0
    own, other = figures(found.command, tmp_path)
    assert (own["strategy"], other["strategy"]) == ("hybrid", "backup:k=3")
    assert own["samples_per_s"] == pytest.approx(stats["samples_per_s"], rel=0.02)
    assert other["samples_per_s"] / own["samples_per_s"] == found.factor


def test_a_worker_is_not_called_slow_for_its_first_mini_batch() -> None:
    times = {0: [90.0, *[1.0] * 60], 1: [1.0] * 61, 2: [2.0] * 61}
    assert advice._times_slower(Observed(times, 8, 1, None, 0.0, 183, {})) == [
        1 / 1.5,
        1 / 1.5,
        2.0,
    ]


def test_with_two_workers_the_slow_one_is_not_given_up(tmp_path: Path) -> None:
    found = advise(tmp_path, recorded(tmp_path, [1.0, 3.0]))
    assert found is not None and found.strategy == "strategy=k_batch_async strategy.policy.k=2"
    assert found.factor > 1.5


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_wait_for_updates_are_advised_to_compute_meanwhile(
    workers: int, tmp_path: Path
) -> None:
    stats = recorded(tmp_path, [0.5] * workers, rounds=800, epoch=1000)
    found = advise(tmp_path, {**stats, "waiting_share": [0.0] * workers})  # for one another
    assert found is not None and found.strategy == "strategy=pipe_sgd"
    # A step of 0.75 s takes 0.5, but for the 40 of the warm-up.
    assert found.factor == pytest.approx(1.5, rel=0.05)
    assert found.text.startswith("updates took 33 % of the time: `strategy=pipe_sgd` (the update")
    assert "(the update is made beside the next mini-batch) would have made" in found.text
    own, other = figures(found.command, tmp_path)
    assert (own["strategy"], other["strategy"]) == ("hybrid", "pipe_sgd")
    assert other["samples_per_s"] / own["samples_per_s"] == found.factor


@pytest.mark.parametrize(
    ("run", "options"),
    [
        ({"size_bytes": 400_000}, {}),  # the worker that comes last makes its updates
        ({"correction": "gap_aware"}, {}),
        ({"policy": {"name": "pipe_sgd", "warm_up": 5}}, {}),  # it is so already
        ({}, {"by_hand": True}),
        ({}, {"most_per_s": 17.0}),  # 16 a second are computed, and updates take the processors
        ({"epoch": 1}, {}),  # all meet, and wait for the update, in every step
    ],
    ids=["small model", "correction", "one behind", "by hand", "busy processors", "meetings"],
)
def test_no_update_is_advised_beside_mini_batches_where_it_is_refused_or_no_faster(
    run: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    stats = recorded(tmp_path, **{"seconds": [0.5], "rounds": 800, "epoch": 1000, **run})
    assert advise(tmp_path, stats, **options) is None
    plain = {"seconds": [0.5], "rounds": 800, "epoch": 1000}
    assert advise(tmp_path / "plain", recorded(tmp_path / "plain", **plain)) is not None


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("run", "changed"),
    [
        ({"seconds": [1.0] * 4}, {}),
        ({"seconds": [1.0]}, {}),
        ({"rounds": 40}, {}),
        ({}, {"samples_per_s": 12.0}),  # the simulation does not reproduce it
        ({}, {"waiting_share": [0.1] * 4}),
        ({"policy": "async"}, {}),  # in virtual time it is faster than the record says
        ({"policy": {"_target_": "my.Policy"}}, {}),
        ({"exchange": {"name": "movement", "every": 8}}, {}),
        ({"exchange": "sign_sgd"}, {}),  # the advised strategy's row would replace it
        ({"exchange": {"name": "gradient", "compress": "int8"}}, {}),
        ({"epoch": 1}, {}),  # all meet in every step, so no policy helps
    ],
)
def test_nothing_is_said_without_need_or_certainty(
    tmp_path: Path, run: dict[str, Any], changed: dict[str, Any]
) -> None:
    stats = recorded(tmp_path, **{"seconds": [1.0, 1.0, 4.0, 1.0], **run})
    assert advise(tmp_path, {**stats, **changed}) is None


def test_workers_that_run_freely_and_wait_only_for_one_another_at_the_end_are_left_alone(
    tmp_path: Path,
) -> None:
    recorded(tmp_path, [1.0, 3.0], policy="async", epoch=4)
    speed = advice._samples_per_s(observe(tmp_path), "async", None)
    stats = {"samples_per_s": speed, "waiting_share": [0.2, 0.0]}
    assert advise(tmp_path, stats) is None


def test_more_than_the_processors_can_compute_is_not_promised(tmp_path: Path) -> None:
    stats = recorded(tmp_path, [1.0, 1.0, 4.0, 1.0])
    assert advise(tmp_path, stats, most_per_s=30.0) is not None
    assert advise(tmp_path, stats, most_per_s=15.0) is None


def test_only_policies_that_go_with_the_runs_update_are_tried(tmp_path: Path) -> None:
    stats = recorded(tmp_path, [1.0, 1.0, 4.0, 1.0], update="median")
    found = advise(tmp_path, stats)
    assert found is not None and found.strategy.startswith("strategy=backup")


def test_parameters_of_the_runs_own_policy_are_in_the_command(tmp_path: Path) -> None:
    policy = {"name": "ssp", "lead": 0}
    found = advise(tmp_path, recorded(tmp_path, [1.0, 1.0, 4.0, 1.0], policy=policy))
    assert found is not None and "strategy=ssp:lead=0,backup:k=3" in found.command
    assert [row["workers"] for row in figures(found.command, tmp_path)] == [4, 4]


@pytest.mark.parametrize("candidate", advice.CANDIDATES, ids=lambda each: str(each.name))
def test_candidates_are_policies_and_rows_of_the_command_line(candidate: Any) -> None:
    assert Path(conf_dir(), "strategy", f"{candidate.name}.yaml").is_file()
    for workers in (2, 3, 8):
        policy = {"name": candidate.name, **candidate.options(workers, workers - 1)}
        make_policy(policy).begin(workers)


def test_a_run_is_observed_with_its_epochs_updates_and_sizes(tmp_path: Path) -> None:
    recorded(tmp_path, [1.0, 2.0], epoch=10)
    seen = observe(tmp_path)
    assert (seen.n_workers, seen.batch_size, seen.epoch, seen.mini_batches) == (2, 8, 160, 160)
    assert seen.update_s == pytest.approx(UPDATE_S) and set(seen.times[1]) == {2.0}
    recorded(tmp_path / "other", [1.0, 2.0], sizes=(32, 8))
    with pytest.raises(UserError, match="mini-batches of 8, 32 samples were recorded"):
        observe(tmp_path / "other")


@pytest.mark.parametrize("sizes, rests", [((8, 8), (1, 2)), ((16, 17), ()), ((8, 8), (9, 8))])
def test_smaller_mini_batches_at_the_end_of_an_epoch_are_not_the_size_of_a_run(
    tmp_path: Path, sizes: tuple[int, int], rests: tuple[int, ...]
) -> None:
    recorded(tmp_path, [1.0, 2.0], epoch=2 if rests != (9, 8) else 3, sizes=sizes, rests=rests)
    assert observe(tmp_path).batch_size == max(sizes)


@pytest.mark.parametrize("sizes", [(1, 2), (30, 32)])
def test_workers_whose_usual_mini_batches_differ_have_a_line_that_says_what_to_do(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    recorded(tmp_path, [1.0, 2.0], sizes=sizes)
    with pytest.raises(
        UserError, match=r"give a run in which most .* \(a smaller data\.batch_size"
    ):
        observe(tmp_path)


def test_a_run_whose_workers_met_inside_a_host_cannot_be_observed(tmp_path: Path) -> None:
    recorded(tmp_path, [1.0, 2.0], requirements={"parameters": "own", "together": 2})
    for read in (observe, service_times):
        with pytest.raises(UserError, match=r"the run had inside, .*give a run without inside"):
            read(tmp_path)


def test_a_run_whose_workers_train_on_their_own_is_observed_by_mini_batch(tmp_path: Path) -> None:
    recorded(tmp_path, [1.0, 2.0], epoch=10, exchange={"name": "movement", "every": 4})
    seen = observe(tmp_path)
    assert (seen.batch_size, seen.steps, seen.epoch, seen.mini_batches) == (2, 4, 160, 640)
    assert set(seen.times[1]) == {0.5} == set(service_times(tmp_path)[1])
    (row,) = figures(f"python -m hybridtrain simulate run={tmp_path} strategy=hybrid", tmp_path)
    assert row["samples_per_s"] == pytest.approx(4 / (0.5 + UPDATE_S), rel=0.01)


def test_a_worker_that_fetches_parameters_has_not_done_a_mini_batch(tmp_path: Path) -> None:
    recorded(tmp_path, [1.0], epoch=10, fetches=True)
    seen = observe(tmp_path)
    assert (seen.batch_size, seen.epoch, seen.mini_batches) == (8, 80, 80)
    assert seen.times == {0: [1.0] * 80} == service_times(tmp_path)


def test_conditions_of_a_simulated_run_can_be_changed_but_not_its_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, [1.0, 3.0])
    command = f"python -m hybridtrain simulate run={tmp_path} strategy=hybrid"
    (row,) = figures(f"{command} update_s=0 workers=4 mini_batches=400 epoch=6400", tmp_path)
    assert row["samples_per_s"] == pytest.approx(4 * 8 / 3.0)
    for clash in ("compute=constant", "from=x.csv", "compute.mean_s=2"):
        assert main([f"run={tmp_path}", clash]) == 2
        assert "it brings its own times" in capsys.readouterr().err
    assert main([f"run={tmp_path}", "task=parabola"]) == 2
    assert "run was given together with task=parabola" in capsys.readouterr().err


def test_advice_reads_only_the_beginning_of_a_long_record(tmp_path: Path) -> None:
    recorded(tmp_path, [1.0, 2.0], rounds=50)
    part = read_record(tmp_path / "record.bin", most_events=60)
    assert len(part.cells) < 60 and not part.whole
    assert 50 <= MOST_EVENTS < math.inf


def test_an_advice_is_plain_text(tmp_path: Path) -> None:
    assert str(Advice("do so", "run it", "strategy=async", 2.0)) == "do so: run it"
