"""Who makes the updates, as a worker sees it: one contract (``maker.py``), chosen in ``choice.py``.

The server's part is in :mod:`hybridtrain.server.workers_updates`.
"""
