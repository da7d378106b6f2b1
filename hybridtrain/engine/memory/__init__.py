"""Anonymous shared memory, and each parameter's place in it."""

from hybridtrain.engine.memory.arena import Arena
from hybridtrain.engine.memory.layout import Layout, Slot, overlapping
from hybridtrain.engine.memory.sparse_rows import Packed, Rows, Table, pack, unpack
from hybridtrain.engine.memory.store import Store, UpdateMaker
from hybridtrain.engine.memory.turns import Turns
from hybridtrain.engine.memory.worker_view import WorkerView, open_window

__all__ = [
    "Arena",
    "Layout",
    "Packed",
    "Rows",
    "Slot",
    "Store",
    "Table",
    "Turns",
    "UpdateMaker",
    "WorkerView",
    "open_window",
    "overlapping",
    "pack",
    "unpack",
]
