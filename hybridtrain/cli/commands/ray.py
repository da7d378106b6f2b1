"""Train on the nodes of a Ray cluster: on each, one actor executes a host of the run.

    python -m hybridtrain ray trainer.num_nodes=2 trainer.devices=4 [cpus=N] [gpus=N]

Takes all keys that python -m hybridtrain takes. Host 0, whose directory the run writes to, is on
the node of this command if Ray has room there. What the hosts print is printed here; the exit
status is that of host 0. From Python, inside a Ray job too:
hybridtrain.cli.commands.ray.train(["trainer.num_nodes=2", ...]).

Options:
  cpus=N             cores that Ray reserves on each node (default: one for each worker)
  gpus=N             GPUs that it reserves (default: one for each device, if the cluster has any)
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from hybridtrain.cli.exit_status import BAD_INPUT, FAILED, CommandOutcome, guarded
from hybridtrain.cli.further_host import number_of_hosts
from hybridtrain.cli.hydra_config import complete_overrides, compose_config
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.engine.worlds.signals import restore
from hybridtrain.errors import UserError
from hybridtrain.hosts.key import Key
from hybridtrain.hosts.sockets import free_port
from hybridtrain.util.anonymous_files import anonymous_descriptor
from hybridtrain.util.arguments import command, split_options
from hybridtrain.util.option_types import NotNegative, check

OPTIONS = ("cpus", "gpus")
_ROOM_S = 60.0  # until Ray has room on so many nodes
_GRACE_S = 30.0  # until hosts have ended by themselves, when the run is over
# Variables of other engines, below which Ray may run, and a limit that Ray sets.
_LEFT_OUT = ("SLURM_", "TORCHELASTIC_", "GROUP_", "LOCAL_", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
# The ordinary command, which ends with the actor, however that ends. Ray blocks SIGINT.
_COMMAND = """import runpy, signal, sys
from hybridtrain.engine.worlds.parent_death import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
signal.pthread_sigmask(signal.SIG_SETMASK, [])
runpy.run_module("hybridtrain", run_name="__main__", alter_sys=True)"""


class Node(NamedTuple):
    """The node of an actor: its id and address, and a free port."""

    identity: str
    address: str
    port: int


class HostProcess:
    """An actor: the process of one host of the run, on the node where Ray has put it.

    Ray calls ``end`` while ``run`` waits.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def node(self) -> Node:
        """The node of this actor."""
        import ray

        context = ray.get_runtime_context()
        return Node(context.get_node_id(), ray.util.get_node_ip_address(), free_port())

    def run(
        self, arguments: Sequence[str], variables: Mapping[str, str], folder: str, key: bytes
    ) -> Iterator[str | int]:
        """Execute the command; yield the lines it prints, then its exit status.

        The key lies in a file of mode 0600 that has no name, and that only the process inherits.
        """
        given, fds = list(arguments), [anonymous_descriptor()] if key else []
        for fd in fds:
            os.write(fd, key)
            given.append(f"strategy.hosts_key=/proc/self/fd/{fd}")
        kept = {name: x for name, x in os.environ.items() if not name.startswith(_LEFT_OUT)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(os.getpid()), *given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**kept, **variables},
            cwd=folder if Path(folder).is_dir() else None,
            pass_fds=fds,
        )
        for fd in fds:
            os.close(fd)
        assert self._process.stdout is not None
        for line in self._process.stdout:  # noqa: UP028 (Ray sends to the generator)
            yield line
        yield self._process.wait()

    def end(self) -> None:
        """Ask the process to save and end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)


class RayRun:
    """The hosts of one run, seen from the command that has started them.

    Args:
        ray: the module.
        make: makes an actor in the bundle with this number.
        n_hosts: as many as there are bundles.
        on_failure: of the strategy; ``stop``: the run ends with the first host that fails.
    """

    def __init__(self, ray: Any, make: Callable[[int], Any], n_hosts: int, on_failure: str) -> None:
        self._ray, self._make, self._on_failure = ray, make, on_failure
        actors = [make(number) for number in range(n_hosts)]
        nodes: list[Node] = ray.get([actor.node.remote() for actor in actors])
        here = ray.get_runtime_context().get_node_id()
        self._bundles = sorted(range(n_hosts), key=lambda n: nodes[n].identity != here)
        self._nodes = [nodes[n] for n in self._bundles]
        self._actors = [actors[n] for n in self._bundles]
        self._streams: dict[Any, int] = {}  # what the hosts print, and their numbers
        self._status = FAILED  # of host 0
        self._until_s: float | None = None  # when what is left is killed

    def watch(self, arguments: Sequence[str], key: bytes) -> int:
        """Start all hosts; print what they print until they have ended; the status of host 0."""
        self._given = arguments, key
        for host in range(len(self._actors)):
            self._start(host)
        try:
            while self._streams and time.monotonic() < (self._until_s or time.monotonic() + 1):
                try:
                    self._listen()
                except KeyboardInterrupt:
                    if self._until_s is not None:
                        raise
                    self._let_end()
                    for actor in self._actors:
                        actor.end.remote()
        finally:
            for actor in self._actors:
                self._ray.kill(actor)
        return self._status

    def _start(self, host: int) -> None:
        (arguments, key), first = self._given, self._nodes[0]
        variables = {"MASTER_ADDR": first.address, "MASTER_PORT": str(first.port)}
        variables["NODE_RANK"] = str(host)
        stream = self._actors[host].run.remote(arguments, variables, str(Path.cwd()), key)
        self._streams[stream] = host

    def _listen(self) -> None:
        """Print what there is; note the hosts that have ended."""
        for stream in self._ray.wait(list(self._streams), timeout=1.0)[0]:
            host = self._streams[stream]
            try:
                said = self._ray.get(next(stream))
            except StopIteration:
                del self._streams[stream]
            except self._ray.exceptions.RayError as error:
                del self._streams[stream]
                reason = str(error).strip().rpartition("\n")[2]
                self._ended(host, FAILED, f"is lost with its node, or Ray's actor there ({reason})")
            else:
                if isinstance(said, str):
                    print(said, end="", flush=True)
                else:
                    self._ended(host, said, f"has ended with status {said}")

    def _ended(self, host: int, status: int, how: str) -> None:
        if status:
            to_stderr(f"host {host} of {len(self._nodes)}, {self._nodes[host].address}, {how}")
        if host == 0:
            self._status = status
        if host == 0 or status == BAD_INPUT or (status and self._on_failure == "stop"):
            self._let_end()
        elif status and self._on_failure == "restart" and self._until_s is None:
            self._actors[host] = self._make(self._bundles[host])  # where Ray has put the bundle
            self._start(host)

    def _let_end(self) -> None:
        self._until_s = self._until_s or time.monotonic() + _GRACE_S


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM, of ``ray job stop``, is a ``KeyboardInterrupt`` meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        restore({signal.SIGTERM: former})


@_interrupted_by_sigterm()
def train(arguments: Sequence[str], cpus: float | None = None, gpus: float | None = None) -> int:
    """Train on the nodes of the Ray cluster that this process belongs to; the status of host 0.

    Args:
        arguments: of ``python -m hybridtrain``.
        cpus: cores that Ray reserves on each node; ``None``: one for each worker.
        gpus: GPUs; ``None``: one for each device, if the cluster has any.

    Raises:
        UserError: if there is no cluster, or not enough of it.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Bundle

    overrides = complete_overrides(arguments)
    config = compose_config(overrides)
    check_config(config, overrides)
    if (n_hosts := number_of_hosts(config)) == 1:
        raise UserError("trainer.num_nodes=1 was given; give the number of nodes to train on")
    _connect(ray)
    wanted = _wanted(config, ray.cluster_resources(), cpus, gpus)
    group = placement_group([wanted] * n_hosts, strategy="STRICT_SPREAD")
    try:
        there = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        if len(there) < n_hosts or not group.wait(_ROOM_S):
            raise UserError(
                f"trainer.num_nodes={n_hosts} was given, each with {wanted}, and Ray has no room "
                f"for that on its nodes ({', '.join(there)}; see ray status); start more, or give "
                "a smaller trainer.num_nodes, trainer.devices, cpus= or gpus="
            )
        reserved = {"num_cpus": wanted["CPU"], "num_gpus": wanted["GPU"], "max_concurrency": 2}

        def make(number: int) -> Any:
            place = Bundle(group, placement_group_bundle_index=number)
            made = ray.remote(HostProcess).options(**reserved, scheduling_strategy=place)
            return made.remote()

        key = b"" if config.strategy.hosts_key else Key.new().to_bytes()
        return RayRun(ray, make, n_hosts, config.strategy.on_failure).watch(arguments, key)
    finally:
        remove_placement_group(group)


def _connect(ray: Any) -> None:
    try:
        ray.init(
            "auto", ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING
        )
    except ConnectionError:
        raise UserError(
            "there is no Ray cluster; start one with ray start --head (and ray start "
            "--address=HEAD:6379 on the other nodes), or give RAY_ADDRESS"
        ) from None


def _wanted(
    config: DictConfig, there: Mapping[str, float], cpus: float | None, gpus: float | None
) -> dict[str, float]:
    """The cores and GPUs that Ray reserves on each node."""
    devices = config.trainer.devices
    if type(devices) is not int or devices < 1:
        raise UserError(
            f"trainer.devices={devices} was given; give a number, as Ray reserves so many"
        )
    on_gpus = config.trainer.accelerator != "cpu" and "GPU" in there
    return {
        "CPU": devices * config.strategy.workers_per_device if cpus is None else cpus,
        "GPU": devices * on_gpus if gpus is None else gpus,
    }


def run(arguments: Sequence[str]) -> int:
    """Train; the exit status of host 0."""
    given, rest = split_options(arguments, OPTIONS)
    for name, value in given.items():
        check(name, value, NotNegative)
    return guarded(lambda: CommandOutcome(exit=train(rest, **given)), rest).exit


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: the exit status of host 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)
