"""What is due in virtual time, in the order in which it happens.

At the same moment that is: timers of the policy, ends of updates, the script, workers by their
numbers.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from hybridtrain.protocol.messages import Begin, Gather, Push
from hybridtrain.protocol.server_events import UpdateEnded
from hybridtrain.worlds.virtual.script import Dies, Joins


class Arrival(NamedTuple):
    """What a worker has said reaches a server."""

    said: Push | Begin | Gather


# When, which worker, the number of what it does (an older one will not happen), which shard, and
# what; a push alone: the worker has computed it. Events of the script have negative numbers in the
# worker's place, so that they come first; ends of updates the least.
Due = tuple[float, int, int, int, Push | Arrival | Dies | Joins | UpdateEnded]
A_SERVER = -sys.maxsize
