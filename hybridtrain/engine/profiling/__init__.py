"""Where a step's time goes: measured in every process, shown as a table and as a timeline."""

from hybridtrain.engine.profiling.time_spans import Phase, Track, follow, timed

__all__ = ["Phase", "Track", "follow", "timed"]
