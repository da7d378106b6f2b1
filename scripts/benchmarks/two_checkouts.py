"""Two checkouts of hybridtrain, measured by turns: has a change made anything slower?

    python scripts/benchmarks/two_checkouts.py OLD NEW --repeats 5 --only step

OLD and NEW are folders. The code that measures is this one for both, but for the update alone: that
reaches into the package, so each checkout's own benchmark of it is run. Each figure comes from a
process of its own, which sees one checkout. The runs alternate (old new, new old, ...), so that a
machine that grows slower does so for both. A row has the medians, the median of the ratios new/old
of the pairs, and the least and the largest of these: less than 1 is better.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
sys.path.insert(1, str(HERE))

LIMIT_S = 180.0
WORKERS = 2


def step(model: str, policy: str, seconds: float, as_users_do: bool = False) -> float:
    """Milliseconds of a step of worker 0 inside Lightning.

    ``as_users_do``: the data set gives single samples, and a callback runs after each step.
    """
    from benchmarks.jobs.loops import lightning

    return 1e3 * lightning(model, policy, WORKERS, seconds, as_users_do=as_users_do)


def update(parameters: str, seconds: float) -> float:
    """Milliseconds of the mean of two rows, and Adam, as the checkout's own benchmark has it."""
    sys.path.insert(0, str(seen() / "scripts"))
    own = seen() / "scripts/benchmarks/parts/update.py"  # older checkouts have it a folder higher
    name = "benchmarks.parts.update" if own.exists() else "benchmarks.update"
    ours = importlib.import_module(name).ours
    return 1e3 * ours(int(float(parameters)), seconds)


def start(seconds: float) -> float:
    """Seconds from the beginning of this process to the first step of worker 0."""
    import pytorch_lightning as pl

    from benchmarks.jobs.loops import note, noted, trainer
    from benchmarks.jobs.models import Trained, loader

    class First(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_rank == 0 and trainer.global_step == 1:
                note(time.time())

    trainer("hybrid", WORKERS, First()).fit(Trained("tiny", None), loader("tiny", 8, WORKERS))
    return noted() - float(os.environ["BEGAN_S"])


def memory(seconds: float) -> float:
    """MB: the most that the calling process and its largest worker have had, together."""
    step("mlp-10m", "hybrid", seconds)
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(each).ru_maxrss for each in who) / 1024


_STEPS = [(model, policy) for model in ("mlp-100k", "mlp-10m") for policy in ("hybrid", "async")]
_STEPS += [("mlp-100k", "hogwild"), ("speech-short", "hybrid")]

CASES: dict[str, tuple[str, Callable[[float], float]]] = {
    f"step {model} {policy}": ("ms", lambda s, m=model, p=policy: step(m, p, s))  # type: ignore[misc]
    for model, policy in _STEPS
}
CASES |= {
    f"callback {model} hybrid": ("ms", lambda s, m=model: step(m, "hybrid", s, True))  # type: ignore[misc]
    for model in ("mlp-100k", "mlp-10m", "speech-short")
}
CASES |= {
    f"update {n}": ("ms", lambda s, n=n: update(n, s))  # type: ignore[misc]
    for n in ("1e5", "1e7")
}
CASES |= {"start-up": ("s", start), "peak memory": ("MB", memory)}


def one_run(checkout: Path, case: str, seconds: float) -> float:
    """The figure, from a process that sees this checkout.

    Raises:
        SystemExit: if it fails.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    path = os.pathsep.join([str(checkout), str(HERE)])
    told = {"PYTHONPATH": path, "BEGAN_S": repr(time.time())}
    command = [sys.executable, __file__, str(checkout), str(checkout), "--case", case]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--seconds", str(seconds)],
            cwd=folder,
            env=os.environ | one_thread | told,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    if done.returncode:
        raise SystemExit(f"{checkout}: {case}:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def measured(case: str, seconds: float) -> float:
    """Here, of the checkout that this process sees."""
    import hybridtrain

    found = Path(str(hybridtrain.__file__)).resolve().parents[1]
    if found != seen():
        raise SystemExit(f"{found} is what is imported, not {seen()}")
    return CASES[case][1](seconds)


def seen() -> Path:
    """The checkout that this process is to see."""
    return Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).resolve()


def compared(case: str, old: Path, new: Path, repeats: int, seconds: float) -> str:
    """A row of the table."""
    figures: dict[Path, list[float]] = {old: [], new: []}
    for repeat in range(repeats):
        for checkout in (old, new)[:: 1 if repeat % 2 == 0 else -1]:
            figures[checkout].append(one_run(checkout, case, seconds))
    ratios = [b / a for a, b in zip(figures[old], figures[new], strict=True)]
    before, after = (statistics.median(figures[each]) for each in (old, new))
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    unit, ratio = CASES[case][0], statistics.median(ratios)
    return f"| {case} | {before:.4g} {unit} | {after:.4g} {unit} | {ratio:.3f} | {spread} |"


def main() -> None:
    """Parse, run, print a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a run's timed part")
    parser.add_argument("--only", default="", help=f"words of: {', '.join(CASES)}")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measured(given.case, given.seconds)))
        return
    old, new = given.old.resolve(), given.new.resolve()
    if old == new:
        parser.error("OLD and NEW are the same folder")
    print("| work | old | new | new/old | of the pairs |\n| --- | --- | --- | --- | --- |")
    for case in CASES:
        if given.only in case:
            print(compared(case, old, new, given.repeats, given.seconds), flush=True)


if __name__ == "__main__":
    main()
