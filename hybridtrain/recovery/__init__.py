"""Decisions on failed and restarted workers, as state machines without I/O.

:mod:`hybridtrain.worlds.local` starts and kills the processes.
"""
