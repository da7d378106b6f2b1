"""Compare the hosts of a run before it trains: versions, sources, options, configuration."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from hybridtrain.engine.memory.store import checksum
from hybridtrain.engine.options.strategy_arguments import LightningArguments
from hybridtrain.engine.step.shared_buffers import kept, lies_apart, put
from hybridtrain.errors import UserError
from hybridtrain.lightning_package import decide
from hybridtrain.util.option_types import hints

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

    from hybridtrain.engine.samplers import EpochPlan
    from hybridtrain.engine.worker.client import Client
    from hybridtrain.lightning.run_setup import RunSetup
    from hybridtrain.lightning.worker_context import WorkerContext

# A host may have its own: where files lie, how its processes are started. Where training goes on
# from, host 0 says.
_OWN = {"record", "hosts_key", "start_method", "threads_per_worker", *hints(LightningArguments)}
_OWN_KEYS = {"run_dir", "logger", "ckpt", "resume", *(f"strategy.{name}" for name in _OWN)}
# Arguments of the trainer that change what is trained or how often workers meet.
_OF_TRAINER = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "precision", "overfit_batches"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"),
    "reload_dataloaders_every_n_epochs",
)
_PACKAGE = Path(__file__).parents[2]
_PART_BYTES = 16 << 20  # of a file, in one message
_PART_LETTERS = 14 << 10  # a greeting has room for four such parts
_SHOWN = 3  # differences in a message
_LONGEST = 60  # letters of a value
_configuration: dict[str, str] = {}  # of the command line


def about_this_process() -> dict[str, Any]:
    """The values that must agree in whatever hosts do together, and the host's name."""
    return _short(
        {
            "name": socket.gethostname(),
            "versions": _versions(),
            "source": _digest_of_source(),
            "seed": os.environ.get("PL_GLOBAL_SEED", "not given"),
            "configuration": dict(_configuration),
        }
    )


