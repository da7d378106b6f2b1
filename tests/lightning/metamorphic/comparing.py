"""What two runs of which one was observed must have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.lightning.metamorphic import strategies
from tests.lightning.metamorphic.playing import Run
from tests.lightning.metamorphic.subjects import EPOCHS, SIZES

Left = dict[str, Any]


def lasting(run: Run, left: Left) -> Left:
    """To the bit all of it, where runs repeat; else counts, as far as they are known beforehand."""
    if strategies.repeats(run.strategy, run.workers):
        return left
    counts = left["counts"]
    found = {"samples": counts["samples"], "epoch": counts["epoch"]}
    if strategies.counts_exactly(run.strategy, run.workers):
        found |= {name: counts[name] for name in ("global_step", "global_step saved", "updates")}
        found["schedules"] = [each["last_epoch"] for each in left["schedules"]]
        if run.kind == "accumulating":  # each worker has a last, smaller group
            found = {name: found[name] for name in ("samples", "epoch")}
    if run.kind == "sums":  # the order of updates is nothing that these show
        found |= {"weights": left["weights"], "saved weights": left["saved weights"]}
    return found


def miscounted(run: Run, left: Left) -> list[str]:
    """Where a run has not used each sample exactly once in each epoch."""
    counts, size = left["counts"], SIZES[run.data]
    seen, whole = counts["seen"][:size], EPOCHS * size
    if run.begun:
        return []  # the first part has used some of them
    wrong = [f"sample {n}: {times}" for n, times in enumerate(seen) if times < EPOCHS]
    if not strategies.drops(run.strategy):
        wrong += [f"sample {n}: {times}" for n, times in enumerate(seen) if times > EPOCHS]
    if counts["samples"] not in (None, whole) and not strategies.tells_late(run.strategy):
        wrong.append(f"{counts['samples']} samples instead of {whole}")
    return wrong


def differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Each place where the two are not the same to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one.nan_to_num(), other.nan_to_num()):
            yield f"{at}: {one.flatten()[:3].tolist()} -> {other.flatten()[:3].tolist()}"
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys(), key=str):
            yield from differences(one.get(key), other.get(key), f"{at}/{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{at}: {len(one)} -> {len(other)}"
        for number, pair in enumerate(zip(one, other, strict=False)):
            yield from differences(*pair, f"{at}/{number}")
    elif one != other:
        yield f"{at}: {one!r} -> {other!r}"
