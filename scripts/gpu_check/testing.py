"""Tests by the pytest that is here, whichever it is, of files that need nothing that is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from gpu_check.check import ROOT, Found

# In place of the repository's, whose pytest may be newer.
_SETTINGS = """[pytest]
markers =
    slow: takes long
    gpu: needs a CUDA device
    own_process: runs in a fork of its own
    timeout: of the plugin pytest-timeout
"""
_NOTHING_TO_RUN = 5  # pytest's exit code


def run(files: Sequence[str], only: str = "", most_failures: int = 20) -> Found:
    """Run the test files that can be imported here; ``only``: an expression of marks."""
    missing = {file: lacks(file) for file in files}
    left_out = [f"{file} (no {name})" for file, name in missing.items() if name]
    rest = [str(ROOT / file) for file in files if not missing[file]]
    if not rest:
        return Found("; ".join(left_out), None)
    settings, results = Path("pytest.ini").absolute(), Path("tests.xml").absolute()
    settings.write_text(_SETTINGS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-c", str(settings)]
    command += ["--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider"]
    command += ["--basetemp", str(Path("tmp").absolute()), "--junitxml", str(results)]
    command += ["--maxfail", str(most_failures), *(("-m", only) if only else ()), *rest]
    code = subprocess.run(command, check=False).returncode
    text, right = counted(results, code)
    return Found("; ".join([text, *(f"left out: {each}" for each in left_out)]), right)


def counted(results: Path, code: int) -> tuple[str, bool | None]:
    """Read pytest's results: a line, and whether all passed; ``None`` where nothing was run."""
    if not results.is_file():
        return f"pytest did not run (exit code {code})", False
    suite = next(ET.parse(results).getroot().iter("testsuite"))
    n, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    reasons = {str(each.get("message")) for each in suite.iter("skipped")}
    text = f"{n - bad - skipped} passed, {bad} failed, {skipped} skipped"
    text += f" ({'; '.join(sorted(reasons))})" if reasons else ""
    if n == skipped and code in (0, _NOTHING_TO_RUN):
        return text, None
    return text, code == 0


def lacks(file: str) -> str:
    """The package that is not here and that importing the file needs, if there is one."""
    try:
        importlib.import_module(file.removesuffix(".py").replace("/", "."))
    except ModuleNotFoundError as error:
        return str(error.name)
    return ""
