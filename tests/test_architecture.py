"""Imports point one way, importing is quick, and no file or function outgrows its reader."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.source_trees import nodes, tree

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridtrain"
FILES = sorted(PACKAGE.rglob("*.py"))

pytestmark = pytest.mark.timeout(420)  # imports take minutes where other processes run


@cache
def imported_by(path: Path) -> frozenset[str]:
    """Full names of all modules that a file may import, wherever it does, types included."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def files_of(*parts: str) -> list[Path]:
    found = [f for f in FILES if str(f.relative_to(PACKAGE)).startswith(parts)]
    assert found, parts
    return found


def offenders(files: list[Path], *forbidden: str) -> dict[str, set[str]]:
    bad = {
        str(path.relative_to(PACKAGE)): {
            name
            for name in imported_by(path)
            if any(name == each or name.startswith(each + ".") for each in forbidden)
        }
        for path in files
    }
    return {path: names for path, names in bad.items() if names}


LIGHTNING = ("pytorch_lightning", "lightning", "lightning_utilities", "torchmetrics")

# Who never imports whom. What stands in no row is allowed, `errors.py` everywhere.
SEAM = "lightning_package registration"
NEVER = {
    "util": "engine hosts report virtual standalone lightning tasks cli " + SEAM,
    "engine": "hosts report virtual standalone lightning tasks cli " + SEAM,
    "hosts": "report virtual standalone lightning tasks cli " + SEAM,
    "report": "hosts virtual standalone lightning tasks cli registration",
    "virtual": "hosts standalone lightning tasks cli " + SEAM,
    "standalone": "report lightning tasks cli " + SEAM,
    "lightning": "standalone tasks cli registration",
    "tasks": "engine hosts report virtual standalone lightning cli registration",
    "cli": "",
}
# Inside `lightning`: a folder, or a module beside the folders, imports only what stands above it.
IN_LIGHTNING = (
    "hooks",
    *("collectives", "device_memory", "worker_context", "run_context", "run_setup"),
    *("update_count", "due_steps", "step_profiler", "sync_batchnorm"),
    "states",
    "checkpointing",
    "data",
    "step",
    "participation",
    "async_training",
    "hosts",
    "preflight",
    "fault_injection",
    "failover",
    "worker_callback",
    "results",
    "host_memory_strategy",
    "launcher",
    "strategy",
    "replay",
    "simulate_strategy",
)
MODULES_AT_THE_DOOR = {"__init__", "__main__", "errors", "lightning_package", "registration"}


def folder(name: str) -> str:
    return f"hybridtrain.{name.removesuffix('.py')}"


@pytest.mark.parametrize("room", [room for room, never in NEVER.items() if never])
def test_a_room_never_imports_those_that_it_must_not_know(room: str) -> None:
    assert not offenders(files_of(f"{room}/"), *map(folder, NEVER[room].split()))


@pytest.mark.parametrize("part", IN_LIGHTNING)
def test_a_part_of_lightning_imports_none_of_those_that_stand_below_it(part: str) -> None:
    below = IN_LIGHTNING[IN_LIGHTNING.index(part) + 1 :]
    files = files_of(f"lightning/{part}/", f"lightning/{part}.py")
    assert not offenders(files, *(f"hybridtrain.lightning.{each}" for each in below))


def test_every_part_of_lightning_has_its_place_in_the_order() -> None:
    parts = {f.relative_to(PACKAGE / "lightning").parts[0] for f in files_of("lightning/")}
    assert {part.removesuffix(".py") for part in parts} == {*IN_LIGHTNING, "__init__"}


def test_every_folder_at_the_door_is_a_room() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert found == NEVER.keys() | MODULES_AT_THE_DOOR
    assert len(NEVER) <= 9


def test_the_rooms_that_must_not_be_imported_exist() -> None:
    assert {name for never in NEVER.values() for name in never.split()} <= (
        NEVER.keys() | MODULES_AT_THE_DOOR
    )


def test_policies_and_facts_know_no_tensors_processes_or_clocks() -> None:
    files = files_of("engine/policies", "engine/protocol/facts.py")
    assert not offenders(files, "torch", "numpy", "os", "time", "multiprocessing", "threading")


def test_only_the_glue_the_tasks_and_the_command_line_know_lightning() -> None:
    allowed = ("lightning", "tasks", "cli", "registration.py")
    rest = [f for f in FILES if not str(f.relative_to(PACKAGE)).startswith(allowed)]
    assert not offenders(rest, *LIGHTNING)


def test_hydra_is_known_to_the_command_line_alone() -> None:
    allowed = "cli"
    rest = [f for f in FILES if not str(f.relative_to(PACKAGE)).startswith(allowed)]
    assert not offenders(rest, "hydra", "hydra_plugins")


