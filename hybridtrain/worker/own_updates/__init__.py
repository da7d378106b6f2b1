"""Updates that a worker makes without the server: in rounds, one by one, or without a lock.

What the server has to know of them is in :mod:`hybridtrain.server.workers_updates`.
"""
