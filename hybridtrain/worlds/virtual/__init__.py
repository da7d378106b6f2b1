"""Virtual time: one process, thousands of workers, a clock that jumps.

The same server and policies as with processes; no process is started here.
"""