def test_decisions_start_no_process_and_open_no_socket() -> None:
    files = files_of(
        *(f"engine/{each}" for each in ("policies", "protocol", "server", "recovery", "updates"))
    )
    assert not offenders(files, "multiprocessing", "subprocess", "socket", "selectors", "signal")


def test_worlds_and_replays_tell_the_server_what_happens_by_one_method() -> None:
    files = files_of(
        *("engine/worlds", "hosts", "virtual"),
        *("engine/recording/replayer.py", "engine/recording/virtual_rerun.py"),
    )
    called = {name for f in files for name in re.findall(r"\b_?server\.(\w+)\(", f.read_text())}
    # Besides, its parts are made and taken down, and what memory a reply is about is asked.
    assert called == {"on", "adopt", "close", "descriptor_for"}


def asks_trainer_for_strategy(node: ast.AST) -> bool:
    """``trainer.strategy``, ``self._trainer.strategy``, ``vars(trainer)["strategy"]`` and so on."""
    match node:
        case ast.Attribute(value=owner, attr="strategy"):
            pass
        case ast.Call(func=ast.Name("getattr"), args=[owner, ast.Constant("strategy"), *_]):
            pass
        case _:
            return False
    return ast.unparse(owner).endswith("trainer")


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("self._trainer.strategy.client", True),
        ("getattr(job.trainer, 'strategy')", True),
        ("cfg.strategy.policy", False),
        ("worker_of(trainer).client", False),
    ],
)
def test_a_question_for_the_strategy_is_known_as_one(code: str, asks: bool) -> None:
    assert any(map(asks_trainer_for_strategy, ast.walk(ast.parse(code)))) is asks


def test_one_module_alone_takes_the_strategy_from_a_trainer_and_types_it() -> None:
    rest = [f for f in FILES if "tasks" not in f.parts]  # ordinary Lightning code, as users write
    found = {
        str(path.relative_to(PACKAGE))
        for path in rest
        for node in nodes(path)
        if asks_trainer_for_strategy(node)
    }
    assert found == {"lightning/run_context.py"}


def test_a_worker_is_looked_up_only_where_lightning_calls_with_a_trainer_alone() -> None:
    """All other parts get what they need when they are made."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if "hybridtrain.lightning.run_context.worker_of" in imported_by(path)
    }
    assert found == {
        "lightning/checkpointing/periodic.py",  # users make it, and Lightning calls it
        "lightning/participation/gathered_dictionaries.py",  # a method of all modules
    }


# ---- each object sets its own attributes --------------------------------------------------------

# Of torch, Lightning, Hydra and the like, which classes of ours happen to have as well.
OF_OTHERS = {
    "advice",
    "batch",
    "batch_size",
    "cfg",
    "checkpoint_io",
    "ckpt",
    "client",
    "clip",
    "counts",
    "data",
    "done",
    "enable_progress_bar",
    "keeping",
    "limit_predict_batches",
    "limit_train_batches",
    "log_every_n_steps",
    "logger",
    "map",
    "num_nodes",
    "optimizer",
    "profile",
    "rank",
    "ready",
    "record",
    "run_dir",
    "sampler",
    "should_stop",
    "started",
    "state",
    "step",
    "trainer",
    "value",
    "weight",
    "workers_per_device",
}


def assigned(node: ast.AST) -> Iterator[Any]:
    """The attributes of other objects that a statement sets."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for each in ast.walk(target):
                stores = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                if stores and ast.unparse(each.value) not in ("self", "cls"):
                    yield each


def attributes_of(path: Path) -> set[str]:
    """Those of the classes of a file, as their methods and fields set them."""
    inside = {n for c in nodes(path) if isinstance(c, ast.ClassDef) for n in ast.walk(c)}
    own = [n for n in inside if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    annotated = [n.target for n in inside if isinstance(n, ast.AnnAssign)]
    fields = [target.id for target in annotated if isinstance(target, ast.Name)]
    return {*fields, *(n.attr for n in own if ast.unparse(n.value) == "self")}


def test_no_part_sets_an_attribute_of_an_object_of_another_module() -> None:
    """It calls a method of that object, which can be found, and may decide."""
    own = {path: attributes_of(path) for path in FILES}
    known = set().union(*own.values()) - OF_OTHERS
    found = [
        f"{path.relative_to(PACKAGE)}:{each.lineno}: {ast.unparse(each)}"
        for path in FILES
        for node in nodes(path)
        for each in assigned(node)
        if each.attr in known - own[path]
    ]
    assert found == []


# ---- rooms --------------------------------------------------------------------------------------

NO_MODULES = ("__init__.py", "__main__.py")
MODULES = [path for path in FILES if path.name not in NO_MODULES]


SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))


