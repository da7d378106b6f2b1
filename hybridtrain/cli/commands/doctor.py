"""Check this machine, the hosts of a run and the network between them before the run.

    python -m hybridtrain doctor [KEY=VALUE ...] [wait_s=60] [json=true]
    torchrun --nnodes 2 --nproc-per-node 1 ... -m hybridtrain doctor trainer.num_nodes=2

Takes the keys of the run that is to follow, and is started as it is: where trainer.num_nodes is
more than 1, once on each host. Host 0 then prints what all of them have. Each line is ok, a note
(it works, but slower than it could), or bad, and says what to do. The exit status is 1 if one is
bad.

Options:
  wait_s=N           seconds that hosts wait for one another (default 60)
  json=true          print a list in JSON instead of lines
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from hybridtrain.cli.exit_status import FAILED, CommandOutcome, guarded, interrupted
from hybridtrain.cli.further_host import number_of_hosts
from hybridtrain.cli.hydra_config import complete_overrides, compose_config
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.engine.memory.limits import (
    available_bytes,
    container_cores,
    gpus,
    named_gpus,
    shared_memory_bytes,
)
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.engine.scheme import usable_cores
from hybridtrain.engine.worlds.signals import Interrupted
from hybridtrain.errors import UserError
from hybridtrain.hosts.connection import HostConnection, HostLost
from hybridtrain.hosts.key import Key
from hybridtrain.hosts.probe import answer, measure
from hybridtrain.lightning.hosts.agreement import (
    about_this_process,
    compare_configuration,
    differences,
)
from hybridtrain.lightning.hosts.cluster import check_key_is_reachable
from hybridtrain.lightning.hosts.joining import gathering, reached
from hybridtrain.util.arguments import command, split_options
from hybridtrain.util.host_place import HostPlace, place_by_variables
from hybridtrain.util.option_types import Above0, check
from hybridtrain.util.versions import check_versions

OPTIONS = ("wait_s", "json")
_GIB, _MB = 1 << 30, 1_000_000
_SLOW = 250 * _MB  # bytes a second; twice what 1 Gbit/s carries
_ROW = 40 * _MB  # bytes of 10 million parameters


class Finding(NamedTuple):
    """One line: ``what`` was looked at on ``host``, the state that was ``found``, and advice."""

    host: int
    what: str
    state: Literal["ok", "note", "bad"]
    found: str
    advice: str


def _finding(host: int, what: str, found: str, advice: str = "", is_bad: bool = False) -> Finding:
    """A finding; with advice it is a note, or bad."""
    return Finding(host, what, ("bad" if is_bad else "note") if advice else "ok", found, advice)


def findings(config: DictConfig, wait_s: float) -> tuple[list[Finding], bool]:
    """All that is found, and whether none of it is bad, on any host.

    On host 0 of several it is that of all hosts; elsewhere nothing, once host 0 has been told.

    Args:
        wait_s: how long hosts wait for one another.
    """
    try:
        place, fault = place_by_variables(number_of_hosts(config)), ""
    except UserError as error:
        place, fault = HostPlace(), str(error)
    key, host = config.strategy.get("hosts_key"), place.host
    found = machine(config, host)
    if fault:
        found.append(_finding(0, "host", "it has no place", fault, is_bad=True))
    elif place.n_hosts > 1:
        found.append(_key(place, key))
    elif config.trainer.num_nodes != 1:
        advice = "their processes meet by torch.distributed, which was not tried"
        found.append(_finding(0, "hosts", "this strategy is Lightning's own", advice))
    if place.n_hosts == 1 or not _is_well(found):
        return found, _is_well(found)
    about = {**about_this_process(), "findings": found}
    if host > 0:
        return _told(place, key, about, wait_s)
    found = [*found, *_other_hosts(place, key, about, wait_s)]
    return found, _is_well(found)


def _is_well(found: Sequence[Finding]) -> bool:
    return all(each.state != "bad" for each in found)


# ---- this machine -------------------------------------------------------------------------------


def machine(config: DictConfig, host: int) -> list[Finding]:
    """The findings of this machine: versions, cores, memory, GPUs, as the configuration needs."""
    accelerator, devices = config.trainer.accelerator, config.trainer.devices
    n_workers = devices if type(devices) is int and devices > 0 else 1
    n_workers *= config.strategy.get("workers_per_device", 1)
    on_cpu = accelerator == "cpu" or not _visible(len(gpus()))
    return [
        _versions(host),
        _cores(host, n_workers if on_cpu else 0),
        *_memory(host),
        _gpus(host, accelerator, devices),
    ]


def _memory(host: int) -> list[Finding]:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, shared = available_bytes() or 0, shared_memory_bytes() or 0
    more = "free some, or give the container more" if free < _GIB else ""
    found = _finding(host, "memory", f"{free / _GIB:.1f} of {whole / _GIB:.1f} GiB free", more)
    more = "data loaders need it: docker run --shm-size=2g, or num_workers=0"
    more = more if shared < _GIB / 2 else ""
    return [found, _finding(host, "shared memory", f"{shared / _GIB:.2f} GiB of it free", more)]


def _versions(host: int) -> Finding:
    about, advice = about_this_process(), ""
    names = {**about["versions"], "hydra-core": version("hydra-core")}
    try:
        check_versions(*names)
    except UserError as error:
        advice = str(error)
    found = ", ".join(f"{name} {number}" for name, number in names.items())
    found += f"; digest of hybridtrain's files {about['source']}"
    return _finding(host, "versions", found, advice, is_bad=True)


def _cores(host: int, n_workers: int) -> Finding:
    usable, quota = usable_cores(), container_cores()
    found, advice = f"{usable} of {os.cpu_count()} usable", ""
    if quota is not None and quota < usable:
        found += f", of which the container has the time of {quota:g}"
    there = max(1, int(min(usable, quota or usable)))
    if n_workers > there:
        advice = f"{n_workers} workers share them; {there} would do as much"
    return _finding(host, "cores", found, advice)


def _gpus(host: int, accelerator: str, devices: Any) -> Finding:
    there, built, advice = gpus(), torch.version.cuda, ""
    usable, wanted = _visible(len(there)), accelerator in ("gpu", "cuda")
    listed = isinstance(devices, ListConfig)
    n_devices = 1 + max(devices) if listed else devices if type(devices) is int else 1
    if there and built is None and accelerator != "cpu":
        advice = "this torch has no CUDA; install a build that has, or trainer.accelerator=cpu"
    elif wanted and not there:
        advice = "trainer.accelerator=cpu, or see that nvidia-smi shows them"
    elif wanted and not usable:
        advice = "trainer.accelerator=cpu, or name some of them in CUDA_VISIBLE_DEVICES"
    elif wanted and n_devices > usable:
        fewer = f"numbers from 0 to {usable - 1}" if listed else str(usable)
        advice = f"trainer.devices={devices} was given; give {fewer}, or workers_per_device"
    found = ", ".join(f"{each.n_bytes / _GIB:.0f} GiB" for each in there) or "none"
    if usable < len(there):
        found += f", of which CUDA_VISIBLE_DEVICES={','.join(named_gpus() or [])} shows {usable}"
    return _finding(host, "GPUs", found + (f" (CUDA {built})" if built else ""), advice, wanted)


def _visible(there: int) -> int:
    """The number of GPUs, or parts, that CUDA shows: those named before the first bad number."""
    if (named := named_gpus()) is None:
        return there
    count = 0
    for name in named:
        is_known = int(name) < there if name.isdecimal() else name.startswith(("GPU-", "MIG-"))
        if not is_known:
            break
        count += 1
    return count if there else 0


# ---- the hosts of a run -------------------------------------------------------------------------


def _key(place: HostPlace, path: str | None) -> Finding:
    found, advice = f"from {path}" if path else "from host 0's process, over a Unix socket", ""
    if place.store_port and not path:
        found = "through torchrun's store, where whoever reaches it can read it"
    try:
        check_key_is_reachable(place, path)
        if path:
            Key.read(Path(path))
    except UserError as error:
        found, advice = "none", str(error)
    return _finding(place.host, "key", found, advice, is_bad=True)


def _other_hosts(
    place: HostPlace, key: str | None, about: Mapping[str, Any], wait_s: float
) -> list[Finding]:
    """On host 0: wait for the others, measure, and tell them whether all is well."""
    connections: dict[int, HostConnection] = {}
    found: list[Finding] = []
    try:
        with gathering(place, key, {"doctor": about}) as others:
            connections = others.found
            others.wait_for(place.n_hosts, wait_s)
    except UserError as error:
        found.append(_finding(0, "hosts", "not all have come", str(error), is_bad=True))
    for host, connection in sorted(connections.items()):
        theirs = connection.about["doctor"]
        found += [Finding(*each) for each in theirs["findings"]]
        reason = differences(about, theirs)
        said = f"{theirs['name']} has {'not ' * bool(reason)}what host 0 has"
        found.append(_finding(host, "agreement", said, reason or "", is_bad=True))
        found.append(_link(host, connection))
    for connection in connections.values():
        connection.send(_is_well(found))
        connection.close()
    return found


def _link(host: int, connection: HostConnection) -> Finding:
    try:
        link = measure(connection)
    except HostLost as error:
        return _finding(host, "connection", "it is lost", str(error), is_bad=True)
    found = (
        f"{1000 * link.round_trip_s:.2f} ms there and back, {link.up / _MB:.0f} MB/s to host 0, "
        f"{link.down / _MB:.0f} from it; of 10 million parameters {1000 * _ROW / link.up:.0f} ms "
        f"and {1000 * _ROW / link.down:.0f}"
    )
    advice = "use a faster network, strategy.exchange.compress=int8, or strategy=diloco"
    return _finding(host, "connection", found, advice if min(link[1:]) < _SLOW else "")


def _told(
    place: HostPlace, key: str | None, about: Mapping[str, Any], wait_s: float
) -> tuple[list[Finding], bool]:
    """On another host: tell host 0, and answer while it measures."""
    try:
        with reached(place, key, {"doctor": about}, wait_s) as connection:
            is_well = answer(connection)
    except (UserError, HostLost) as error:
        lost = _finding(place.host, "host 0", "it was not reached", str(error), is_bad=True)
        return [*about["findings"], lost], False
    to_stderr(f"host {place.host} of {place.n_hosts}: host 0 prints what was found here")
    return [], is_well


# ---- the command --------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """Print what is found; 1 if something is bad."""
    given, keys = split_options(arguments, OPTIONS)
    wait_s = given.get("wait_s", 60.0)
    check("wait_s", wait_s, Above0)
    overrides = complete_overrides(keys)

    def body() -> CommandOutcome:
        config = compose_config(overrides)
        check_config(config, overrides)
        compare_configuration(OmegaConf.to_container(config, resolve=False))  # type: ignore[arg-type]
        try:
            found, is_well = findings(config, float(wait_s))
        except Interrupted as interruption:
            return interrupted(interruption.signum)
        _print(found, bool(given.get("json")), config.trainer.num_nodes > 1)
        return CommandOutcome(exit=0 if is_well else FAILED)

    return guarded(body, overrides).exit


def _print(found: Sequence[Finding], as_json: bool, several: bool) -> None:
    if as_json and found:
        print(json.dumps([each._asdict() for each in found], indent=1), flush=True)
        return
    for each in found:
        host = f"host {each.host}  " if several else ""
        advice = f": {each.advice}" if each.advice else ""
        print(f"{each.state:4}  {host}{each.what:13}  {each.found}{advice}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, 1 if something is bad, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)
