"""Policies, exchanges, updates, server, workers, and the worlds of one host that they run in.

``policies`` decide when gradients are applied and workers released; ``protocol`` has the facts and
orders of policies, and the messages between server and workers. ``exchanges`` and ``updates`` are
the other parts of a strategy: what workers hand over, and how the masters are stepped;
``options`` has what may be given to them, and ``scheme.py`` makes all of them. ``memory`` lays out
parameters and gradients in shared memory. ``server``, ``worker`` and ``step`` are the two sides of
a step; ``samplers.py`` gives each worker its samples. ``worlds`` start and serve the processes.
``recovery`` and ``monitoring`` are about failed and hanging workers, ``faults.py`` about faults on
purpose; ``recording`` and ``profiling`` write down what a run does.

The engine must not know Lightning, Hydra, another host, virtual time or any other room but
:mod:`hybridtrain.util`. Decisions (policies, protocol, server, recovery, updates) start no process
and open no socket.
"""
