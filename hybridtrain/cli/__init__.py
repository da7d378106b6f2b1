"""The command ``hybridtrain``: compose a configuration with Hydra, check it, run it, sweep over it.

``entry.py`` reads the command line, ``run.py`` makes one run; ``validation`` checks before,
``telemetry`` writes what comes of it; ``sweep`` runs many jobs; ``commands`` has all the others.

It may import every room, and no room imports it. Only this folder knows Hydra. Help, completion
and errors about options import neither torch nor Lightning.
"""
