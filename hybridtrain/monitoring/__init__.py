"""Signs of life and of slowness: heartbeats, hang detection, stragglers.

Decides who hangs or is slow; what follows is decided in :mod:`hybridtrain.recovery`.
"""
