"""Nothing that another user could have written is executed, wherever it is read."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.source_trees import calls, nodes
from tests.test_architecture import FILES, PACKAGE

# Where bytes become objects by way of pickle, and who has made these bytes.
PICKLES = {
    "engine/worker/client.py": "the parent, over an inherited socket",
    "lightning/failover/rng_mailbox.py": "the worker that was lost, in nameless memory of the run",
    "lightning/data/evaluation_sampler.py": "other workers, by way of the parent",
    "engine/memory/scratch_file.py": "a worker, over an inherited socket or in a nameless file",
    "engine/updates/serialize.py": "the parent or a worker, over an inherited socket",
    "engine/updates/optimizer_set.py": "a worker, over an inherited socket",
    "hosts/transport.py": "another host, which has shown that it holds the run's key",
    "engine/worlds/channel.py": "the parent or a worker, over an inherited socket",
    "engine/worlds/worker_exit.py": "a worker, over an inherited socket",
    "lightning/states/plain_data.py": "this process: a class, to see whether it has a name",
}
NEVER = {"eval", "exec", "compile", "__import__"}
MODULES = {"shelve", "marshal", "dill", "cloudpickle", "joblib", "dbm"}
PLACES = {"gettempdir", "mktemp", "tempnam"}  # names that somebody else may foresee


def unpickles(call: ast.Call, name: str) -> bool:
    """Whether code may come of it. ``torch.load`` must say that it may not, or else it may."""
    if name == "torch.load":
        plain = [k for k in call.keywords if k.arg == "weights_only"]
        return not plain or ast.unparse(plain[0].value) != "True"
    if name.endswith(("np.load", "numpy.load")):
        return any(k.arg == "allow_pickle" for k in call.keywords)
    return name in {"pickle.load", "pickle.loads", "pickle.Unpickler", "_Unpickler"}


def names(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_pickles_are_read_only_from_processes_of_the_same_run() -> None:
    found = {names(f) for f in FILES if any(unpickles(*call) for call in calls(f).items())}
    assert found == set(PICKLES)


def test_no_text_is_executed_and_yaml_makes_no_objects() -> None:
    for file in FILES:
        found = set(calls(file).values())
        assert not found & NEVER, file
        assert not {x for x in found if x.startswith("yaml.")} - {"yaml.safe_load"}, file


def test_no_other_serialiser_is_imported() -> None:
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.Import):
                assert not {x.name.partition(".")[0] for x in node.names} & MODULES, file
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.module.partition(".")[0] not in MODULES, file


def test_temporary_names_cannot_be_foreseen() -> None:
    for file in FILES:
        found = {name.rpartition(".")[2] for name in calls(file).values()}
        assert not found & PLACES, file
        constants = [n.value for n in nodes(file) if _is_text(n)]
        assert not [x for x in constants if str(x).startswith(("/tmp", "/var/tmp", "/dev/shm/"))]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_socket_has_an_address_but_those_between_hosts() -> None:
    """Sockets come in inherited pairs; else nobody binds, connects or listens."""
    made = {"socket.socket", "socket.create_server", "socket.create_connection", "Listener"}
    for file in FILES:
        if names(file).startswith(("hosts/", "lightning/hosts/")):
            continue
        found = set(calls(file).values())
        assert not found & made, file
        ends = {x.rpartition(".")[2] for x in found if "sock" in x}
        assert not ends & {"bind", "connect", "listen", "accept"}, file
