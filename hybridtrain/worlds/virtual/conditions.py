"""Under which conditions virtual workers work."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridtrain.protocol.messages import Visits
from hybridtrain.util.option_types import Checked, NotNegative
from hybridtrain.worlds.virtual.network import Network
from hybridtrain.worlds.virtual.script import Script


@dataclass(frozen=True)
class Conditions(Checked):
    """What is between the workers and their server, and what happens to them.

    ``interrupt``: a worker whose contribution could not count any more is told so and begins anew
    at once, as the literature assumes of K-sync (Dutta et al. 2018); else it ends its mini-batch
    and learns it when it pushes, as real processes do. ``update_s``: how long an update takes the
    server, in seconds; what reaches it meanwhile waits for its turn. ``foresight``: who waits for a
    time at which nothing more will have come has gone on at the last arrival, as the literature
    assumes of a window (Liu et al. 2024). ``visits``: workers draw from shards of the data.

    Raises:
        UserError: if ``update_s`` is negative or infinite.
    """

    network: Network = field(default_factory=Network)
    script: Script = field(default_factory=Script)
    interrupt: bool = False
    update_s: NotNegative = 0.0
    foresight: bool = False
    visits: Visits | None = None
