"""Heartbeats, hang detection, stragglers; :mod:`hybridtrain.engine.recovery` decides what
follows."""
