"""Virtual time: figures of every policy, with and without gradients, and of old records."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from goldens.calls import call
from goldens.case import Case, Findings
from goldens.trainings import RUN, STRATEGIES, command, succeed

WAYS = (
    *("synchronous", "hybrid", "backup:k=3", "backup:k=auto", "k_async:k=2", "k_batch_sync:k=2"),
    *("k_batch_async:k=3", "softsync:n=2", "ssp:lead=2", "async", "switch:at_update=40"),
    "switch:first=ssp:then=async:patience=30",
)
LESSON = (
    *("task=digits", "trainer.max_epochs=1", "workers=4", "compute=lognormal", "seed=3"),
    "slower.0=3",
)
NETWORK = (
    *("network.latency_s=0.01", "network.bandwidth=1e6", "network.server_bandwidth=4e6"),
    *("parameters=20000", "interrupt=true"),
    "script=[{worker: 3, dies_at: 20}, {worker: 3, joins_at: 60}, "
    "{worker: 1, slower: 4, from: 5, until: 50}]",
)


def cases() -> Iterator[Case]:
    """All of this file."""
    for way in WAYS:
        name = way.replace(":", " ")
        task = way.startswith("switch:first")  # which watches a loss, so there has to be one
        if not task:
            yield simulated("virtual", name, "time only", f"strategy={way}", *SPEEDS)
            yield simulated("virtual", name, "network", f"strategy={way}", *NETWORK, *SPEEDS)
        yield simulated("virtual", name, "digits", f"strategy={way}", *LESSON)
    for correction in ("by_staleness", "polynomial:exponent=0.5", "dc_asgd", "gap_aware"):
        arguments = ("strategy=async", f"correction={correction}", *LESSON)
        yield simulated("virtual", f"async {correction.partition(':')[0]}", "digits", *arguments)
    for strategy in ("async", "backup"):
        yield what_if(strategy)


SPEEDS = ("workers=4,8", "mini_batches=2000", "compute=pareto", "seed=5", "slower.1=2")


def simulated(what: str, strategy: str, task: str, *arguments: str) -> Case:
    """The figures of ``python -m hybridtrain simulate``."""

    def look(kept: Path, folder: Path) -> Findings:
        said = call("hybridtrain", "simulate", *arguments, "json=figures.json", folder=folder)
        return said.well | (figures(folder / "figures.json") if said.status == 0 else {})

    return Case(what, strategy, task, look)


def figures(path: Path) -> Findings:
    """Read the figures, without those of a wall clock."""
    rows = json.loads(path.read_text())
    for row in rows:
        del row["events_per_s"]
    return {"rows": rows}


def what_if(strategy: str) -> Case:
    """An old record's workers under another policy, and their times in a simulation."""

    def make(kept: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            line = command(STRATEGIES[strategy], "digits", 2)
            succeed(call("hybridtrain", *line, folder=Path(folder)), line)
            shutil.copytree(Path(folder, RUN), kept / RUN)

    def look(kept: Path, folder: Path) -> Findings:
        run = kept / RUN
        other = (f"run={run}", "anyway=true", "policy=k_async", "policy.k=1")
        asked = call("hybridtrain", "replay", *other, folder=folder)
        speeds = ("workers=2", "mini_batches=500", "compute=measured", f"from={run}")
        line = ("strategy=hybrid,async", *speeds, "json=figures.json")
        said = call("hybridtrain", "simulate", *line, folder=folder)
        found = {"what if": asked.well | {"said": asked.out.splitlines()}, "measured": said.well}
        return found | (figures(folder / "figures.json") if said.status == 0 else {})

    return Case("what if", strategy, "digits", look, make)
