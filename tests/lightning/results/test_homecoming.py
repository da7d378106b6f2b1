"""Weights and optimizers' states come home in shared memory, or else in a message."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import scratch_file
from hybridtrain.lightning import launcher
from tests.lightning.toys import Regression, distance, fit


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has come home from worker 0, run by run."""
    seen: list[Any] = []
    unpack = launcher.unpack

    def look(trainer: Any, results: Any, *rest: Any) -> Any:
        seen.append(results[0])
        return unpack(trainer, results, *rest)

    monkeypatch.setattr(launcher, "unpack", look)
    return seen


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only there memory has a path")
def test_results_sent_in_shared_memory_are_those_sent_in_a_message(
    homes: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared, trainer = fit("hybrid", 2, 6, lambda: Regression(adam), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "shared.ckpt")
    monkeypatch.setattr(scratch_file, "_OF_PROCESSES", Path("/nowhere"))
    sent, trainer = fit("hybrid", 2, 6, lambda: Regression(adam), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "sent.ckpt")

    assert [bool(home.heavy) for home in homes] == [False, True]
    assert distance(shared, sent) == 0.0
    states = [
        torch.load(tmp_path / name, weights_only=True)["optimizer_states"][0]["state"]
        for name in ("shared.ckpt", "sent.ckpt")
    ]
    assert states[0].keys() == states[1].keys() != set()
    for key in states[0]:
        for name, value in states[0][key].items():
            assert torch.equal(value, states[1][key][name])


class Dropping(Regression):
    """Keeps a layer out of its checkpoints."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if "net.2" not in name}


class Renaming(Regression):
    """Saves its layers under other names."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module: Any, saved: dict[str, Any], *_: Any) -> None:
        for name in list(saved):
            saved[f"old.{name}"] = saved.pop(name)


@pytest.mark.parametrize("kind", [Dropping, Renaming])
def test_parameters_that_a_module_saves_otherwise_come_home_too(kind: Any) -> None:
    plain, _ = fit("hybrid", 2, 6, lambda: Regression(adam), max_epochs=1)
    other, _ = fit("hybrid", 2, 6, lambda: kind(adam), max_epochs=1)
    assert distance(plain, other) == 0.0


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only there memory has a path")
def test_shared_memory_of_results_is_freed_with_its_last_tensor() -> None:
    def held() -> int:
        found = 0
        for link in list(Path("/proc/self/fd").iterdir()):
            with suppress(FileNotFoundError):  # the one that lists them
                found += str(link.readlink()).startswith("/memfd:")
        return found

    before = held()
    room = scratch_file.Scratch()
    assert scratch_file.fill(room.path, {"a": torch.ones(3)}) == b""
    found = scratch_file.read(room.path)
    room.close()
    room.close()
    assert torch.equal(found["a"], torch.ones(3))
    del found, room
    assert held() == before
