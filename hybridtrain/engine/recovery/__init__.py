"""Decisions on failed and restarted workers, as state machines without I/O.

:mod:`hybridtrain.engine.worlds` starts and kills the processes.
"""
