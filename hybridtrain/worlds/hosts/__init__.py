"""Connections between the hosts of one run: mutual TLS by a key that all of them hold.

Only this folder opens ports, and only when a run over several hosts, or DeepDist on Spark, asks for
it.
"""
