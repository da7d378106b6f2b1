"""Workers that fail and come back: the decisions, as state machines without I/O.

Processes are started and killed elsewhere (:mod:`hybridtrain.worlds.local`).
"""
