"""Describe the machine: enough to judge a figure by, and no name of a host or a folder."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "pytorch-lightning", "numpy", "numba", "deepspeed")


def machine() -> dict[str, Any]:
    """Cores, caches, memory, versions, commit, load."""
    return {
        "date": date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "processor": _processor(),
        "cache_l3_mib": _last_cache_mib(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name)) is not None},
        "commit": _commit(),
        "load_before": round(os.getloadavg()[0], 1),
        "threads": "1 per process (OMP_NUM_THREADS=1)",
    }


def in_short(found: dict[str, Any]) -> str:
    """One line."""
    return (
        f"{found['date']}, {found['cores']} cores ({found['processor']}), "
        f"{found['memory_gib']:g} GiB, torch {found.get('torch')}, "
        f"Lightning {found.get('pytorch-lightning')}, Python {found['python']}, "
        f"commit {found['commit']}, load before {found['load_before']}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _last_cache_mib() -> float | None:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return None
    return int(text.removesuffix("K")) / 1024


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Return this checkout's commit, with a plus where there are changes."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(
            git("status", "--porcelain", "-uno")
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
