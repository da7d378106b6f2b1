"""Checks a machine with a GPU: see ``scripts/gpu_check.sh``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gpu_check.check import LEFT_OUT, RIGHT, WRONG, Check, Verdict, run
from gpu_check.plan import checks

WELL, NOT_WELL, NO_ENVIRONMENT, NO_GPU = 0, 1, 2, 3
NEEDED = ("torch", "pytorch_lightning", "numpy", "rich", "threadpoolctl")  # the strategy's own
USEFUL = (
    "pytest",
    "hydra",
    "omegaconf",
    "hypothesis",
    "jiwer",
    "soundfile",
    "soxr",
    "pytest_timeout",
)
_LEAST_S = 5.0  # with less time left nothing is begun


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, tell, write; the exit code."""
    given = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if absent := missing(NEEDED):
        tell(f"{sys.executable} has no {', '.join(absent)}; nothing was checked.")
        return NO_ENVIRONMENT
    if absent := missing(USEFUL):
        tell(f"Not installed here: {', '.join(absent)}. What needs them is left out.")
    gpus = visible()
    if not gpus and not given.anyway:
        return NO_GPU
    verdicts: list[Verdict] = []
    try:
        for check in chosen(given.only):
            verdicts.append(judge(check, gpus > 0, given.end_s - time.monotonic()))
            last = verdicts[-1]
            tell(f"{last.right:>8}  {last.name}: {last.found}  ({last.seconds:.0f} s)")
            for line in last.lines:
                tell(f"          | {line}")
            write(Path(given.json), verdicts)
    except KeyboardInterrupt:
        tell("stopped")
        return 130
    print(table(verdicts))
    tell(f"The figures are in {given.json}.")
    return WELL if well(verdicts) else NOT_WELL


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits with 2 where an option makes no sense."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description="Check a machine with a GPU, the cheapest first."
    )
    parser.add_argument("--json", default="gpu_check.json", metavar="FILE", help="the figures")
    parser.add_argument("--seconds", type=float, default=540.0, help="in all (default 540)")
    parser.add_argument("--only", default="", metavar="WORDS", help="checks that name these")
    parser.add_argument("--anyway", action="store_true", help="what needs no GPU, without one")
    given = parser.parse_args(arguments)
    if given.seconds <= 0:
        parser.error(f"--seconds {given.seconds:g} was given; it must be more than 0")
    given.end_s = time.monotonic() + given.seconds
    if not list(chosen(given.only)):
        parser.error(f"--only {given.only!r} names no check; there are: " + ", ".join(names()))
    if not Path(given.json).absolute().parent.is_dir():
        parser.error(f"--json {given.json} was given, but there is no such folder")
    return given


def names() -> list[str]:
    """List the names of all checks."""
    return [check.name for check in checks()]


def chosen(only: str) -> list[Check]:
    """Select the checks whose name contains ``only``."""
    return [check for check in checks() if only.lower() in check.name.lower()]


def missing(modules: Sequence[str]) -> list[str]:
    """List the modules that are not installed here."""
    return [name for name in modules if find_spec(name) is None]


def visible() -> int:
    """How many devices torch can use; says why there is none."""
    import torch

    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not n:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA (a CPU build)"
        tell(f"No GPU: torch {torch.__version__} is built for {built} and sees no device.")
        tell("Nothing was checked on a GPU.")
    for number in range(n):
        found = torch.cuda.get_device_properties(number)
        tell(f"GPU {number}: {found.name}, {found.total_memory / 2**30:.0f} GiB")
    return n


def judge(check: Check, on_gpu: bool, left_s: float) -> Verdict:
    """Run it, or say why not."""
    if check.on_gpu and not on_gpu:
        return Verdict(check.name, LEFT_OUT, "there is no GPU")
    if absent := missing(check.needs):
        return Verdict(check.name, LEFT_OUT, f"not installed: {', '.join(absent)}")
    if left_s < _LEAST_S:
        return Verdict(check.name, LEFT_OUT, "there was no time left")
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        return run(check, Path(folder), min(check.limit_s, left_s))


def well(verdicts: Sequence[Verdict]) -> bool:
    """Something was checked, and nothing of it is wrong."""
    rights = [each.right for each in verdicts]
    return WRONG not in rights and RIGHT in rights


def write(place: Path, verdicts: Sequence[Verdict]) -> None:
    """After each check, so that what was found is not lost."""
    content = {"well": well(verdicts), "checks": [each.as_dict() for each in verdicts]}
    place.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(verdicts: Sequence[Verdict]) -> str:
    """Write all verdicts as a Markdown table."""
    wide = max(len(each.name) for each in verdicts)
    lines = [
        f"| {'checked'.ljust(wide)} | right    | found |",
        f"|{'-' * (wide + 2)}|----------|-------|",
    ]
    lines += [f"| {v.name.ljust(wide)} | {v.right.ljust(8)} | {v.found} |" for v in verdicts]
    return "\n".join(lines)


def tell(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
