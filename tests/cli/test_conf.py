"""The configuration: complete, documented where it stands, and true of the code it names."""

from __future__ import annotations

import inspect
import pkgutil
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hydra import initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli.config_values import parse, resuming
from hybridtrain.cli.explain import base_config
from hybridtrain.cli.hydra_config import (
    VERSION_BASE,
    complete_overrides,
    compose_config,
    conf_dir,
    groups,
)
from hybridtrain.cli.validation.config_checks import (
    RunOptions,
    TaskOptions,
    TrainerOptions,
    check_config,
)
from hybridtrain.cli.validation.target_checks import check_targets
from hybridtrain.engine.exchanges import exchange_of, make_exchange
from hybridtrain.engine.options.schemes import SCHEMES, parts_of
from hybridtrain.engine.policies import POLICIES, STRATEGIES, make_policy
from hybridtrain.engine.updates.named import update_of
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import check, hints
from hybridtrain.util.own_parts import identity
from tests.cli import option_tables
from tests.cli.reference_tables import COMMANDS, command_options, conf_file

CHOICES = [(group, name) for group, names in groups().items() for name in names if name != "own"]
FILES = sorted(x for x in conf_dir().rglob("*.yaml"))


def test_every_group_of_the_issue_exists() -> None:
    wanted = "task model data strategy optimizer trainer callbacks logger experiment"
    assert set(groups()) == set(wanted.split())


@pytest.mark.few(25)
@pytest.mark.parametrize(("group", "name"), CHOICES, ids=[f"{x}={y}" for x, y in CHOICES])
def test_every_choice_composes_and_names_classes_that_take_its_options(
    group: str, name: str
) -> None:
    cfg = compose_config([f"{group}={name}", "++run_dir=somewhere"])
    parts = ("model", "data", "optimizer", "strategy", "callbacks", "logger")
    for key in (group,) if group in parts else parts:
        try:
            check_targets(OmegaConf.masked_copy(cfg, [key]))
        except ModuleNotFoundError as error:
            pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("path", FILES, ids=[str(x.relative_to(conf_dir())) for x in FILES])
def test_every_file_says_what_it_is_for(path: Path) -> None:
    lines = [x for x in path.read_text().splitlines() if not x.startswith("# @package")]
    assert lines[0].startswith("# ")
    assert len(lines[0]) > 15


@pytest.mark.parametrize("page", option_tables.PAGES, ids=lambda page: page.stem)
def test_the_tables_of_options_are_those_of_the_description(page: Path) -> None:
    text = page.read_text()
    assert option_tables.renewed(text) == text, "run python -m tests.cli.option_tables"


def test_a_directory_that_is_shown_for_copying_is_read_back() -> None:
    draw = random.Random(3)
    names = [
        "run1",
        "größe",
        "a,b",
        "runs/x(1)",
        "it's",
        "x{y}",
        "1.10",
        "1e3",
        "1_0",
        "null",
        "a\\b",
    ]
    names += ["".join(draw.choices("ae1.-_/\\'\"(){}[],:= é$", k=8)).strip() for _ in range(300)]
    for name in filter(None, names):
        (text,) = shlex.split(resuming(name))
        (read,) = parse([text])
        assert (read.value(), read.is_sweep_override()) == (name, False), text
    assert resuming("multirun/2026-11-28/1") == "resume=multirun/2026-11-28/1"


def test_names_of_lightnings_checkpoints_are_swept_over() -> None:
    files = ["r1/epoch=3-step=96.ckpt", "r2/epoch=5-step=144.ckpt"]
    (read,) = parse(complete_overrides([f"ckpt={','.join(files)}"]))
    assert read.is_sweep_override()
    assert [x.strip("'") for x in read.sweep_string_iterator()] == files
    (read,) = parse(complete_overrides(["ckpt=a,b/epoch=3.ckpt"]))
    assert read.value() == "a,b/epoch=3.ckpt"


