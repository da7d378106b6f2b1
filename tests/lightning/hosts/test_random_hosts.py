"""Random runs of several hosts, of which some lose a worker or a host: every sample counts once.

Drawn are strategy, choice, feature, sizes, the numbers of hosts and workers, and what is lost
where. A host is one process of this machine, as ``tests/support/several_hosts.py`` starts it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.cli.zygote import wait_for
from tests.lightning.failover.counting import STRATEGIES, ByHand, Scheduled, Seen
from tests.lightning.failover.test_random_losses import EPOCHS, FEATURES, HOOKS, Lost, Slow
from tests.lightning.toys import make_trainer
from tests.picking import but_slow
from tests.support.several_hosts import Pids, run_hosts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes")
OURS = tuple(name for name in STRATEGIES if name != "hogwild")  # which stays within a host
TRAINER = FEATURES | {"pairs": {}, "loader processes": {}}
EXTRAS: dict[str, dict[str, Any]] = {  # options of the strategy
    "": {},
    "narrow": {"transport_dtype": "bf16"},
    "encoded": {"exchange": {"name": "gradient", "compress": "int8"}},
    "sums": {"host_sums": True},
}
BY_ROUND = ("hybrid", "backup", "k_batch_sync")  # docs/failures.md: nothing by hand


@dataclass(frozen=True)
class Case:
    """One run; ``number``: of the worker or host that is lost, as ``what`` says.

    ``what``: empty: all are there and stay; ``late``: the last host comes when training has begun.
    """

    strategy: str
    choice: str
    feature: str
    what: str
    number: int
    hook: str
    left: int
    hosts: int
    each: int
    n: int
    size: int
    step_s: float
    extra: str

    @property
    def lost(self) -> tuple[int, ...]:
        """Workers that end by themselves; of a host the first one."""
        return (self.number * (self.each if self.what == "host" else 1),)

    def __str__(self) -> str:
        where = f"{self.what} {self.number}-{self.hook}-{self.left}" if self.what else "all stay"
        sizes = f"{self.hosts}x{self.each}-{self.n} by {self.size}"
        return f"{self.strategy}-{self.choice}-{self.feature}-{self.extra}-{where}-{sizes}"


def drawn(seed: int) -> Case:
    """The same for the same seed."""
    rng = random.Random(seed)
    hosts, each = rng.choice([(2, 1), (2, 2), (3, 1), (2, 1)])
    strategy, feature = rng.choice([*OURS, "hybrid"]), rng.choice([*TRAINER])
    what = rng.choice(["", "worker", "host", "host", "late"])
    if feature == "by hand" and strategy in BY_ROUND:
        feature = "plain"
    number = rng.randrange(hosts * each) if what == "worker" else rng.randrange(1, hosts)
    hook, left = rng.choice(HOOKS)
    choice = rng.choice(["restart", "continue"])
    n, size = rng.choice([24, 25, 31, 40]), rng.choice([1, 2, 3])
    step_s = rng.choice([0.0, 0.004, 0.02])
    extra = rng.choice([*EXTRAS])
    if extra == "sums" and (strategy != "hybrid" or choice == "continue"):
        extra = ""
    who = (strategy, choice, feature, what, number, hook, left)
    return Case(*who, hosts, each, n, size, step_s, extra)


class Paired(Scheduled):
    """Of two loaders, which give the same samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        one, other = batch
        assert torch.equal(one, other)
        return super().training_step(one, batch_idx)


class Begun(pl.Callback):
    """Says that training has begun."""

    def on_train_batch_start(self, *_: Any) -> None:
        Path("begun").touch()


class WithHost(Lost):
    """A worker takes its host along."""

    def die(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60.0)  # it goes with its host


LOSSES: dict[str, type[Lost]] = {"worker": Lost, "host": WithHost}


def module_of(case: Case) -> Any:
    kinds = {"by hand": ByHand, "pairs": Paired}
    return kinds.get(case.feature, Scheduled)(case.n)


