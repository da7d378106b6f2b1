"""The weight of gradients that add up until the next step."""

from __future__ import annotations


class Accumulation:
    """The mini-batches since the last step of any optimizer, for all optimizers of a module.

    One process weighs the mini-batches that it accumulates alike, however few samples the last one
    has. For the sum over workers to be the same, all mini-batches of a step have one weight, from
    this worker's share of the first. Where its share of a later one is another, that one's loss is
    scaled by the ratio.

    ``weight`` is what the gradients count for, ``scale`` what the running mini-batch's loss is
    multiplied with. ``stepped``: an optimizer has stepped since the mini-batch began. Later steps
    of the same mini-batch have its weight, but its samples count with the first.
    """

    def __init__(self) -> None:
        self.weight, self.scale = 0.0, 1.0
        self.stepped = False
        self._samples = 0.0  # behind the gradients, and not counted yet
        self._running = 0.0, 0.0  # weight and samples of the running mini-batch
        self._share: float | None = None  # of the first mini-batch since the last step

    @property
    def waits(self) -> bool:
        """Whether gradients wait for a step."""
        return self.weight > 0 and not self.stepped

    @property
    def running(self) -> float:
        """The weight of the running mini-batch alone."""
        return self._running[0] if self.weight > 0 else 0.0

    def begin(self, samples: float, together: float | None) -> None:
        """A mini-batch begins.

        Args:
            samples: in it.
            together: in those of all workers in this step; ``None``: unknown, or not to be used.
        """
        share = samples / together if together else None
        if not self.waits:  # it is the first since the last step
            self.clear()
            self._share = share
        weight, self.scale, self.stepped = samples, 1.0, False
        if share is not None and together and self._share and share != self._share:
            weight, self.scale = self._share * together, share / self._share
        self._running = weight, samples
        self.weight += weight
        self._samples += samples

    def go_on(self, samples: float) -> None:
        """The next step is a later one of the same mini-batch, for so many samples of its own."""
        self.weight = self._samples = samples

    def leave_out(self) -> None:
        """The running mini-batch has no gradient."""
        weight, samples = self._running
        self.weight -= weight
        self._samples -= samples

    def clear(self) -> None:
        """The gradients gathered so far do not count."""
        self.weight = self._samples = 0.0

    def pop_samples(self) -> float:
        """The samples that the next contribution is the first to bring."""
        samples, self._samples = self._samples, 0.0
        return samples

    def step(self) -> None:
        """An optimizer has stepped."""
        self.stepped = True
