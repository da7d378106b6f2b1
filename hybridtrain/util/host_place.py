"""Which host of a run this process is on: read from torchrun's, Slurm's or plain variables.

Nothing here imports torch or Lightning: the command line asks before it claims a directory.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from dataclasses import dataclass

from hybridtrain.errors import UserError

_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """A host's place among the hosts of a run.

    Args:
        host: its number; host 0 has the server.
        n_hosts: hosts of the run.
        address: of host 0; under torchrun of its store, in which host 0 publishes its own.
        port: that host 0 listens on; 0: any free one, which it publishes.
        run: an id that all hosts of this run share, or empty.
        store_port: of torchrun's store; 0: there is none.
        hosts_store: host 0 has to open that store itself.
    """

    host: int = 0
    n_hosts: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    run: str = ""
    store_port: int = 0
    hosts_store: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the address is of this host's loopback interface: all "hosts" are one."""
        return is_loopback(self.address)


def is_loopback(address: str) -> bool:
    """Whether only processes of the same host reach the address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def found_engine() -> str:
    """The program that started this process, in the order in which Lightning looks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "Slurm" if "SLURM_NTASKS" in os.environ and not interactive else "variables"


def place_by_variables(n_hosts: int, engine: str | None = None) -> HostPlace:
    """This process' place in a run of so many hosts.

    Args:
        engine: ``torchrun``, ``Slurm`` or ``variables``; ``None``: the one found.

    Raises:
        UserError: if variables are missing, wrong, or do not agree with the number of hosts.
    """
    if n_hosts == 1:
        return HostPlace()
    engine = engine or found_engine()
    return {"torchrun": _by_torchrun, "Slurm": _by_slurm, "variables": _by_hand}[engine](n_hosts)


def _by_torchrun(n_hosts: int) -> HostPlace:
    n_processes = _number("LOCAL_WORLD_SIZE", "torchrun", 1)
    if n_processes > 1:
        raise UserError(
            f"torchrun started {n_processes} processes on this host (LOCAL_WORLD_SIZE), but one "
            "process on each host starts the workers there; say torchrun "
            f"--nnodes {n_hosts} --nproc-per-node 1 ... trainer.devices={n_processes}"
        )
    agents = _number("GROUP_WORLD_SIZE", "torchrun", 1)
    if agents != n_hosts:
        raise _disagree(n_hosts, f"torchrun runs on {agents}", f"torchrun --nnodes {n_hosts}")
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
    host = _number("GROUP_RANK", "torchrun", 0, n_hosts - 1)
    return HostPlace(
        host=host,
        n_hosts=n_hosts,
        address=_variable("MASTER_ADDR", "torchrun"),
        run=_variable("TORCHELASTIC_RUN_ID", "torchrun"),
        store_port=_number("MASTER_PORT", "torchrun", 1, _LAST_PORT),
        hosts_store=own_store and host == 0,
    )


def _by_slurm(n_hosts: int) -> HostPlace:
    nodes = _number("SLURM_NNODES", "Slurm", 1)
    if nodes != n_hosts:
        raise _disagree(n_hosts, f"Slurm's step runs on {nodes}", f"srun --nodes={n_hosts}")
    if (tasks := _number("SLURM_NTASKS", "Slurm", 1)) != nodes:
        raise UserError(
            f"Slurm started {tasks} tasks on {nodes} hosts (SLURM_NTASKS), but one task on each "
            f"host starts the workers there; say srun --nodes={n_hosts} --ntasks-per-node=1 "
            "--cpus-per-task=CORES, and trainer.devices=N for N workers on each host"
        )
    job = os.environ.get("SLURM_JOB_ID", "0")
    return HostPlace(
        host=_number("SLURM_NODEID", "Slurm", 0, n_hosts - 1),
        n_hosts=n_hosts,
        address=os.environ.get("MASTER_ADDR") or _first(_variable("SLURM_NODELIST", "Slurm")),
        port=_port() if "MASTER_PORT" in os.environ else 15000 + int(job[-4:]),  # as Lightning
        run=f"{job}.{os.environ.get('SLURM_STEP_ID', '0')}",
    )


def _by_hand(n_hosts: int) -> HostPlace:
    if _number("LOCAL_WORLD_SIZE", "it", 1, default=1) > 1 or "LOCAL_RANK" in os.environ:
        raise UserError(
            f"num_nodes={n_hosts} was given, and LOCAL_RANK says that this is one of several "
            "processes of its host, but one process on each host starts the workers there; start "
            f"it once on each host, without LOCAL_RANK, with NODE_RANK=0 to {n_hosts - 1}"
        )
    return HostPlace(
        host=_number("NODE_RANK", "it", 0, n_hosts - 1),
        n_hosts=n_hosts,
        address=_variable("MASTER_ADDR", "it"),
        port=_port(),
    )


def _first(nodes: str) -> str:
    """The first of Slurm's list of hosts: ``n05`` of ``n[05-07,9],m1``."""
    return re.split("[, ]", re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes))[0]


def _port() -> int:
    return _number("MASTER_PORT", "it", 1, _LAST_PORT)


_MEANT = {
    "NODE_RANK": "the number of this host, from 0",
    "MASTER_ADDR": "the address of host 0",
    "MASTER_PORT": "a port of host 0 that is free",
}


def _variable(name: str, engine: str) -> str:
    value = os.environ.get(name, "")
    if value:
        return value
    if engine != "it":
        raise UserError(f"{engine} started this process, but the variable {name} is missing")
    raise UserError(
        f"num_nodes is more than 1, and the variable {name} is missing; set NODE_RANK, "
        f"MASTER_ADDR and MASTER_PORT on each host ({name}: {_MEANT[name]}), or start it with "
        "torchrun or srun, which do"
    )


def _number(
    name: str, engine: str, least: int, most: int | None = None, default: int | None = None
) -> int:
    if default is not None and name not in os.environ:
        return default
    text = _variable(name, engine)
    if text.isascii() and text.isdecimal() and least <= int(text) <= (most or sys.maxsize):
        return int(text)
    allowed = f"from {least} to {most}" if most is not None else f"at least {least}"
    what = f" ({_MEANT[name]})" if name in _MEANT else ""
    raise UserError(f"{name}={text} was given; let it be a whole number {allowed}{what}")


def _disagree(n_hosts: int, found: str, command: str) -> UserError:
    return UserError(
        f"num_nodes={n_hosts} was given, but {found}; make them the same: "
        f"Trainer(num_nodes=...) (trainer.num_nodes=... on the command line), or {command}"
    )
