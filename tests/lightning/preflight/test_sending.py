"""Spawned workers: what they cannot have is named before the first of them is started."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from torch import nn

from hybridtrain import HybridStrategy
from hybridtrain.engine.worlds.start_workers import ProcessSpawner
from hybridtrain.errors import UserError
from hybridtrain.lightning.preflight.machine_checks import unsendable
from tests.lightning.spawnable import SpawnRegression
from tests.lightning.toys import Regression, fit

ROOT = Path(__file__).parents[3]


class Holder(nn.Module):
    """Anything, as an attribute of a submodule."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2))
        self.net.hook = what


def local_function() -> Any:
    def inner() -> None: ...

    return inner


class Local:
    """Has a class inside."""

    def made(self) -> Any:
        class Inner: ...

        return Inner()


@pytest.mark.parametrize(
    ("what", "path", "text"),
    [
        (lambda: 0, "model.net.hook", "a lambda"),
        ({"a": [1, lambda: 0]}, "model.net.hook['a'][1]", "a lambda"),
        (local_function(), "model.net.hook", "the function local_function.<locals>.inner, which"),
        (Local().made(), "model.net.hook", "an object of the class Local.made.<locals>.Inner"),
        (SimpleNamespace(a=1, lock=threading.Lock()), "model.net.hook.lock", "_thread.lock"),
        (torch.ones(2, requires_grad=True) * 2, "model.net.hook", "detach"),
    ],
)
def test_the_innermost_attribute_that_cannot_be_sent_is_named(
    what: Any, path: str, text: str
) -> None:
    found = unsendable(Holder(what), "model")
    assert found is not None
    assert found[0] == path and text in found[1]


def test_what_can_be_sent_is_not_complained_of() -> None:
    queue = __import__("multiprocessing").get_context("spawn").Queue()
    module = Holder({"weights": torch.ones(3), "queue": queue, "function": os.path.join})
    module.itself = [module]
    assert unsendable(module, "model") is None


def test_a_hook_of_a_module_is_found() -> None:
    module = Holder(None)
    module.net[0].register_forward_hook(lambda *_: None)
    found = unsendable(module, "model")
    assert found is not None and found[0].startswith("model.net.0._forward_hooks[")


class Kept(Callback):
    """With an attribute."""

    def __init__(self, what: Any) -> None:
        self.what = what


class Data(torch.utils.data.TensorDataset):
    """With a transformation."""


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"module": Regression(lambda p: None)}, "model.make_optimizer is a lambda"),
        ({"callbacks": [Kept(lambda: 0)]}, "callbacks[0].what is a lambda"),
        ({"data": "lambda"}, "train_dataloaders.dataset.transform is a lambda"),
    ],
    ids=["module", "callback", "data"],
)
def test_an_attribute_that_cannot_be_sent_is_named_before_any_process_is_started(
    start_method: str, change: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessSpawner, "start", lambda *_: pytest.fail("a process was started"))
    given: dict[str, Any] = {"module": SpawnRegression()} | change
    if "data" in given:
        given["data"] = Data(torch.ones(4, 4), torch.ones(4, 1))
        given["data"].transform = lambda x: x
    with pytest.raises(UserError) as caught:
        fit(HybridStrategy(start_method=start_method), 2, 4, **given)
    message = str(caught.value)
    assert f"started by {start_method}, but {text}" in message
    assert "start_method=fork" in message and "\n" not in message


# ---- scripts ------------------------------------------------------------------------------------

SCRIPT = """
    import sys
    from hybridtrain import HybridStrategy
    from tests.lightning.spawnable import SpawnRegression
    from tests.lightning.toys import fit

    def main():
        strategy = HybridStrategy(start_method=sys.argv[1])
        print("steps", fit(strategy, 2, 6, SpawnRegression, max_epochs=1)[1].global_step)
"""
ENDS = {
    "guarded": 'if __name__ == "__main__":\n    main()\n',
    "guarded twice": 'if True and __name__ == "__main__":\n    if True:\n        main()\n',
    "bare": "main()\n",
}


def run(folder: Path, end: str, start_method: str, *how: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + ENDS[end])
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *(how or [str(script)]), start_method],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


REFUSED = (
    "which imports the script anew in each of them, and script.py:10 would train",
    "if __name__ == '__main__':, or use start_method=fork",
)


@pytest.mark.own_process
def test_a_script_without_a_guard_is_refused_under_spawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessSpawner, "start", lambda *_: pytest.fail("a process was started"))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + ENDS["bare"])
    sys.argv[1:] = ["spawn"]
    with pytest.raises(UserError) as caught:
        runpy.run_path(str(script), run_name="__main__")
    assert all(text in str(caught.value) for text in REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("-m", "script")], ids=["file", "module"])
def test_a_script_without_a_guard_is_refused_in_an_interpreter_of_its_own(
    how: Any, tmp_path: Path
) -> None:
    done = run(tmp_path, "bare", "spawn", *how)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert all(text in last for text in REFUSED)
    assert "worker" not in done.stderr.replace(last, "")


@pytest.mark.slow
def test_under_fork_a_script_needs_no_guard(tmp_path: Path) -> None:
    done = run(tmp_path, "bare", "fork")
    assert "steps 4" in done.stdout, done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("end", "start_method"),
    [
        ("guarded", "spawn"),
        ("guarded twice", "spawn"),
        ("guarded", "forkserver"),
    ],
)
@pytest.mark.slow
def test_a_script_with_a_guard_is_not_refused(end: str, start_method: str, tmp_path: Path) -> None:
    done = run(tmp_path, end, start_method)
    assert "steps 4" in done.stdout, done.stderr
