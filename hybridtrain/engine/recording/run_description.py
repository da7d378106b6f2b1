"""A record's description of the run: code, versions, options, data.

A replay compares all of it and reports differences.
"""

from __future__ import annotations

import gc
import hashlib
import platform
import random
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from hybridtrain.engine.protocol.checksums import checksum_of_state
from hybridtrain.engine.protocol.messages import Described
from hybridtrain.engine.recording.record_file import RECORD_NAME, Record, Writer
from hybridtrain.engine.recording.recorder import KINDS
from hybridtrain.errors import UserError
from hybridtrain.util.files import open_input
from hybridtrain.util.generators import look, put
from hybridtrain.util.own_parts import identity

# ---- the option record: the file of a run's events, or the replay that runs the workers ---------


class Runner(Protocol):
    """Runs the workers of a recorded run in this process.

    ``rehearses``: as another run, for which all has to be checked that is for a new one.
    """

    rehearses: bool

    def play(self, strategy: Any, body: Any, job: Any) -> list[Any]:
        """Run the workers; return their results, or none if they did not finish."""


@dataclass
class Recording:
    """Path of the record, and plain data ``about`` the run (the command line's configuration).

    ``instead``: write no record; this runs the workers, in place of processes. ``n_hosts``: of the
    run that it repeats.
    """

    place: Path
    about: dict[str, Any] = field(default_factory=dict)
    instead: Runner | None = None
    n_hosts: int = 1

    @classmethod
    def at(cls, place: Any) -> Recording | None:
        """Make it from the user's option."""
        return None if place in (None, "") else cls(Path(place))

    def describe(self, about: dict[str, Any]) -> None:
        """Plain data for the header."""
        self.about = about

    def open(self) -> Writer:
        """Open a new file; older ones stay.

        Raises:
            UserError: if it cannot be written.
        """
        a_file = self.place.suffix and not self.place.is_dir()
        path = self.place if a_file else self.place / RECORD_NAME
        number, free = 2, path
        while free.exists():
            free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
        try:
            free.parent.mkdir(parents=True, exist_ok=True)
            return Writer(free, KINDS)
        except OSError as error:
            raise UserError(
                f"record={self.place}: the record cannot be written ({error.strerror}); choose "
                "another place, or leave it out"
            ) from error


_DIGITS = 16  # of a hash
_LAYERS, _MOST_PARTS = 8, 1_000  # of a data set, in which generators of random numbers are sought
_GENERATORS: tuple[tuple[type, str, str], ...] = (
    (torch.Generator, "get_state", "set_state"),
    (random.Random, "getstate", "setstate"),
    (np.random.RandomState, "get_state", "set_state"),
    (np.random.BitGenerator, "__getstate__", "__setstate__"),
)
_PACKAGE = Path(__file__).parents[1]


def header(strategy: Any, threads: int, server_threads: int) -> dict[str, Any]:
    """Options, versions and code of a run."""
    return {
        "workers": strategy.world_size,
        "threads": threads,
        "server_threads": server_threads,
        "policy": identity(strategy.policy),
        "correction": identity(strategy.correction),
        "exchange": identity(strategy.exchange),
        "steps": strategy.exchange.steps,  # mini-batches of a push
        "update": identity(strategy.update),
        "state_dtype": identity(strategy.state_dtype),
        "requirements": asdict(strategy.requirements),
        "versions": versions(),
        "code": {"hybridtrain": _hash_of_package(), **users_code()},
    }


def versions() -> dict[str, str]:
    """Versions that results depend on, to the bit."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pytorch_lightning": _version_of_lightning(),
        "numpy": np.__version__,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def _version_of_lightning() -> str:
    """The version of the package that this process has imported, else of an installed one.

    Both packages import under this name, once it is decided which one a process uses.
    """
    imported = sys.modules.get("pytorch_lightning")
    if imported is not None:
        return str(imported.__version__)
    for package in ("pytorch_lightning", "lightning"):
        with suppress(PackageNotFoundError):
            return version(package)
    return "none"


# ---- code ---------------------------------------------------------------------------------------


def users_code() -> dict[str, str]:
    """Hashes of the imported source files that are not installed packages."""
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py") and not is_installed(path):
            found[path] = hash_of_file(Path(path))
    return {_short(path): found[path] for path in sorted(found) if found[path]}


def hash_of_file(path: Path) -> str:
    """The hash of a file's content; empty if it cannot be read."""
    try:
        with open_input(path, "the file") as file:
            return hashlib.blake2b(file.read()).hexdigest()[:_DIGITS]
    except UserError:
        return ""


def hash_now(name: str) -> str:
    """The current hash for a name in :func:`header`'s ``code``."""
    return _hash_of_package() if name == "hybridtrain" else hash_of_file(Path(name))


def _short(path: str) -> str:
    """Relative to the working directory, if it lies below."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def is_installed(path: str) -> bool:
    """Whether a source file is the standard library's, a package's, or this package's."""
    return path.startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = {sysconfig.get_path(name) for name in names}
    places |= {*site.getsitepackages(), site.getusersitepackages(), str(_PACKAGE), "<"}
    return tuple(f"{place}/" if place != "<" else place for place in sorted(places))


