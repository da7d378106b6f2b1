"""One table of what gpu_check.sh has found; exits with 1 if something is wrong."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

_NOT_INSTALLED = "cannot be imported"  # a peer that is not there is nobody's fault
_NO_MEMORY = "GiB of memory, and"


def tests(file: Path, code: int) -> tuple[str, bool]:
    """A line about the tests, and whether they are right."""
    if not file.is_file():
        why = "took too long" if code in (124, 137) else "did not run"
        return f"they {why} (exit code {code})", False
    suite = next(ET.parse(file).getroot().iter("testsuite"))
    n, bad = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    text = f"{n - bad - skipped} passed, {bad} failed, {skipped} skipped"
    return text, code == 0 and n > skipped


def benchmark(file: Path, code: int) -> list[tuple[str, str, bool]]:
    """Work, result and whether it is right, of each row."""
    if not file.is_file():
        why = "took too long" if code in (124, 137) else "failed"
        return [("the benchmark", f"{why} (exit code {code})", False)]
    found = []
    for row in json.loads(file.read_text())["rows"]:
        if row["kind"] == "skipped":
            reason = row["reason"].splitlines()[0]
            fine = _NOT_INSTALLED in reason or _NO_MEMORY in reason
            found.append((row["work"], f"left out: {reason}", fine))
            continue
        text = f"{row['ours']:.4g} {row['unit']}"
        if row["ratio"] is not None:
            text += f"; {row['baseline']} {row['theirs']:.4g}, {row['ratio']:.2f}×"
        note = f" ({row['note']})" if row["note"] else ""
        # A goal of speed that is missed is a figure, not a fault; a wrong result is left out above.
        found.append((f"{row['work']}: {row['method']}{note}", text, True))
    return found or [("the benchmark", "no row", False)]


def main() -> int:
    """Print the table."""
    folder, tests_code, benchmark_code = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    text, right = tests(folder / "tests.xml", tests_code)
    rows = [("GPU tests", text, right)]
    rows += benchmark(folder / "gpu.json", benchmark_code)
    width = max(len(what) for what, _, _ in rows)
    print(f"| {'checked'.ljust(width)} | right | found |")
    print(f"|{'-' * (width + 2)}|-------|-------|")
    for what, found, fine in rows:
        print(f"| {what.ljust(width)} | {'yes  ' if fine else 'NO   '} | {found} |")
    return 0 if all(fine for _, _, fine in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
