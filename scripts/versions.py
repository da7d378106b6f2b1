"""Try other versions of Python, torch, Hydra and Lightning: an environment and core tests for each.

    python scripts/versions.py [ROW ...] [--list] [--keep DIR] [--cuda]

All rows, or those named. An environment is made in a temporary folder, or in DIR, where it stays.
torch is its CPU build; with ``--cuda``, where there is none, PyPI's for CUDA (3 to 6 GB each).
``--list`` prints the table of docs/install.md, where results are written, and does nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from make_environment import CPU_INDEX, QUICK, Environment, SetupError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
NOT_HAD = "not to be had"
BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->"
HEAD = (
    "| row | Python | torch | Hydra | Lightning | result |\n| --- | --- | --- | --- | --- | --- |"
)
# Policies, server, updates; the configuration; what is private to Lightning; training.
TESTS = [
    *("tests/policies", "tests/server", "tests/updates", "tests/cli/test_conf.py"),
    *("tests/lightning/test_private_names.py", "tests/lightning/test_portability.py"),
]
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "scikit-learn"]
TOOLS += ["soundfile", "soxr", "jiwer"]  # the configuration of speech asks for them
PINNED = (
    "torch",
    "hydra-core",
    "omegaconf",
    "antlr4-python3-runtime",
    "lightning",
    "pytorch-lightning",
)


@dataclass(frozen=True)
class Row:
    """An environment: one version differs from those that the project pins."""

    name: str
    python: str = "3.11"
    torch: str = "2.13.0"
    hydra: str = "1.3.8"
    lightning: str = "pytorch-lightning"

    @property
    def packages(self) -> dict[str, str]:
        """Return the requirements beside torch, as pip takes them, by name."""
        hydra = f"hydra-core{'==' * (self.hydra[0].isdigit())}{self.hydra}"
        return {
            "hydra-core": hydra,
            "pytorch-lightning": f"{self.lightning}>=2.6,<2.7,!=2.6.2,!=2.6.3",
        }


ROWS = [
    Row("pinned"),
    *(Row(f"torch-{v[:4]}", torch=v) for v in ("2.11.0", "2.12.1", "2.14.1", "2.15.0")),
    *(Row(f"python-{v}", python=v) for v in ("3.12", "3.13", "3.14")),
    Row("hydra-newest", hydra=">=1.4.0.dev0"),
    Row("lightning", lightning="lightning"),
]


def interpreter(version: str) -> str:
    """A Python of this version that runs: on PATH, or one of pyenv's.

    Raises:
        SetupError: if there is none.
    """
    pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"), reverse=True)
    for found in [shutil.which(f"python{version}"), *map(str, pyenv)]:
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    raise SetupError(f"no python{version} on this machine")


class Trial(Environment):
    """The environment of a row."""

    def __init__(self, row: Row, folder: Path, cuda: bool) -> None:
        super().__init__(ROOT, folder / row.name)
        self.row, self.cuda = row, cuda

    def make(self) -> None:
        """Install torch, what the project needs, then the project, whatever bounds it states."""
        self.venv.mkdir(parents=True, exist_ok=True)
        made = [interpreter(self.row.python), "-m", "venv", "--clear", str(self.venv)]
        done = subprocess.run(made, capture_output=True, text=True)
        if done.returncode != 0:
            raise SetupError(f"no environment: {done.stderr.strip().splitlines()[-1]}")
        self._install_torch()
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        kept = self.venv / "constraints.txt"
        kept.write_text("\n".join(x for x in pins if x.partition("==")[0] not in PINNED))
        needed = [*self.needed(), *TOOLS, f"torch=={self.row.torch}"]
        self.must_pip("--prefer-binary", "--constraint", str(kept), *needed)
        self.must_pip("--no-deps", "--editable", str(ROOT))

    def needed(self) -> Iterator[str]:
        """The project's dependencies, with the row's versions in place of its bounds."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for text in project["dependencies"]:
            name = re.split(r"[^\w-]", text)[0]
            if name != "torch":
                yield self.row.packages.get(name, text)

    def _install_torch(self) -> None:
        cpu = f"torch=={self.row.torch}+cpu"
        try:
            self.must_pip(*QUICK, cpu)
        except SetupError:
            if self.pip(*QUICK, "--index-url", CPU_INDEX, cpu):
                return
            if not self.cuda:
                raise
            self.must_pip(f"torch=={self.row.torch}")

    def test(self) -> str:
        """Run the core tests; the last line of pytest: how many passed and failed."""
        command = [str(self.python), "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
        environment = {**os.environ, "HYBRIDTRAIN_ANY_VERSION": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        (self.venv / "tests.log").write_text(done.stdout + done.stderr)
        printed = done.stdout.strip() or done.stderr.strip() or "pytest did not run"
        last = printed.splitlines()[-1].strip("= ")
        return re.sub(r", \d+ (deselected|warnings?)\b| in [\d.]+s.*", "", last)


def result(trial: Trial) -> str:
    """Describe a row's outcome; a row that cannot be had says why."""
    try:
        trial.make()
    except (SetupError, OSError) as error:
        return f"{NOT_HAD}: {' '.join(str(error).split()).partition(' (the whole log')[0]}"
    return trial.test()


def table(results: Mapping[str, str]) -> str:
    """The matrix; rows that were not tried are as they were."""
    cells = [
        [r.name, r.python, r.torch, r.hydra, r.lightning, results.get(r.name, "not tried")]
        for r in ROWS
    ]
    return "\n".join([HEAD, *(f"| {' | '.join(row).replace('<', '&lt;')} |" for row in cells)])


def known(page: str) -> dict[str, str]:
    """The results that a page has."""
    rows = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: row[-1] for row in cells if len(row) == 6 and row[-1] != "not tried"}


def written(page: str, results: Mapping[str, str]) -> str:
    """The page with these results beside those that it has of other rows."""
    before, begin, rest = page.partition(BEGIN)
    return before + begin + table({**known(page), **results}) + "\n" + END + rest.partition(END)[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the rows; 0 where every row that could be had passed."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--cuda", action="store_true")
    given = parser.parse_args(arguments)
    if unknown := set(given.rows) - {row.name for row in ROWS}:
        parser.error(f"no row {', '.join(unknown)}; rows are {', '.join(r.name for r in ROWS)}")
    if given.list:
        print(table(known(PAGE.read_text())))
        return 0
    results: dict[str, str] = {}
    for row in (row for row in ROWS if not given.rows or row.name in given.rows):
        folder = given.keep or Path(tempfile.mkdtemp(prefix="hybridtrain-versions-"))
        results[row.name] = f"{result(Trial(row, folder, given.cuda))} ({date.today()})"
        print(f"{row.name}: {results[row.name]}", flush=True)
        if not given.keep:
            shutil.rmtree(folder)
        PAGE.write_text(written(PAGE.read_text(), results))
    tried = [text for text in results.values() if not text.startswith(NOT_HAD)]
    return int(any("passed" not in text or "failed" in text for text in tried))


if __name__ == "__main__":
    sys.exit(main())