def about_this_host(
    setup: RunSetup, trainer: Trainer, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that must agree on all hosts that train; plain, for JSON.

    ``arguments``: those of the trainer's method.
    """
    options: dict[str, Any] = {k: v for k, v in setup.options.items() if k not in _OWN}
    options["policy"] = setup.scheme.policy
    model = arguments.get("model") or trainer.lightning_module
    return about_this_process() | _short(
        {
            "num_nodes": setup.place.n_hosts,
            "workers": setup.n_here,
            "options": {name: described(value) for name, value in options.items()},
            "trainer": {name: described(getattr(trainer, name)) for name in _OF_TRAINER},
            "code": _code_of(model, arguments.get("datamodule")),
            "model": _model_of(model),
            "weights": _weights_of(model) if _evaluates_as_it_is(trainer, arguments) else {},
            "data": {f"samples of {name}": n for name, n in _lengths(arguments).items()},
            "from": _goes_on_from(arguments),
        }
    )


def _short(about: Mapping[str, Any]) -> dict[str, Any]:
    """The parts, those that are too large for a greeting by their digests."""
    found = dict(about)
    for name, part in found.items():
        text = json.dumps(part, sort_keys=True)
        if isinstance(part, dict) and len(text) > _PART_LETTERS:
            found[name] = {f"the digest of {len(part)} entries": _digest_of(text)}
    return found


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _goes_on_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that say where training goes on from; those of host 0 are for all."""
    found = {k: v for k, v in arguments.items() if k in ("ckpt_path", "weights_only")}
    path = found.get("ckpt_path")
    if path is not None:
        found["ckpt_path"] = str(Path(path).absolute() if Path(path).exists() else path)
    return found


def compare_configuration(content: Mapping[str, Any]) -> None:
    """Let the hosts of the following run compare this configuration, which is not resolved."""
    _configuration.clear()
    _configuration.update(
        {
            key: described(value)
            for key, value in _flat(content)
            if not any(key == own or key.startswith(f"{own}.") for own in _OWN_KEYS)
        }
    )


def compare_workers(trainer: Trainer, worker: WorkerContext, plans: Sequence[EpochPlan]) -> None:
    """Compare what only workers know: optimizers, their loaders' plans, where training goes on.

    A replay in one process compares it, too, so it says nothing of the machine.

    Raises:
        UserError: if those of two hosts differ.
    """
    client, n_hosts = worker.client, worker.n_hosts
    mine = {
        "name": f"host {client.worker // (client.n_workers // n_hosts)}",
        "optimizers": {
            f"{name} of optimizer {number}": described(value)
            for number, optimizer in enumerate(trainer.optimizers)
            for name, value in {"class": type(optimizer), **optimizer.defaults}.items()
        },
        "data": {
            f"{name} of loader {number}": value
            for number, plan in enumerate(plans)
            for name, value in (("samples", plan.length), ("batch sizes", list(plan.sizes)))
        },
        "progress": {"global_step": trainer.global_step},
    }
    first, *others = client.gather("what hosts train", mine)
    for other in others:
        if (reason := differences(first, other, "on host 0")) is not None:
            raise UserError(f"the hosts do not fit: {reason}")


@torch.no_grad()
def share_buffers(module: nn.Module, client: Client, whole: bool) -> None:
    """Give all workers the buffers of worker 0: hosts that were not seeded have drawn others.

    ``whole``: all of them; else those that cannot be shared in memory, as the others are.
    """
    mine = [
        (each, each.buffer)
        for each in kept(module, copies=False).values()
        if each.buffer is not None and not is_lazy(each.buffer)
        if whole or not lies_apart(each.buffer)
    ]
    if mine:
        theirs = [buffer.cpu() for _, buffer in mine] if client.group.is_leader else []
        for (each, _), value in zip(mine, client.gather("buffers", theirs)[0], strict=True):
            put(each.buffers, each.name, value)


@contextmanager
def checkpoint_of_host_0(client: Client, path: str | Path, n_hosts: int) -> Iterator[str | None]:
    """The path of a nameless copy of host 0's checkpoint, if this worker's file is not the same.

    Hosts need share no folder, and what an earlier run has left under the same path does not count.
    All workers call it together, and so does a replay in one process, where no file differs: how
    often workers meet goes by the size alone.
    """
    per_host = client.n_workers // n_hosts
    first = client.worker // per_host * per_host  # of this host, reads the file for all there
    mine = _size_and_digest(Path(path)) if client.worker == first else None
    items = client.gather("the checkpoint", mine)
    found = dict(zip(client.group.met, items, strict=True))
    theirs = found.get(0)
    n_bytes, _ = theirs or (0, "")  # of a URL nothing is known, and each worker loads it
    differs = any(found.get(n) != theirs for n in range(0, client.n_workers, per_host))
    with tempfile.TemporaryFile() as copy:
        for start in range(0, n_bytes, _PART_BYTES):
            part = _part(path, start) if differs and client.group.is_leader else b""
            copy.write(client.gather(f"the checkpoint from byte {start} on", part)[0])
        copy.seek(0)
        yield None if found.get(first) == theirs else f"/dev/fd/{copy.fileno()}"


def _size_and_digest(path: Path) -> tuple[int, str] | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _part(path: str | Path, start: int) -> bytes:
    with Path(path).open("rb") as file:
        file.seek(start)
        return file.read(_PART_BYTES)


def differences(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], here: str = "here"
) -> str | None:
    """The first things in which another host differs from this one, and what to do.

    Args:
        mine: :func:`about_this_host`.
        theirs: of the other host.
        here: the place of ``mine``, in words.
    """
    there = f"on {theirs.get('name', 'it')}"
    if ("doctor" in mine) != ("doctor" in theirs):
        return "one is hybridtrain doctor, the other trains; start the same command on all hosts"
    for part, advice in _ADVICE.items():
        a, b = mine.get(part), theirs.get(part)
        pairs = [(part, a, b)]
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            pairs = [(name, a.get(name), b.get(name)) for name in {**a, **b}]
        if found := [f"{name} is {y} {there} and {x} {here}" for name, x, y in pairs if x != y]:
            more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            return f"{', '.join(found[:_SHOWN])}{more}; {advice}"
    return None