@cache
def _hash_of_package() -> str:
    found = hashlib.blake2b()
    for path in sorted(_PACKAGE.rglob("*.py")):
        found.update(str(path.relative_to(_PACKAGE)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:_DIGITS]


def changes(record: Record) -> list[str]:
    """Source files and versions that have changed since the run."""
    found, now = list[str](), versions()
    for name, before in record.header["code"].items():
        if (here := hash_now(name)) != before:
            what = "the package hybridtrain" if name == "hybridtrain" else name
            found.append(f"code: {what} {'has changed' if here else 'is not there'}")
    for name, before in record.header["versions"].items():
        if now.get(name) != before:
            found.append(f"{name}: {now.get(name)} here, {before} in the run")
    return found


def refuse_changes(found: Sequence[str], anyway: bool) -> None:
    """Raises ``UserError`` that names what has changed since the run, unless ``anyway``."""
    if found and not anyway:
        raise UserError(f"{'; '.join(found)}; to replay it nevertheless, say anyway=true")


def check_replayable(record: Record, strategy: Any, anyway: bool) -> None:
    """Check that a run was made by the same strategy and code; ``anyway``: by the same strategy.

    Raises:
        UserError: if not, naming what differs; or if the run cannot be replayed.
    """
    if record.in_place:
        raise UserError(
            f"the run's policy was {record.header['policy']}, under which workers write to the "
            "parameters whenever they like; nobody knows the order, so it cannot be replayed"
        )
    if strategy.world_size != record.n_workers:
        raise UserError(
            f"the run had {record.n_workers} workers, and {strategy.world_size} were given; give "
            "as many (of a trainer: the same devices and workers_per_device)"
        )
    for name, then in record.strategy.items():
        if (given := identity(getattr(strategy, name))) != then:
            raise UserError(
                f"the run's {name} was {then}, and {given} was given; give the same strategy"
            )
    refuse_changes(changes(record), anyway)


# ---- data ---------------------------------------------------------------------------------------


def data_teller(note: Callable[[Described], object], silent: bool) -> Callable[[int, Any], None]:
    """A function that sends a description of a training loader's data, once, before any is drawn.

    The record keeps the first description. ``note`` sends it; ``silent``: there is no record.
    """
    told: set[int] = set()

    def tell(number: int, data: Any) -> None:
        if not silent and number not in told:
            told.add(number)
            note(Described({f"data {number}": data_print(data)}))

    return tell


def data_print(data: Any) -> dict[str, Any]:
    """A data set's class, its length, and a hash of three items.

    Restores all RNG states, also those of generators that the data set holds. Data without numbered
    items has only its class.
    """
    put_back, states = _generators_put_back(data), look()
    found = {"kind": type(data).__qualname__, **_looked_up(data)}
    put(states)
    for restore in put_back:
        restore()
    return found


def _generators_put_back(data: Any) -> list[Callable[[], object]]:
    """Functions that restore the states of all generators in a data set and its parts."""
    found: list[Callable[[], object]] = []
    layer = [data]
    for _ in range(_LAYERS):
        layer = [getattr(each, "bit_generator", each) for each in layer]  # numpy's
        for each in layer:
            for kind, get, restore in _GENERATORS:
                if isinstance(each, kind):
                    found.append(partial(getattr(each, restore), getattr(each, get)()))
        parts = chain.from_iterable(map(gc.get_referents, layer))
        held = (each for each in parts if not isinstance(each, type | ModuleType | FunctionType))
        layer = list(islice(held, _MOST_PARTS))
    return found


def _looked_up(data: Any) -> dict[str, Any]:
    try:
        length = len(data)
        numbers = sorted({0, length // 2, length - 1}) if length else []
        return {"length": length, "items": checksum_of_state([_plain(data[n]) for n in numbers])}
    except Exception:  # the user's class may raise anything
        return {}


def _plain(item: Any) -> Any:
    match item:
        case np.ndarray() if item.dtype != object:
            return [str(item.dtype), item.shape, item.tobytes()]
        case np.generic():
            return item.item()
        case Mapping():
            return {str(key): _plain(value) for key, value in item.items()}
        case list() | tuple():
            return [_plain(each) for each in item]
        case _ if hasattr(item, "__dataclass_fields__"):
            return {name: _plain(getattr(item, name)) for name in item.__dataclass_fields__}
    return item


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Differences between the data and the record's.

    Args:
        then: the record's descriptions.
        now: worker 0's.
    """
    for name, here in now.items():
        there = then.get(name)
        if there is None or there == here:
            continue
        which = "training data" if name == "data 0" else f"training {name}"
        if there.get("kind") != here["kind"]:
            yield f"{which}: of type {here['kind']}, {there.get('kind')} in the run"
        elif there.get("length") != here.get("length"):
            yield f"{which}: {here.get('length')} items, {there.get('length')} in the run"
        else:
            yield f"{which}: items have another content than in the run"


def check_same_data(record: Record, anyway: bool, said: Mapping[str, Any]) -> None:
    """Check that the data that worker 0 describes are the record's, unless ``anyway``.

    Raises:
        UserError: naming what differs.
    """
    refuse_changes(list(differences(record.told, said)), anyway)
