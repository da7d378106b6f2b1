"""Updates that a worker makes without the server: in rounds, one by one, or without a lock.

The server's part is in :mod:`hybridtrain.server.workers_updates`.
"""
