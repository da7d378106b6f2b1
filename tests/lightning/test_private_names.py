"""Private names of Lightning that this package uses: a new version shows what it breaks.

Each name is looked up in the source of the module that defines it. A name that is used and not
listed here fails, too: use a public one, or list it. All are used in one folder, which gives them
plain names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.source_trees import nodes as nodes_of

PACKAGE = Path(__file__).parents[2] / "hybridtrain"
HOOKS = PACKAGE / "lightning" / "hooks"
TRAINER = "pytorch_lightning.trainer"

DEFINED_IN = {
    "_active_loop": f"{TRAINER}.trainer",
    "_attach_model_callbacks": f"{TRAINER}.connectors.callback_connector",
    "_attr_name": "pytorch_lightning.callbacks.lr_finder",
    "_average_model": "pytorch_lightning.callbacks.weight_averaging",
    "_batches_that_stepped": "pytorch_lightning.loops.training_epoch_loop",
    "_call_lightning_module_hook": f"{TRAINER}.call",
    "_call_teardown_hook": f"{TRAINER}.call",
    "_callback_connector": f"{TRAINER}.trainer",
    "_callback_metrics": f"{TRAINER}.connectors.logger_connector.logger_connector",
    "_can_stop_early": "pytorch_lightning.loops.fit_loop",
    "_checkpoint_connector": f"{TRAINER}.trainer",
    "_checkpoint_io": "pytorch_lightning.strategies.strategy",
    "_combined_loader": "pytorch_lightning.loops.fit_loop",
    "_combined_loader_states_to_load": "pytorch_lightning.loops.fit_loop",
    "_compiler_ctx": "pytorch_lightning.core.module",
    "_computed": "torchmetrics.metric",
    "_copy_state_dict": "torchmetrics.metric",
    "_data_connector": f"{TRAINER}.trainer",
    "_data_fetcher": "pytorch_lightning.loops.fit_loop",
    "_data_source": "pytorch_lightning.loops.fit_loop",
    "_end_time": "pytorch_lightning.callbacks.timer",
    "_every_n_train_steps": "pytorch_lightning.callbacks.model_checkpoint",
    "_forward_cache": "torchmetrics.metric",
    "_generate_state_key": "pytorch_lightning.callbacks.callback",
    "_is_training_done": "pytorch_lightning.loops.training_epoch_loop",
    "_last_train_dl_reload_epoch": "pytorch_lightning.loops.fit_loop",
    "_last_val_dl_reload_epoch": "pytorch_lightning.loops.evaluation_loop",
    "_last_val_time": "pytorch_lightning.loops.fit_loop",
    "_layer_sync": "pytorch_lightning.strategies.parallel",
    "_lightning_module": "pytorch_lightning.strategies.strategy",
    "_logger_connector": f"{TRAINER}.trainer",
    "_max_batches": "pytorch_lightning.loops.evaluation_loop",
    "_num_ready_batches_reached": "pytorch_lightning.loops.training_epoch_loop",
    "_optimizer_step": "pytorch_lightning.loops.optimization.automatic",
    "_predictions": "pytorch_lightning.loops.prediction_loop",
    "_reductions": "torchmetrics.metric",
    "_requires_distributed_sampler": f"{TRAINER}.connectors.data_connector",
    "_restart_stage": "pytorch_lightning.loops.training_epoch_loop",
    "_restarting": "pytorch_lightning.loops.loop",
    "_save_checkpoint": "pytorch_lightning.callbacks.model_checkpoint",
    "_should_accumulate": "pytorch_lightning.loops.training_epoch_loop",
    "_should_check_val_epoch": "pytorch_lightning.loops.training_epoch_loop",
    "_should_check_val_fx": "pytorch_lightning.loops.training_epoch_loop",
    "_signal_connector": f"{TRAINER}.trainer",
    "_slurm_sigusr_handler_fn": f"{TRAINER}.connectors.signal_connector",
    "_start_method": "pytorch_lightning.strategies.ddp",
    "_swap_models": "pytorch_lightning.callbacks.weight_averaging",
    "_teardown": f"{TRAINER}.trainer",
    "_update_attr": "pytorch_lightning.callbacks.lr_finder",
    "_update_count": "torchmetrics.metric",
}
# Set from outside, by a function of Lightning's.
DEFINED_IN |= {
    "_start_time": "pytorch_lightning.callbacks.timer",
    "_val_check_time_interval": f"{TRAINER}.setup",
}
# Given as strings, or names that this package has given to something else, too.
_RESULT = f"{TRAINER}.connectors.logger_connector.result"
MORE = {
    "_automatic_optimization": "pytorch_lightning.core.module",
    "_batch_sampler": "pytorch_lightning.overrides.distributed",
    "_cache": "torchmetrics.metric",
    "_current_fx_name": "pytorch_lightning.core.module",
    "_defer_save_until_validation": "pytorch_lightning.callbacks.model_checkpoint",
    "_evaluation_step": "pytorch_lightning.loops.evaluation_loop",
    "_experiment": "lightning_fabric.loggers.csv_logs",
    "_find_last_checkpoints": "pytorch_lightning.callbacks.model_checkpoint",
    "_interrupt": f"{TRAINER}.call",
    "_is_synced": "torchmetrics.metric",
    "_last_checkpoint_saved": "pytorch_lightning.callbacks.model_checkpoint",
    "_last_global_step_saved": "pytorch_lightning.callbacks.model_checkpoint",
    "_link_checkpoint": "pytorch_lightning.callbacks.model_checkpoint",
    "_log_model": "pytorch_lightning.loggers.wandb",
    "_logged_metrics": f"{TRAINER}.connectors.logger_connector.logger_connector",
    "_monitor_candidates": "pytorch_lightning.callbacks.model_checkpoint",
    "_on_before_fetch": "pytorch_lightning.loops.training_epoch_loop",
    "_on_evaluation_end": "pytorch_lightning.loops.evaluation_loop",
    "_op": _RESULT,
    "_optimizer": "pytorch_lightning.core.optimizer",
    "_predict_step": "pytorch_lightning.loops.prediction_loop",
    "_prepare_dataloader": f"{TRAINER}.connectors.data_connector",
    "_progress_bar_metrics": f"{TRAINER}.connectors.logger_connector.logger_connector",
    "_results": "pytorch_lightning.loops.training_epoch_loop",
    "_should": _RESULT,
    "_store_dataloader_outputs": "pytorch_lightning.loops.evaluation_loop",
    "_sync": _RESULT,
}
# Of torch, Hydra, Optuna and Python.
OTHERS = {
    "_BatchNorm", "_asdict", "_clear", "_config", "_exit",
    "_foreach_add_", "_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_copy_",
    "_foreach_mul_", "_foreach_norm", "_foreach_sub",
    "_forkserver", "_forkserver_address", "_fused_adam_", "_fused_adamw_",
    "_fused_sgd_", "_get_node", "_getframe", "_is_in_bad_fork", "_is_owned", "_jsc", "_kwargs",
    "_mode", "_nnz", "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "_popen",
    "_post_accumulate_grad_hooks", "_python_exit", "_registered_with_atexit", "_registry",
    "_resource_sharer", "_return_value", "_run_exitfuncs", "_stop", "_threads_wakeups", "_trial_id",
    "_values", "_worker_loop",
}  # fmt: skip
# Imported from modules of Lightning's by their private names.
IMPORTED = {
    "pytorch_lightning.core.optimizer._init_optimizers_and_lr_schedulers",
    "pytorch_lightning.overrides.distributed._IndexBatchSamplerWrapper",
    "pytorch_lightning.strategies.launchers._MultiProcessingLauncher",
    "pytorch_lightning.strategies.launchers._SubprocessScriptLauncher",
    "pytorch_lightning.strategies.launchers.launcher._Launcher",
    "pytorch_lightning.strategies.launchers.multiprocessing._GlobalStateSnapshot",
    f"{TRAINER}.connectors.checkpoint_connector._CheckpointConnector",
    f"{TRAINER}.connectors.data_connector._parse_num_batches",
    f"{TRAINER}.connectors.logger_connector.result._Metadata",
    f"{TRAINER}.connectors.logger_connector.result._ResultMetric",
    f"{TRAINER}.connectors.logger_connector.result._Sync",
    "pytorch_lightning.tuner.lr_finder._determine_lr_attr_name",
    "pytorch_lightning.utilities.exceptions._TunerExitException",
}


def own_names(nodes: list[ast.AST]) -> set[str]:
    """What this package defines or assigns itself."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.wide
