"""Mutated command lines are refused by one line, or make sense: no traceback, no nonsense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli import option_fuzzer
from tests.cli.option_fuzzer import Ended
from tests.picking import by_default

BY_DEFAULT, ALL = 30, 2000
AT_ONCE = 5


def wrong(ended: list[Ended]) -> list[str]:
    return [f"{each.how} {each.case}\n{each.said[-800:]}" for each in ended if each.wrong]


@pytest.fixture(autouse=True)
def imported() -> Iterator[None]:
    import hybridtrain.cli.run  # noqa: F401  (once, for all forks)

    yield


@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, BY_DEFAULT, AT_ONCE))
def test_mutated_options_are_refused_by_one_line_or_make_sense(first: int) -> None:
    assert wrong(option_fuzzer.run(option_fuzzer.cases(range(first, first + AT_ONCE)))) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(24))
def test_many_mutated_options_are_refused_or_make_sense(part: int) -> None:
    """Each part is of one task, whose configurations it composes once."""
    assert 24 % len(option_fuzzer.TASKS) == 0
    numbers = range(BY_DEFAULT + part, ALL, 24)
    assert wrong(option_fuzzer.run(option_fuzzer.cases(numbers))) == []


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 200, 40))
def test_mutated_options_that_are_accepted_train_or_are_refused_by_one_line(first: int) -> None:
    """No nonsense is accepted: the tiny run that it is of ends well, or is refused by one line."""
    cases = option_fuzzer.cases(range(first, first + 40))
    accepted = [each.case for each in option_fuzzer.run(cases) if each.how == "accepted"]
    assert wrong(option_fuzzer.run(accepted, trains=True)) == []


# Each ended in a traceback once, or was accepted.
ONCE: dict[str, list[str]] = {
    "~callbacks": ["default, none"],
    "~model": ["clusters, completion"],
    "~optimizer": ["adagrad, adam"],
    "model=1.5": ["there is no model '1.5'"],
    "logger=[1,2]": ["there is no logger 1"],
    "strategy.update=5": ["strategy.update=5", "text, a mapping, or null"],
    "run_dir=2147483648": ["run_dir=2147483648"],
    "ckpt=1e-320": ["ckpt=1e-320", "text or null"],
    "strategy.threads_per_worker=0.0": ["threads_per_worker=0.0", "from 1 to 1024, or auto"],
    "strategy.threads_per_worker=.inf": ["threads_per_worker='.inf'", "from 1 to 1024, or auto"],
    "callbacks.checkpoint.dirpath=[1,2]": ["callbacks.checkpoint.dirpath=[1, 2]", "a path"],
    "callbacks.checkpoint.filename=true": ["callbacks.checkpoint.filename=true", "text"],
    "task.mode='a b'": ["task.mode='a b'", "min or max"],
    "resume=" + "a" * 3000: ["longer than names of files may be"],
    "trainer.deterministic=abc": ["trainer.deterministic=abc", "true, false, warn or null"],
    "strategy.lead=3": ["a parameter of policy=ssp"],
    "strategy=ssp strategy.max_staleness=4": ["policy=async", "takes strategy.policy.lead"],
    "strategy=ssp lead=4": ["did you mean strategy.policy.lead?"],
    "strategy.correction=polynomial strategy.exponent=2": ["mean strategy.correction.exponent?"],
    "strategy.policy=ssp strategy.lead=2": ["did you mean strategy.policy.lead?"],
    "-m strategy.policy=async,ssp strategy.lead=2": ["parameter of policy=ssp; yours takes none"],
    "strategy=ssp strategy.policy.min_workers=2": ["did you mean strategy.min_workers?"],
    "strategy=ssp +strategy.policy.min_workers=2": ["did you mean strategy.min_workers?"],
    "strategy=backup strategy.k=1": ["did you mean strategy.policy.k?"],
    "strategy.faults=${run_dir}": ["must be a list"],
    "strategy.policy=${run_dir}": ["known are async"],
    "strategy.workers_per_device=${trainer}": ["must be a whole number from 1 to 4096"],
    "test={_target_:os.getcwd}": ["test={'_target_': 'os.getcwd'}", "true or false"],
    "trainer.max_epochs={_target_:os.getcwd}": ["a whole number from -1 on, or null"],
    "trainer._target_=null": ["trainer._target_=null", "package.Class"],
    "model._target_=null": ["model._target_=null", "package.Class"],
    "+test_only_x=-1": ["there is no such option (did you mean test_only?)"],
    "+logger.tensorboard.save_dir_x=7": ["takes no argument 'save_dir_x' (did you mean save_dir?)"],
    "+logger.tensorboard._target__x=0": ["takes no argument '_target__x'"],
    "trainer.val_check_interval=0": ["trainer.val_check_interval=0"],
    "strategy=easgd strategy.bata=1": ["did you mean strategy.exchange.beta?"],
}


@pytest.mark.few(4)
@pytest.mark.parametrize("given", by_default(ONCE, *[*ONCE][::3]))
def test_what_once_ended_in_a_traceback_is_refused_by_one_line(given: str, command: Any) -> None:
    key = given.split("=")[0]
    overrides = [given] if key in ("task.mode",) or " " not in given else given.split()
    result = command("task=digits", "trainer.accelerator=cpu", *overrides)
    assert result.code == 2
    for fragment in ONCE[given]:
        assert fragment in result.complaint