def test_folders_of_scripts_say_what_lives_there() -> None:
    folders = {path.parent for path in SCRIPTS if path.name not in NO_MODULES}
    said = [ast.get_docstring(tree(p)) for p in SCRIPTS if p.name == "__init__.py"]
    assert all(said)
    assert len(said) == len(folders) - 1  # all but scripts/ itself, which is no package


def test_every_folder_says_what_lives_there() -> None:
    folders = {path.parent for path in MODULES}
    silent = [
        str(each.relative_to(ROOT))
        for each in folders
        if not (each / "__init__.py").is_file() or not ast.get_docstring(tree(each / "__init__.py"))
    ]
    assert silent == []


# ---- cycles -------------------------------------------------------------------------------------


def named_in(path: Path, names: set[str]) -> set[str]:
    """The package's modules that a file imports when it runs; those for types only do not tie."""
    typed = [n for n in nodes(path) if isinstance(n, ast.If) and is_for_types(n)]
    apart = {inner for node in typed for stay in node.body for inner in ast.walk(stay)}
    there = [node for node in nodes(path) if node not in apart]
    found = {a.name for n in there if isinstance(n, ast.Import) for a in n.names}
    for node in there:
        if isinstance(node, ast.ImportFrom) and node.module:
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in names else node.module for name in deeper}
    return found & names


def is_for_types(node: ast.If) -> bool:
    return ast.unparse(node.test) == "TYPE_CHECKING"


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {
        ".".join(f.relative_to(ROOT).with_suffix("").parts): f
        for f in FILES
        if f.name != "__init__.py"  # they hand names on
    }
    ties = {name: named_in(path, set(modules)) for name, path in modules.items()}
    while leaves := {name for name, used in ties.items() if not used & ties.keys()}:
        ties = {name: used for name, used in ties.items() if name not in leaves}
    assert sorted(ties) == [], "these, or what they import, go round in a circle"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_have_at_most_600_lines() -> None:
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in FILES}
    assert {name: n for name, n in lengths.items() if n > 600} == {}


def test_functions_have_at_most_45_lines() -> None:
    long = {f"{f.name}:{name}": n for f in FILES for name, n in functions(f) if n > 45}
    assert long == {}


# ---- what an import brings along ----------------------------------------------------------------


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_alone_imports_neither_torch_nor_lightning() -> None:
    heavy = "{'torch', 'pytorch_lightning', 'hydra', 'numpy'} & set(sys.modules)"
    assert python(f"import sys, hybridtrain; print({heavy})") == "set()"


def test_policies_run_without_torch() -> None:
    code = "import sys, hybridtrain.engine.policies; print('torch' in sys.modules)"
    assert python(code) == "False"


NAMES = """
from pytorch_lightning.strategies import StrategyRegistry
print(*sorted({'hybrid', 'async'} & set(StrategyRegistry.available_strategies())))
"""


@pytest.mark.slow
def test_strategies_are_registered_where_lightning_was_imported_first() -> None:
    assert python("import pytorch_lightning, hybridtrain" + NAMES) == "async hybrid"


@pytest.mark.slow
def test_strategies_registered_by_a_later_import_of_lightning_import_nothing_else() -> None:
    """Somebody asks first whether Lightning could be imported, as many libraries do."""
    code = """
import sys, hybridtrain, importlib.util
importlib.util.find_spec('pytorch_lightning')
from hybridtrain import registration
register, before = registration._register, set()
def noted(package):
    before.update(sys.modules)
    register(package)
registration._register = noted
import pytorch_lightning
def fresh():
    return {name.partition(".")[0] for name in set(sys.modules) - before} - {"hybridtrain"}
import hybridtrain.lightning.strategy
print("hybridtrain.lightning" in before, sorted(fresh() - sys.stdlib_module_names))
import hybridtrain.cli.entry, hybridtrain.cli.run
print(sorted(fresh() & {"matplotlib", "tensorboard", "scipy", "sklearn", "soundfile", "jiwer"}))
"""
    assert python(code + NAMES).splitlines() == ["False []", "[]", "async hybrid"]


def test_no_modules_import_one_another_not_even_for_types() -> None:
    names = {name_of(path): path for path in FILES}
    ahead = {name: imported_by(path) & names.keys() - {name} for name, path in names.items()}
    while free := {name for name, imported in ahead.items() if not imported & ahead.keys()}:
        for name in free:
            del ahead[name]
    assert not ahead, f"in or behind a circle: {sorted(ahead)}"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_each_class_name_is_used_once() -> None:
    """A reader who has found one class of a name has found the only one."""
    where: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