def test_every_private_name_of_others_is_listed() -> None:
    nodes = [node for path in FILES for node in nodes_of(path)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private - own_names(nodes) == DEFINED_IN.keys() | OTHERS


def test_every_import_of_a_private_name_of_lightnings_is_listed() -> None:
    found = {
        f"{node.module}.{alias.name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and "lightning" in (node.module or "").split(".")[0]
        for alias in node.names
        if alias.name.startswith("_")
    }
    assert found == IMPORTED


@pytest.mark.parametrize("name", sorted(DEFINED_IN | MORE))
def test_the_installed_lightning_has_every_listed_private_name(name: str) -> None:
    source = inspect.getsource(importlib.import_module((DEFINED_IN | MORE)[name]))
    pattern = rf"def {name}\b|(self|trainer)\.{name}\s*[:=]|^    {name}\s*[:=]"
    assert re.search(pattern, source, re.MULTILINE), (
        f"{(DEFINED_IN | MORE)[name]} has no {name} any more"
    )


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_every_listed_import_exists_in_the_installed_lightning(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


# ---- in one folder ------------------------------------------------------------------------------

# Private names that others have, too, or that are no use of what they name.
NOT_LIGHTNINGS = {
    ("lightning/fault_injection/in_worker.py", "_step"): "of our rounds",
    ("engine/step/in_place.py", "_step"): "of our in-place step",
    ("engine/worker/makers/last_worker.py", "_step"): "of that class",
    ("engine/worker/makers/one_by_one.py", "_step"): "of that class",
    ("lightning/preflight/machine_checks.py", "_fabric"): "a list of attributes that are no parts",
    ("lightning/preflight/machine_checks.py", "_modules"): "of torch",
    ("lightning/preflight/machine_checks.py", "_trainer"): "a list of attributes that are no parts",
    ("report/runs.py", "_step"): "the end of a metric's name",
    ("util/pickle_calls.py", "_get"): "of that class",
    ("util/reachable.py", "_modules"): "of torch",
    ("lightning/step/foreign_steps.py", "_version"): "of torch",
    ("lightning/step/session.py", "_version"): "of torch",
    ("engine/step/remote_state.py", "_version"): "of torch",
    ("tasks/speech/datamodule.py", "_cache"): "of that class",
    ("engine/worker/device/cuda.py", "_is_in_bad_fork"): "of torch",
    ("engine/worker/replica_cuda.py", "_version"): "of torch",
}
# A subclass calls or overrides these methods: that cannot be done from elsewhere.
INHERITED = {
    ("cli/lightning_ddp.py", "_call_children_scripts"),
    ("cli/lightning_ddp.py", "_collect_rank_zero_results"),
    ("cli/lightning_ddp.py", "_configure_launcher"),
    ("cli/lightning_ddp.py", "_launcher"),
    ("cli/lightning_ddp.py", "_start_method"),
    ("cli/lightning_ddp.py", "_wrapping_function"),
    ("lightning/checkpointing/periodic.py", "_generate_state_key"),
    ("lightning/states/logger_state.py", "_check_log_dir_exists"),
    ("lightning/strategy.py", "_configure_launcher"),
    ("lightning/strategy.py", "_launcher"),
}
_DEFINED = re.compile(
    r"\bdef (_[a-z]\w*)"
    r"|\b(?:self|cls|trainer)\.(_[a-z]\w*)\s*(?::[^=\n]+)?=[^=]"
    r"|^    (_[a-z]\w*)\s*(?::[^=\n]+)?=",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def vocabulary() -> set[str]:
    """All that Lightning and torchmetrics define under private names."""
    names = ("pytorch_lightning", "lightning_fabric")
    folders = [Path(str(find_spec(name).origin)).parent for name in names]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    files += [Path(str(find_spec("torchmetrics").origin)).parent / "metric.py"]
    found = {name for f in files for names in _DEFINED.findall(f.read_text()) for name in names}
    assert found >= DEFINED_IN.keys() - {"_mode"}
    return found - {""}


def touched(path: Path) -> set[str]:
    """Names of other objects' attributes, also those that are given as strings."""
    found = set()
    for node in nodes_of(path):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                found.add(name)
    return found


def inherited(path: Path) -> set[str]:
    """Names that classes of Lightning's have given to those in a file, and that these use."""
    found = set()
    for node in nodes_of(path):
        if not isinstance(node, ast.ClassDef) or not node.bases:
            continue
        module = importlib.import_module(
            ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        )
        bases = getattr(module, node.name, object).__mro__
        theirs = [base for base in bases if base.__module__.partition(".")[0] in LIGHTNINGS]
        sources = "".join(map(inspect.getsource, theirs))
        for each in ast.walk(node):
            match each:
                case (
                    ast.FunctionDef(name=name)
                    | ast.Attribute(
                        value=ast.Name(id="self") | ast.Call(func=ast.Name(id="super")), attr=name
                    )
                ) if name[0] == "_" != name[1] and re.search(rf"\b{name}\b", sources):
                    found.add(name)
    return found


LIGHTNINGS = ("pytorch_lightning", "lightning_fabric", "torchmetrics")
OUTSIDE = [path for path in FILES if HOOKS not in path.parents]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_one_folder_alone_touches_private_names_of_lightnings(vocabulary: set[str]) -> None:
    found = {(name_of(path), name) for path in OUTSIDE for name in touched(path) & vocabulary}
    assert found == NOT_LIGHTNINGS.keys()


def test_all_that_the_folder_touches_is_listed(vocabulary: set[str]) -> None:
    found = {name for path in FILES if HOOKS in path.parents for name in touched(path)}
    assert (found & vocabulary) - DEFINED_IN.keys() - OTHERS == MORE.keys()


def test_one_folder_alone_imports_private_names_of_lightnings() -> None:
    found = {
        (name_of(path), alias.name)
        for path in OUTSIDE
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIGHTNINGS)
        for alias in node.names
        if alias.name.startswith("_")
    }
    assert found == set()


def test_what_is_inherited_is_listed() -> None:
    names = ("lightning", "cli")
    paths = [path for path in OUTSIDE if path.relative_to(PACKAGE).parts[0] in names]
    assert {(name_of(path), name) for path in paths for name in inherited(path)} == INHERITED
