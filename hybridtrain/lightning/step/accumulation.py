"""What a mini-batch counts for, among those whose gradients add up until the next step."""

from __future__ import annotations


class Accumulation:
    """The mini-batch that is running.

    One process weighs the mini-batches that it accumulates alike, however few samples the last one
    has. For the sum over workers to be the same, a mini-batch of which this worker has another
    share than of the first since the last step counts with the first's share, and its loss is
    scaled by how much more or less it has.

    ``weight`` is what the mini-batch counts for, ``samples`` what it has, ``scale`` what its loss
    is multiplied with.
    """

    def __init__(self) -> None:
        self.weight = self.samples = 0.0
        self.scale = 1.0
        self._share: float | None = None  # of the first mini-batch since the last step

    def begin(self, samples: float, together: float | None, first: bool) -> None:
        """A mini-batch begins.

        Args:
            samples: in it.
            together: in those of all workers in this step; ``None``: unknown, or not to be used.
            first: since the last step.
        """
        share = samples / together if together else None
        if first:
            self._share = share
        self.weight, self.samples, self.scale = samples, samples, 1.0
        if share is None or together is None or share == self._share:
            return
        if self._share:
            self.weight, self.scale = self._share * together, share / self._share
