"""The other hosts of a run: relays, and connections by mutual TLS with a key that all hold.

A relay starts and watches the workers of its host, and forwards their messages to the server's
host. This folder opens the ports, and only where a run over several hosts, or DeepDist on Spark,
asks for it. It takes its place in :mod:`hybridtrain.engine.worlds` by the contract ``OtherHosts``.

It decides nothing about training: it must not know Lightning, Hydra, the public server or virtual
time. Which host this is, and what all must agree on, is said in :mod:`hybridtrain.lightning.hosts`.
"""
