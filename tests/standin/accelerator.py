"""The stand-in as Lightning sees it, like its ``CUDAAccelerator``."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning.accelerators import Accelerator

from tests.standin.device import empty_cache, name_it, set_device
from tests.standin.state import N_DEVICES, NAME, lazy_init


class StandInAccelerator(Accelerator):
    """Give it to a trainer; initialises nothing in the calling process."""

    def setup_device(self, device: torch.device) -> None:
        lazy_init()
        set_device(device)

    def teardown(self) -> None:
        empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        name_it()
        return [torch.device(NAME, number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        return N_DEVICES

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
