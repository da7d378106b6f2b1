"""The parts of a run, as the process that calls ``fit`` has them before workers start."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridtrain.engine.options.strategy_arguments import StrategyArguments
from hybridtrain.engine.scheme import Scheme
from hybridtrain.engine.worker.device import KINDS
from hybridtrain.util.host_place import HostPlace


@dataclass(frozen=True)
class RunSetup:
    """Handed to the checks of a run, and to what brings its hosts together.

    Args:
        scheme: policy, exchange, update, and what they require.
        options: of the strategy.
        place: this host among those of the run.
        n_workers: of the run.
        n_here: of this host.
        devices: of this host's workers, in turn.
        workers_per_device: which share one.
        precision: of the trainer.
    """

    scheme: Scheme
    options: StrategyArguments
    place: HostPlace
    n_workers: int
    n_here: int
    devices: tuple[torch.device, ...]
    workers_per_device: int
    precision: str

    @property
    def stages(self) -> bool:
        """Whether each worker has the parameters of the next step on its device, too."""
        on_device = any(device.type in KINDS for device in self.devices)
        comes = self.options["on_failure"] == "restart" or self.place.n_hosts > 1
        return self.scheme.requirements.stages_on_device(on_device, comes)

    @property
    def min_hosts(self) -> int:
        """The number of hosts with which training begins."""
        return min(self.options["min_hosts"] or self.place.n_hosts, self.place.n_hosts)
