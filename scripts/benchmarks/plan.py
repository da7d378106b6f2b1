"""The parts of the benchmark, in the order they are run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.frame import Frame
from benchmarks.rows import Row, Skipped


@dataclass(frozen=True, slots=True)
class Part:
    """``module``: where its function ``rows`` is; imported when it is run."""

    module: str
    about: str

    def rows(self, frame: Frame) -> Iterator[Row | Skipped]:
        """Measure."""
        function: Callable[[Frame], Iterator[Row | Skipped]]
        function = importlib.import_module(f"benchmarks.parts.{self.module}").rows
        return function(frame)


PARTS = {
    "bandwidth": Part(
        "bandwidth", "what the machine's memory gives: copy, triad, one and all cores"
    ),
    "update": Part("update", "mean and Adam alone, against gloo, numba, DeepSpeed and the memory"),
    "step": Part(
        "step", "a whole training step inside Lightning, against ddp, raw DDP, one device"
    ),
    "job": Part("job", "a whole task, from the command to a metric, against ddp"),
    "straggler": Part("straggler", "one of 2 workers 3 times slower: waiting for all against not"),
    "scaling": Part("scaling", "an exchange and update of 1e4 to 1e8 parameters, 1 to 8 workers"),
    "sparse": Part("sparse", "an embedding of a million rows with sparse gradients, against ddp"),
    "gpu": Part("gpu", "one GPU, 1.2 G parameters, against fused AdamW there and offload's peers"),
    "startup": Part("startup", "from the command to the first step, 4 workers, against ddp"),
}
