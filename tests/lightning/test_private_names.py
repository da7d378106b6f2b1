"""Private names of Lightning that this package uses: a new version shows what it breaks.

Each name is looked up in the source of the module that defines it. A name that is used and not
listed here fails, too: use a public one, or list it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hybridtrain"
TRAINER = "pytorch_lightning.trainer"

DEFINED_IN = {
    "_attach_model_callbacks": f"{TRAINER}.connectors.callback_connector",
    "_attr_name": "pytorch_lightning.callbacks.lr_finder",
    "_batches_that_stepped": "pytorch_lightning.loops.training_epoch_loop",
    "_call_lightning_module_hook": f"{TRAINER}.call",
    "_call_teardown_hook": f"{TRAINER}.call",
    "_callback_connector": f"{TRAINER}.trainer",
    "_callback_metrics": f"{TRAINER}.connectors.logger_connector.logger_connector",
    "_can_stop_early": "pytorch_lightning.loops.fit_loop",
    "_checkpoint_connector": f"{TRAINER}.trainer",
    "_checkpoint_io": "pytorch_lightning.strategies.strategy",
    "_combined_loader": "pytorch_lightning.loops.fit_loop",
    "_compiler_ctx": "pytorch_lightning.core.module",
    "_computed": "torchmetrics.metric",
    "_copy_state_dict": "torchmetrics.metric",
    "_data_connector": f"{TRAINER}.trainer",
    "_data_fetcher": "pytorch_lightning.loops.fit_loop",
    "_every_n_train_steps": "pytorch_lightning.callbacks.model_checkpoint",
    "_find_last_checkpoints": "pytorch_lightning.callbacks.model_checkpoint",
    "_experiment": "lightning_fabric.loggers.csv_logs",
    "_generate_state_key": "pytorch_lightning.callbacks.callback",
    "_is_training_done": "pytorch_lightning.loops.training_epoch_loop",
    "_layer_sync": "pytorch_lightning.strategies.parallel",
    "_lightning_module": "pytorch_lightning.strategies.strategy",
    "_link_checkpoint": "pytorch_lightning.callbacks.model_checkpoint",
    "_logger_connector": f"{TRAINER}.trainer",
    "_num_ready_batches_reached": "pytorch_lightning.loops.training_epoch_loop",
    "_optimizer_step": "pytorch_lightning.loops.optimization.automatic",
    "_predictions": "pytorch_lightning.loops.prediction_loop",
    "_prepare_dataloader": f"{TRAINER}.connectors.data_connector",
    "_requires_distributed_sampler": f"{TRAINER}.connectors.data_connector",
    "_resolve_sampler": f"{TRAINER}.connectors.data_connector",
    "_restart_stage": "pytorch_lightning.loops.training_epoch_loop",
    "_restarting": "pytorch_lightning.loops.loop",
    "_save_checkpoint": "pytorch_lightning.callbacks.model_checkpoint",
    "_should_accumulate": "pytorch_lightning.loops.training_epoch_loop",
    "_should_check_val_epoch": "pytorch_lightning.loops.training_epoch_loop",
    "_should_check_val_fx": "pytorch_lightning.loops.training_epoch_loop",
    "_signal_connector": f"{TRAINER}.trainer",
    "_slurm_sigusr_handler_fn": f"{TRAINER}.connectors.signal_connector",
    "_start_method": "pytorch_lightning.strategies.ddp",
    "_teardown": f"{TRAINER}.trainer",
    "_update_attr": "pytorch_lightning.callbacks.lr_finder",
    "_update_count": "torchmetrics.metric",
}
# Set from outside, by a function of Lightning's.
DEFINED_IN |= {
    "_val_check_time_interval": f"{TRAINER}.setup",
}
# Of torch, Hydra and Python.
OTHERS = {
    "_asdict", "_batch_sampler", "_clear", "_exit",
    "_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_copy_", "_foreach_mul_",
    "_foreach_norm", "_foreach_sub",
    "_forkserver", "_forkserver_address", "_fused_adam_", "_fused_adamw_",
    "_fused_sgd_", "_get_node", "_getframe", "_is_in_bad_fork", "_kwargs", "_mode", "_nnz",
    "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "_post_accumulate_grad_hooks",
    "_resource_sharer", "_return_value", "_run_exitfuncs", "_stop", "_values",
    "_worker_loop",
}  # fmt: skip
# Imported from modules of Lightning's by their private names.
IMPORTED = {
    "lightning_fabric.utilities.data._reinstantiate_wrapped_cls",
    "pytorch_lightning.core.optimizer._init_optimizers_and_lr_schedulers",
    "pytorch_lightning.loops.evaluation_loop._EvaluationLoop",
    "pytorch_lightning.loops.fit_loop._FitLoop",
    "pytorch_lightning.loops.prediction_loop._PredictionLoop",
    "pytorch_lightning.loops.progress._BaseProgress",
    "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop",
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
    "pytorch_lightning.utilities.data._dataloader_init_kwargs_resolve_sampler",
    "pytorch_lightning.utilities.data._get_dataloader_init_args_and_kwargs",
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


@pytest.fixture(scope="module")
def nodes() -> list[ast.AST]:
    trees = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    return [node for tree in trees for node in ast.walk(tree)]


def test_every_private_name_of_others_is_listed(nodes: list[ast.AST]) -> None:
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private - own_names(nodes) == DEFINED_IN.keys() | OTHERS


def test_every_import_of_a_private_name_of_lightnings_is_listed(nodes: list[ast.AST]) -> None:
    found = {
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and "lightning" in (node.module or "").split(".")[0]
        for alias in node.names
        if alias.name.startswith("_")
    }
    assert found == IMPORTED


@pytest.mark.parametrize("name", sorted(DEFINED_IN))
def test_the_installed_lightning_has_it(name: str) -> None:
    source = inspect.getsource(importlib.import_module(DEFINED_IN[name]))
    pattern = rf"def {name}\b|(self|trainer)\.{name}\s*[:=]|^    {name}\s*[:=]"
    assert re.search(pattern, source, re.MULTILINE), f"{DEFINED_IN[name]} has no {name} any more"


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_the_installed_lightning_can_import_it(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)
