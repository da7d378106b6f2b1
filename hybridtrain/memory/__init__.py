"""Anonymous shared memory, and where each parameter lies in it."""

from hybridtrain.memory.arena import Arena
from hybridtrain.memory.layout import Layout, Slot
from hybridtrain.memory.overlap import overlapping
from hybridtrain.memory.packed import Packed, pack, unpack
from hybridtrain.memory.store import Store
from hybridtrain.memory.window import Window, open_window

__all__ = [
    "Arena",
    "Layout",
    "Packed",
    "Slot",
    "Store",
    "Window",
    "open_window",
    "overlapping",
    "pack",
    "unpack",
]
