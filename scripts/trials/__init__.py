"""Runs that are judged by what they leave: with faults, killed at random, and replayed.

Here lives what ``fault_matrix.py`` and ``soak.py`` share, and the commands ``kill_at_random.py``
and ``replay_all.py``. Nothing here measures speed.
"""
