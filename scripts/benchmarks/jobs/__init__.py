"""Jobs of measured processes: networks, loops and other libraries, which parts share.

Here live functions that a :class:`~benchmarks.runs.Job` names; they return figures.
Nothing here compares, knows a goal, or starts a measurement.
"""
