"""Anonymous shared memory, and where each parameter lies in it."""

from hybridtrain.memory.arena import Arena
from hybridtrain.memory.layout import Layout, Slot
from hybridtrain.memory.overlap import overlapping
from hybridtrain.memory.packed import Packed, pack, unpack
from hybridtrain.memory.store import Store
from hybridtrain.memory.table import Rows, Table
from hybridtrain.memory.window import Window, open_window

__all__ = [
    "Arena",
    "Layout",
    "Packed",
    "Rows",
    "Slot",
    "Store",
    "Table",
    "Window",
    "open_window",
    "overlapping",
    "pack",
    "unpack",
]
