"""Heartbeats, hang detection, stragglers; :mod:`hybridtrain.recovery` decides what follows."""
