"""Save and restore the attributes of an exchange that count steps since the last exchange."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

from hybridtrain.exchanges.compression import Compressor
from hybridtrain.exchanges.exchange import RESIDUALS


class Remembering:
    """``remembers``: the names of its attributes, without the ``_`` that they begin with."""

    remembers: ClassVar[tuple[str, ...]]
    compressor = Compressor(None)

    def state(self) -> dict[str, Any]:
        known = {name: copy(getattr(self, f"_{name}")) for name in self.remembers}
        return {**known, RESIDUALS: self.compressor.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in self.remembers:
            setattr(self, f"_{name}", copy(state.get(name, getattr(self, f"_{name}"))))
        self.compressor.load_state(state.get(RESIDUALS, {}))