_ADVICE = {
    "versions": "install the same on all hosts",
    "source": "install the same hybridtrain on all hosts (the digest of its files differs)",
    "seed": "call seed_everything with the same number on all hosts, or seed=NUMBER",
    "num_nodes": "give all hosts the same num_nodes",
    "workers": "give all hosts the same trainer.devices and workers_per_device",
    "options": "give all hosts the same options of the strategy",
    "configuration": "start the same command on all hosts",
    "trainer": "give all hosts' trainers the same arguments",
    "code": "start the same files on all hosts (their digests differ)",
    "model": "make the same model on all hosts",
    "weights": "seed all hosts alike, or load the same checkpoint (ckpt_path=PATH)",
    "optimizers": "configure the same optimizers on all hosts",
    "data": "give all hosts the same data",
    "progress": "let the same checkpoint be loaded on all hosts",
}


def _code_of(*objects: Any) -> dict[str, str]:
    """Digests of the script's file and of those of the objects' classes, by the files' names.

    A script in a temporary folder was generated on this host, as Spark does for a function.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    files = {None if Path(script).parent.name.startswith(tempfile.gettempprefix()) else script}
    for kind in map(type, objects):
        try:
            files.add(inspect.getsourcefile(kind))
        except (OSError, TypeError):  # made without a file, or built in
            continue
    digests: dict[str, str] = {}
    for path in (Path(file) for file in sorted(filter(None, files))):
        if path.is_file():  # several may have one name
            digests[path.name] = digests.get(path.name, "") + _digest([path])
    return digests


def _model_of(module: Any) -> dict[str, str]:
    """The module's class, its hyperparameters, and shapes of the parameters it has so far."""
    if not isinstance(module, nn.Module):
        return {}
    shapes = {name: list(value.shape) for name, value in module.named_parameters()}
    given = getattr(module, "hparams", {})
    made = {"class": _name(module), "shapes of parameters": described(shapes)}
    return made | {f"hparams.{name}": described(value) for name, value in given.items()}


def _evaluates_as_it_is(trainer: Trainer, arguments: Mapping[str, Any]) -> bool:
    """Whether each host evaluates the module that it has; training begins with host 0's."""
    evaluates = trainer.validating or trainer.testing or trainer.predicting
    return evaluates and arguments.get("ckpt_path") is None


def _weights_of(module: Any) -> dict[str, str]:
    if not isinstance(module, nn.Module):
        return {}
    named = (*module.named_parameters(), *module.named_buffers())
    known = [(name, x) for name, x in named if not is_lazy(x) and x.layout == torch.strided]
    each = repr([(name, checksum(value)) for name, value in known])
    return {"the checksum of the weights": _digest_of(each)}


def _lengths(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Samples of the data sets of loaders, by the name of the argument."""
    found = {}
    for name, value in arguments.items():
        loaders = tree_flatten(value)[0] if name.endswith("dataloaders") else []
        for number, loader in enumerate(loaders):
            try:
                found[f"{name}[{number}]" if number else name] = len(loader.dataset)
            except Exception:  # an iterable has no length; the user's class may raise anything
                continue
    return found


def described(value: Any) -> str:
    """A short text that is equal on two hosts where the values are."""
    try:
        text = json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return _name(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 12]}… ({_digest_of(text)})"


def _plain(value: Any) -> Any:
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return _name(value)
    return {_name(value): {str(k): v for k, v in vars(value).items()}}


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping) and content:
        for name, value in content.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, content


def _versions() -> dict[str, str]:
    names = ("hybridtrain", "torch", decide().replace("_", "-"))
    return {"Python": platform.python_version(), **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a checkout on the path
        return "not installed"


@cache
def _digest_of_source() -> str:
    """Hash the package's source files."""
    return _digest(sorted(_PACKAGE.rglob("*.py")))


def _digest(paths: Sequence[Path]) -> str:
    found, folder = hashlib.sha256(), paths[0].parent
    for path in paths:
        found.update(f"{os.path.relpath(path, folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]
