"""Where a step's time goes: measured in every process, shown as a table and as a timeline."""

from hybridtrain.profiling.method_timing import follow, timed
from hybridtrain.profiling.phases import Phase
from hybridtrain.profiling.time_spans import Track

__all__ = ["Phase", "Track", "follow", "timed"]
