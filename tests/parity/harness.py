"""Runs cases in forks of the zygote, keeps what they have left, and compares."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parity.case import Case
from tests.parity.compare import Verdict, compare

ROOT = Path(__file__).parents[2]
HANG_S = 10.0  # where DDP is not the reference, nobody waits long for it
STRATEGIES = ("hybrid",)  # those that promise what DDP gives
_FOLDER = "<folder>"


@dataclass(frozen=True, slots=True)
class Job:
    """One case under one strategy: ``ddp``, ``union``, or one of ours.

    ``where`` it computes: as the case says, unless something else is said here.
    """

    case: Case
    strategy: str
    workers: int
    where: str = ""

    @property
    def place(self) -> str:
        return self.where or self._usual

    @property
    def name(self) -> str:
        what = f"{self.case.id.replace('/', '-')}-{self.strategy}-{self.workers}"
        return what if self.place == self._usual else f"{what}-{self.place}"

    @property
    def _usual(self) -> str:
        return "cuda" if self.case.gpu else "cpu"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and what was seen of it."""

    how: str
    seconds: float
    seen: dict[str, Any]
    log: str

    @property
    def error(self) -> str | None:
        """In one line, if it did not end well."""
        if self.how != "ok":
            return self.how
        if "error.type" in self.seen:
            return f"{self.seen['error.type']}: {self.seen['error.text']}"
        return None


class Harness:
    """A zygote, and the results of its children.

    Args:
        folder: where runs leave their files; several harnesses may share it.
        jobs: runs at a time.
    """

    def __init__(self, folder: Path, jobs: int = 2) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._answers: dict[str, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        (scratch := folder / "tmp").mkdir(exist_ok=True)  # Lightning's ddp leaves something there
        self._zygote = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.parity.zygote", str(jobs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """End the zygote, and whatever still runs."""
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(timeout=30)

    def _listen(self) -> None:
        assert self._zygote.stdout is not None
        for line in self._zygote.stdout:
            answer = json.loads(line)
            self._answers[answer["id"]].set_result(answer)
        for future in self._answers.values():  # the zygote has ended
            if not future.done():
                future.set_exception(RuntimeError("the zygote has ended; see its error output"))

    # ---- running --------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """Let it run, unless it has already."""
        with self._lock:
            if job.name in self._answers or (self._folder / job.name / "answer.json").exists():
                return
            self._answers[job.name] = Future()
        for_the_table_only = job.strategy == "ddp" != job.case.versus
        request = {
            "id": job.name,
            "case": job.case.id,
            "strategy": job.strategy,
            "workers": job.workers,
            "where": job.place,
            "folder": str(self._folder / job.name),
            "limit_s": min(job.case.limit_s, HANG_S) if for_the_table_only else job.case.limit_s,
        }
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(request).encode() + b"\n")
        self._zygote.stdin.flush()

    def outcome(self, job: Job) -> Outcome:
        """Wait for it; every run is made once, also where several harnesses share the folder."""
        folder = self._folder / job.name
        with _locked(self._folder / f"{job.name}.lock"):
            self.start(job)
            if job.name in self._answers:
                self._answers[job.name].result()
        answer = json.loads((folder / "answer.json").read_text())
        seen = read(folder) if answer["how"] == "ok" else {}  # what was cut off is half a file
        return Outcome(answer["how"], answer["seconds"], seen, _log(folder))

    def check_end(self, job: Job) -> None:
        """Raises AssertionError, with the run's log, if it did not end as the case expects."""
        outcome = self.outcome(job)
        assert job.case.ends_well(outcome.error), (
            f"{job.name} ended with {outcome.error or 'no error'}:\n{outcome.log[-6000:]}"
        )

    # ---- comparing ------------------------------------------------------------------------------

    def verdict(self, case: Case, strategy: str, workers: int, versus: str) -> Verdict:
        """Compare a strategy with a reference."""
        return self.verdict_on(Job(case, strategy, workers), Job(case, versus, workers))

    def verdict_on(self, ours: Job, theirs: Job) -> Verdict:
        """Compare two runs of a case, the second of them the reference."""
        case, facets = ours.case, ours.case.facets
        if theirs.strategy == "union":
            facets = _UNION_FACETS if facets == ("*",) else facets
        seen = self.outcome(ours).seen, self.outcome(theirs).seen
        return compare(*seen, facets, (*NEVER, *case.ignore), case.rtol)


# What one worker that sees the union can be asked for: the losses of a mini-batch are others.
_UNION_FACETS = (
    "module.*",
    "rank-0.fit.*.parameters.*",
    "rank-0.fit.*.checkpoint.optimizer_states.*",
    "rank-0.fit.*.checkpoint.lr_schedulers.*",
    "rank-0.end.*.counters.global_step",
    "rank-0.end.*.counters.current_epoch",
)
# The version that has written a checkpoint, and the one key that we add.
NEVER = ("*.pytorch-lightning_version", "*checkpoint.hybridtrain.*", "files.*.hybridtrain.*")


def read(folder: Path) -> dict[str, Any]:
    """Everything the run has left; the folder's own name is taken out of paths."""
    seen: dict[str, Any] = {}
    for path in sorted(folder.glob("rank-*.pt")):
        content = torch.load(path, weights_only=False)
        seen |= {f"{path.stem}.{name}": value for name, value in content.items()}
    if (folder / "main.pt").exists():
        seen |= torch.load(folder / "main.pt", weights_only=False)
    there = str(folder)
    return {
        name.replace(there, _FOLDER): v.replace(there, _FOLDER) if isinstance(v, str) else v
        for name, v in seen.items()
    }


def _log(folder: Path) -> str:
    path = folder / "log"
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
