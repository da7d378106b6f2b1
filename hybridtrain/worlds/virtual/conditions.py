"""Under which conditions virtual workers work."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridtrain.worlds.virtual.network import Network
from hybridtrain.worlds.virtual.script import Script


@dataclass(frozen=True)
class Conditions:
    """What is between the workers and their server, and what happens to them.

    ``interrupt``: a worker whose contribution could not count any more is told so and begins anew
    at once, as the literature assumes of K-sync (Dutta et al. 2018); else it ends its mini-batch
    and learns it when it pushes, as real processes do.
    """

    network: Network = field(default_factory=Network)
    script: Script = field(default_factory=Script)
    interrupt: bool = False