def loaders_of(case: Case) -> Any:
    processes = int(case.feature == "loader processes")
    data = torch.arange(case.n)
    if case.feature == "pairs":
        return CombinedLoader([DataLoader(data, case.size) for _ in range(2)], "min_size")
    return DataLoader(data, case.size, shuffle=True, num_workers=processes)


def train(case: Case, folder: Path) -> dict[str, Any]:
    """The run of one host."""
    module = module_of(case)
    options: dict[str, Any] = {"max_restarts": None} if case.choice == "restart" else {}
    if case.feature == "own sizes":
        options["batch_size_per_worker"] = [1, 2, 3, 4][: case.hosts * case.each]
    if case.what == "late":
        options["min_hosts"] = case.hosts - 1
    options |= EXTRAS[case.extra]
    strategy = HybridStrategy(case.strategy, on_failure=case.choice, **options)
    callbacks = [Slow(case.step_s), Seen(folder), Begun()]
    callbacks += [LOSSES[case.what](folder, case)] if case.what in LOSSES else []
    trainer = make_trainer(
        strategy,
        case.each,
        num_nodes=case.hosts,
        max_epochs=EPOCHS,
        callbacks=callbacks,
        **TRAINER[case.feature],
    )
    pl.seed_everything(1, verbose=False)
    trainer.fit(module, loaders_of(case), DataLoader(torch.arange(case.n), case.size))
    return {
        "w": module.w.detach().round().tolist(),
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "samples": strategy.run_stats().get("samples"),
        "schedules": [x.scheduler.last_epoch for x in trainer.lr_scheduler_configs],
    }


def again(case: Case, folder: Path, pids: Pids) -> None:
    """Start the host that was killed again, or comes late.

    It waits for host 0 if training is over by then.
    """
    if case.what != "late" and (case.what != "host" or case.choice != "restart"):
        return

    def is_over(host: int) -> bool:
        return os.waitid(os.P_PID, pids[host], os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    sign = folder / (f"lost {case.lost[0]}" if case.what == "host" else "host0/begun")
    while not sign.exists():
        if is_over(0):
            return  # it did not come so far
        time.sleep(0.01)
    pids.start(host := case.number if case.what == "host" else case.hosts - 1)
    wait_for(lambda: is_over(0), lambda: "host 0 does not end", 60)
    with suppress(AssertionError):
        wait_for(lambda: is_over(host), lambda: "", 5)
        return
    (folder / "late").touch()
    os.killpg(pids[host], signal.SIGKILL)


CASES = [drawn(seed) for seed in range(150)]


@pytest.mark.sampled(30)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", but_slow([(c,) for c in CASES], lambda _, n: n > 0), ids=str)
def test_each_sample_counts_once_an_epoch_on_all_hosts(tmp_path: Path, case: Case) -> None:
    found = run_hosts(
        tmp_path,
        partial(train, case, tmp_path),
        case.hosts,
        meanwhile=partial(again, case, tmp_path),
        late=int(case.what == "late"),
    )
    killed = case.what == "host" and any(tmp_path.glob("lost *"))
    away = (tmp_path / "late").exists() or (killed and case.choice == "continue")
    absent = case.hosts - 1 if case.what == "late" else case.number
    left = [x for i, x in enumerate(found) if not (away and i == absent)]
    for host in left:
        assert host.status == 0, host.said
        assert host.result["w"] == found[0].result["w"]
    assert not (killed and away and case.strategy == "hybrid" and case.choice == "restart")
    ended = found[0].result
    assert ended["epoch"] == EPOCHS
    assert ended["samples"] == case.n * EPOCHS * (1 + (case.feature == "pairs"))
    assert ended["w"] == [EPOCHS] * case.n
    assert ended["schedules"] in ([], [ended["step"], EPOCHS])
    seen = (tmp_path / "seen").read_text().split()
    assert {*map(int, seen)} == {case.n}