def test_every_table_of_options_is_on_one_page() -> None:
    text = "".join(page.read_text() for page in option_tables.PAGES)
    found = re.findall(r"^<!-- options of (\w+) -->$", text, re.MULTILINE)
    assert sorted(found) == sorted(option_tables.tables())


def explained(tables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Key and meaning in each row; of a parameter of a part, part and parameter."""
    for line in "\n".join(tables.values()).splitlines():
        if line.startswith("| `"):
            cells = [cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            yield ".".join(cells[:2] if len(cells) == 5 else cells[:1]), cells[-1]


# A file that sets these says nothing of them: their tables are those of the parts, of commands.
ELSEWHERE = (
    *("strategy.data_shards", "strategy.exchange.", "strategy.update."),
    *("simulate.", "hydra.sweeper.params."),
)


def unexplained(tables: Mapping[str, str]) -> set[str]:
    found = list(explained(tables))
    said = {key for key, meaning in found if meaning}
    return {key for key, _ in found if key not in said and not key.startswith(ELSEWHERE)}


def test_every_key_that_is_shipped_has_a_meaning() -> None:
    tables = option_tables.tables()
    assert unexplained(tables) == set() and len(dict(explained(tables))) > 350
    assert unexplained({"model": "| `model.width` | `3` | a number |  |"}) == {"model.width"}
    assert unexplained({"policy": "| `ssp` | `lead` | `3` | a number |  |"}) == {"ssp.lead"}


@pytest.mark.parametrize("path", FILES, ids=[str(x.relative_to(conf_dir())) for x in FILES])
def test_every_key_of_a_file_is_in_a_table(path: Path) -> None:
    group, file = path.relative_to(conf_dir()).parts[0], conf_file(path)
    keys = {key for key in file.keys if not re.search(r"(^|\.)_|defaults", key)}
    keys = {key for key in keys if file.keys[key].value or "." not in key}
    if group == "strategy":  # of a part its own parameters; what is below them, they describe
        keys = {".".join(key.split(".")[:2]) for key in keys if not key.startswith("update.")}
        keys = {key.rpartition(".")[2] for key in keys} - {"name"}
    if group == "hydra":  # of Python's logging
        return
    text = "".join(option_tables.tables().values())
    forms = [f"{group}.", ""]
    parents = {key.partition(".")[0] for key in file.keys if "." in key}
    keys -= parents if group != "strategy" else set()
    assert {key for key in keys if not any(f"| `{form}{key}` |" in text for form in forms)} == set()


@pytest.mark.parametrize("module", COMMANDS)
def test_every_option_of_a_command_is_explained(module: str) -> None:
    given = " ".join(command_options(module)).split()
    assert {each.partition("=")[0] for each in given} - {"slower.W"} == set(COMMANDS[module]) - {
        "slower"
    }


@pytest.mark.parametrize(
    ("described", "group"), [(RunOptions, ""), (TaskOptions, "task"), (TrainerOptions, "trainer")]
)
def test_every_key_is_described_and_every_default_is_allowed(described: type, group: str) -> None:
    cfg = compose_config(["++run_dir=somewhere"])
    node: Any = OmegaConf.to_container(cfg[group] if group else cfg, resolve=True)
    assert set(hints(described)) == set(node) - {"_target_"}
    for name, kind in hints(described).items():
        check(name, node[name], kind, plain=True)


def test_types_of_our_own_targets_can_be_read() -> None:
    """What a class declares is held only where its names can be looked up."""
    files = [path for path in FILES if path.parent.name in ("model", "data", "callbacks")]
    names = re.findall(r"_target_: (hybridtrain[.\w]+)", "".join(map(Path.read_text, files)))
    assert len(names) > 15
    assert [name for name in names if not hints(pkgutil.resolve_name(name))] == []


def test_the_trainers_keys_are_lightnings_with_lightnings_defaults() -> None:
    ours = dict(compose_config(["++run_dir=somewhere"]).trainer)
    lightning = inspect.signature(pl.Trainer).parameters
    assert set(ours) - {"_target_"} == set(lightning) - {"strategy", "logger", "callbacks"}
    changed = {k for k, v in ours.items() if k in lightning and v != lightning[k].default}
    assert changed <= {
        *("default_root_dir", "num_sanity_val_steps", "log_every_n_steps", "max_epochs"),
        *("enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
        "gradient_clip_val",  # of the task
    }


def test_every_policy_has_a_row_and_every_row_a_policy() -> None:
    assert set(POLICIES) == set(groups()["strategy"]) - {"ddp", *SCHEMES}
    for name in POLICIES:
        given = compose_config([f"strategy={name}", "++run_dir=somewhere"]).strategy.policy
        options = {} if isinstance(given, str) else plain(given)
        assert options.pop("name", given) == name
        taken = inspect.signature(POLICIES[name]).parameters
        assert options == {key: parameter.default for key, parameter in taken.items()}


def test_every_row_is_a_name_for_lightnings_trainer() -> None:
    assert {*STRATEGIES, "ddp"} == set(groups()["strategy"])
    assert pl.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False).world_size == 2
    for name in STRATEGIES:
        parts = parts_of(name)
        trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
        assert type(trainer.strategy.policy) is type(make_policy(parts["policy"]))
        expected = exchange_of(make_policy(parts["policy"]), parts.get("exchange"))
        assert trainer.strategy.exchange == expected


def test_what_is_kept_of_a_configuration_is_that_of_its_search_path(tmp_path: Path) -> None:
    here = base_config([])
    assert base_config([]) is here and "optimizer" in here
    (tmp_path / "config.yaml").write_text("other: 1\n")
    with initialize_config_dir(str(tmp_path), version_base=VERSION_BASE):
        assert base_config([]) == {"other": 1}
    assert base_config([]) is here


def plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if isinstance(value, DictConfig) else value


def test_every_strategy_is_the_same_from_the_command_line_and_by_its_name() -> None:
    for name in STRATEGIES:
        parts = parts_of(name)
        row = compose_config([f"strategy={name}", "++run_dir=somewhere"]).strategy
        policy = make_policy(plain(row.policy))
        assert identity(policy) == identity(make_policy(parts["policy"]))
        exchange = exchange_of(policy, parts.get("exchange"))
        assert exchange_of(policy, plain(row.exchange)) == exchange
        assert (row.correction is None) == (name != "softsync")  # docs/strategies.md says why
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        updates = plain(row["update"]), parts.get("update")
        one, other = (update_of(exchange, each).over(optimizer) for each in updates)
        assert type(one) is type(other) and one.defaults == other.defaults


@pytest.mark.parametrize(
    "given",
    [
        "strategy.exchange.every=[8,16]",
        "strategy.exchange.every={longest:16,seconds_per_step:[0.6,1.5]}",
        "strategy.exchange.every=4",
        "strategy.exchange.compress=int4",
    ],
)
@pytest.mark.parametrize("name", ["local_sgd", "diloco", "async_diloco"])
def test_how_often_and_how_it_is_encoded_may_be_said_in_every_form(name: str, given: str) -> None:
    overrides = [f"strategy={name}", given, "++run_dir=somewhere"]
    cfg = compose_config(overrides)
    check_config(cfg, overrides)
    make_exchange(plain(cfg.strategy.exchange))


@pytest.mark.parametrize(
    "given", ["strategy=backup strategy.policy.k=4", "faults=[{worker:3,step:1,kind:kill}]"]
)
def test_workers_of_all_hosts_count(given: str) -> None:
    overrides = ["trainer.devices=2", *given.split(), "++run_dir=somewhere"]
    with pytest.raises(UserError):
        check_config(compose_config(overrides), overrides)
    overrides.append("trainer.num_nodes=2")
    check_config(compose_config(overrides), overrides)


@pytest.mark.parametrize("name", groups()["optimizer"])
def test_every_optimizer_has_torchs_own_defaults_besides_what_it_is_named_for(name: str) -> None:
    cfg = compose_config([f"optimizer={name}", "task=parabola", "++run_dir=somewhere"])
    made = instantiate(cfg.optimizer, _convert_="all")([torch.zeros(1, requires_grad=True)])
    plain = type(made)([torch.zeros(1, requires_grad=True)])
    changed = {k for k in cfg.optimizer if k in plain.defaults}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in made.defaults.items()}
    changed = {k for k in changed if given[k] != plain.defaults[k]}
    assert changed <= {"lr", "momentum", "nesterov"}


def test_a_users_class_brings_no_foreign_options_along() -> None:
    given = ["model._target_=my.Module", "model.width=3", "trainer.devices=2"]
    cfg = compose_config([*complete_overrides(given), "++run_dir=somewhere"])
    assert dict(cfg.model) == {"_target_": "my.Module", "width": 3}
    assert cfg.data == {"_target_": None}
    assert cfg.task.name == "own"


def test_a_users_class_leaves_a_task_and_data_that_were_named_alone() -> None:
    given = ["task=digits", "model._target_=my.Module", "data.batch_size=5"]
    cfg = compose_config([*complete_overrides(given), "++run_dir=somewhere"])
    assert dict(cfg.model) == {"_target_": "my.Module"}
    assert cfg.data.batch_size == 5
    assert cfg.task.name == "digits"


def test_completing_overrides_twice_changes_nothing() -> None:
    once = complete_overrides(["model._target_=my.Module", "model.width=3"])
    assert complete_overrides(once) == once


def test_the_command_line_beats_the_task_and_the_experiment() -> None:
    cfg = compose_config(
        ["experiment=quick", "model=paper", "optimizer=sgd", "trainer.max_epochs=1"]
    )
    assert cfg.model.net.kind == "paper"
    assert cfg.optimizer._target_ == "torch.optim.SGD"
    assert cfg.trainer.max_epochs == 1


def test_an_import_brings_next_to_nothing_along() -> None:
    """Tab completion imports it, too: not even the policies, which take as long as all else."""
    code = (
        "import sys; import hybridtrain; "
        "print(*sorted(x for x in sys.modules if x.startswith('hybridtrain.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.partition(".")[2] for name in done.stdout.split()}
    assert found == {
        *("errors", "lightning_package", "registration"),
    }


def test_help_is_readable_and_needs_no_torch() -> None:
    code = (
        "import sys; from hybridtrain.cli.entry import main; code = main(['--help']); "
        "assert 'torch' not in sys.modules and 'pytorch_lightning' not in sys.modules; "
        "sys.exit(code)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("speech|digits|parabola", "hybrid|async|ddp", "trainer.devices=N", "Examples"):
        assert words in done.stdout
    assert "strategy: async, async_diloco, backup, ddp, diloco, downpour" in done.stdout
    lists = ("strategy: ", "data: ")
    own = [line for line in done.stdout.splitlines() if not line.startswith(lists)]
    assert max(map(len, own)) <= 120  # the list of a group is Hydra's


def test_a_mistyped_option_is_refused_without_importing_torch() -> None:
    code = (
        "import sys; from hybridtrain.cli.entry import main; code = main(['strategy=hybird']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 2, done.stderr


def test_completion_offers_groups_and_their_choices() -> None:
    line = [sys.executable, "-m", "hybridtrain", "-sc", "query=bash"]
    environment = {
        "COMP_LINE": "hybridtrain strategy=",
        "COMP_POINT": "21",
        "PATH": "/usr/bin:/bin",
    }
    root = Path(__file__).parents[2]
    done = subprocess.run(line, capture_output=True, text=True, cwd=root, env=environment)
    assert done.stdout.split() == [f"strategy={name}" for name in sorted(groups()["strategy"])]
    assert {"strategy=async", "strategy=backup", "strategy=ddp"} < set(done.stdout.split())
