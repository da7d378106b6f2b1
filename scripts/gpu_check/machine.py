"""Check the machine, and the private interfaces of torch that the strategy uses."""

from __future__ import annotations

import ast
import importlib
import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_check.check import ROOT, Found

_ASKED = "index,name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current"
_PACKAGES = ("torch", "pytorch-lightning", "pytest", "numpy", "torchao", "deepspeed")


def facts() -> Found:
    """Devices, cores, memory, limits, NUMA, versions."""
    figures: dict[str, Any] = {
        "gpus": _said("nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader").splitlines(),
        "topology": _said("nvidia-smi", "topo", "-m"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": dict(_lines_of("/proc/meminfo", ("MemTotal", "MemAvailable", "Mlocked"))),
        "lockable_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],  # -1: any number
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "root": os.geteuid() == 0,
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }
    available = int(figures["memory"].get("MemAvailable", "0 kB").split()[0]) / 2**20
    locked = figures["lockable_bytes"]
    text = (
        f"{len(figures['gpus'])} GPU ({', '.join(figures['gpus'][:1]) or 'nvidia-smi is silent'}), "
        f"{figures['cores']} cores, {available:.0f} GiB available, {figures['numa_nodes']} NUMA "
        f"nodes, ulimit -l {'unlimited' if locked < 0 else f'{locked // 1024} KiB'}, torch "
        f"{figures['versions'].get('torch', 'missing')}, Python {figures['python']}"
    )
    return Found(text, True, figures)


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _lines_of(file: str, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            yield name, value.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ---- private names -------------------------------------------------------------------------------

_USED = re.compile(r"\btorch((?:\.\w+)*\._[a-z]\w*)")


def private_names() -> Found:
    """Whether the torch and the Lightning that are here have all that the package asks them for."""
    names = sorted(set(names_used(ROOT / "hybridtrain")))
    absent = [name for name in names if not _is_there(name)]
    text = f"{len(names)} private names" + (f", absent: {', '.join(absent)}" if absent else "")
    return Found(text, not absent, {"absent": absent})


def names_used(package: Path) -> Iterator[str]:
    """``torch._foreach_norm``, ``torch.utils._pytree.tree_leaves``, ... wherever they stand."""
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                foreign = node.module.partition(".")[0] in ("torch", "pytorch_lightning")
                yield from (name for name in whole if foreign and "._" in name)
            elif isinstance(node, ast.Attribute) and _USED.fullmatch(name := ast.unparse(node)):
                yield name


def _is_there(name: str) -> bool:
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:stop]))
        except ImportError:
            continue
        for part in parts[stop:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
