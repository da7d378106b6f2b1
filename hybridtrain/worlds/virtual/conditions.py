"""The conditions of a simulation: network, script, and options of the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridtrain.protocol.messages import Visits
from hybridtrain.util.option_types import Checked, NotNegative
from hybridtrain.worlds.virtual.network import Network
from hybridtrain.worlds.virtual.script import Script


@dataclass(frozen=True)
class Conditions(Checked):
    """The network, and what happens to workers.

    ``interrupt``: a worker whose gradient would be dropped begins anew at once, as the literature
    assumes of K-sync (Dutta et al. 2018); else its gradient is dropped on arrival, as with real
    processes. ``update_s``: duration of an update in seconds; messages that arrive meanwhile wait.
    ``foresight``: a time window in which nothing more will arrive ends at the last arrival, as the
    literature assumes (Liu et al. 2024). ``visits``: workers draw from shards of the data.

    Raises:
        UserError: if ``update_s`` is negative or infinite.
    """

    network: Network = field(default_factory=Network)
    script: Script = field(default_factory=Script)
    interrupt: bool = False
    update_s: NotNegative = 0.0
    foresight: bool = False
    visits: Visits | None = None
