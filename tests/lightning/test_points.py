"""Lightning is patched at the points of one table, which a page explains; nowhere else."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.lightning.hooks.points import Point, around, before
from tests.lightning.test_private_names import HOOKS, PACKAGE, name_of
from tests.lightning.toys import fit
from tests.support.source_trees import nodes, tree

PAGE = PACKAGE.parent / "docs" / "lightning_points.md"
GLUE = [path for path in (PACKAGE / "lightning").rglob("*.py") if HOOKS not in path.parents]


def test_the_page_lists_every_point_with_its_listeners_in_their_order() -> None:
    rows = re.findall(r"^\| .+? \| (`.+?`) \| .+? \| (`.+?`) \|$", PAGE.read_text(), re.MULTILINE)
    listed = [(re.findall("`(.+?)`", methods), re.findall("`(.+?)`", by)) for methods, by in rows]
    assert listed == [(each.methods, each.listeners) for each in Point]


@cache
def qualified_names() -> set[str]:
    """Functions and methods of the package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.iter_child_nodes(tree(path)):
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{f.name}" for f in inner if isinstance(f, ast.FunctionDef)}
            found |= {node.name} if isinstance(node, ast.FunctionDef) else set()
    return found


@pytest.mark.wide
def test_every_listener_is_a_function_of_the_package() -> None:
    assert {name for each in Point for name in each.listeners} <= qualified_names()


def test_every_point_is_used() -> None:
    texts = "".join(path.read_text() for path in (PACKAGE / "lightning").rglob("*.py"))
    assert set(re.findall(r"\bPoint\.([A-Z_]+)\b", texts)) == {each.name for each in Point}


def test_a_subclass_may_have_a_method_of_its_own_that_listens(tmp_path: Path) -> None:
    class Marking(HybridStrategy):
        def before_checkpoint(self) -> None:
            (tmp_path / "called").touch()
            super().before_checkpoint()

    _, trainer = fit(Marking("hybrid"), 2, 8, max_steps=1)
    assert trainer.global_step == 1 and (tmp_path / "called").exists()


@pytest.mark.parametrize("added", [*permutations(range(3))])
def test_listeners_run_in_the_listed_order_however_they_are_added(added: tuple[int, ...]) -> None:
    said: list[str] = []

    def look() -> None:
        said.append("look")

    def keep_schedules() -> None:
        said.append("keep")

    def update(proceed: Any, interval: str) -> str:
        said.append("update")
        return f"{proceed(interval)} and more"

    for function, name in zip(
        (look, keep_schedules, update), Point.SCHEDULERS.listeners, strict=False
    ):
        function.__qualname__ = name
    loop = SimpleNamespace(update_lr_schedulers=lambda interval: said.append("own") or interval)
    for number in (*added, *added):  # a second time changes nothing
        if number == 2:
            around(Point.SCHEDULERS, loop, update)
        else:
            before(Point.SCHEDULERS, loop, (look, keep_schedules)[number])
    assert loop.update_lr_schedulers("step") == "step and more"
    assert said == ["look", "keep", "update", "own"]


def test_a_listener_that_is_not_listed_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"is not listed at Point\.FIT"):
        before(Point.FIT, SimpleNamespace(run=print), lambda: None)


# ---- nowhere else -------------------------------------------------------------------------------

# Attributes that are set outside of the folder, though some method of Lightning's has their name.
OTHERS = {
    ("lightning/checkpointing/checkpoint_writing.py", "checkpoint_io"): "Lightning's own setter",
    ("lightning/failover/lost_samples.py", "fetched"): "a count of mini-batches",
    ("lightning/failover/lost_samples.py", "is_last_batch"): "a value of Lightning's progress",
    ("lightning/fault_injection/in_worker.py", "_step"): "of our rounds",
    ("lightning/fault_injection/in_worker.py", "step"): "of our count of gradients",
    ("lightning/fault_injection/in_worker.py", "training_step"): "of our session",
    ("lightning/launcher.py", "loggers"): "of our job",
    ("lightning/participation/absent_steps.py", "is_last_batch"): "a value of progress",
    ("lightning/replay/module_task.py", "log"): "a module in virtual time, which no loop runs",
    ("lightning/replay/module_task.py", "trainer"): "the module's setter",
    ("lightning/replay/module_task.py", "version"): "of our own trainer in virtual time",
    ("lightning/results/returned_optimizers.py", "optimizer"): "of torch's schedulers",
    ("lightning/results/returned_training.py", "trainer"): "the module's setter",
    ("lightning/step/step_rollback.py", "is_last_batch"): "a value of Lightning's progress",
}


@cache
def lightnings_methods() -> set[str]:
    folder = Path(str(find_spec("pytorch_lightning").origin)).parent  # type: ignore[union-attr]
    texts = (path.read_text() for path in folder.rglob("*.py"))
    return {name for text in texts for name in re.findall(r"^ +def (\w+)\(", text, re.MULTILINE)}


def set_from_outside(path: Path) -> set[str]:
    """Attributes that a file sets in objects other than ``self``."""
    found = set()
    for node in nodes(path):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars")),
                slice=ast.Constant(value=str(name)),
                ctx=ast.Store(),
            ):
                found.add(name)
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str(name)), _]):
                found.add(name)
    return found


def test_no_other_file_replaces_a_method_of_lightnings() -> None:
    found = {
        (name_of(f), name) for f in GLUE for name in set_from_outside(f) & lightnings_methods()
    }
    assert found == OTHERS.keys()
