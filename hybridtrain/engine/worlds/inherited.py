"""Give a forked worker files, finalizers and pools of its own in place of inherited ones.

A fork copies memory, but neither threads nor what the kernel keeps of an open file.

- Files. Forked processes share the position in an open file. A worker opens each file that can be
  read again, at the same place, under the same number: whatever reads from it (``zipfile``, h5py)
  has a position of its own. Files that are only written keep the common position, so what workers
  write lies one behind the other.
- Finalizers. Those of the parent are not a worker's; those that it makes itself run at its end.
- Objects. Before workers start a :class:`~hybridtrain.util.reachable.Walk` looks at what data,
  model and callbacks hold. Pools are made anew in each worker. What no worker can use is said in
  one line.
"""

from __future__ import annotations

import fcntl
import os
import random
import stat
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridtrain.util.reachable import ReachedObject, Walk

# ---- descriptors, finalizers, process pools ------------------------------------------------------

_DESCRIPTORS = Path("/proc/self/fd")
_OURS = "/memfd:"  # shared memory of a run
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | getattr(os, "O_DIRECT", 0)


def own_files() -> None:
    """In a forked worker: get a position of its own in each file that it may read."""
    for fd, flags in _shared_files():
        with suppress(OSError):  # named before the fork
            _open_again(fd, flags)


def own_finalizers() -> None:
    """In a forked worker: drop the parent's finalizers; those made from now on run at its end."""
    kind: Any = weakref.finalize
    for each in list(kind._registry):
        each.atexit = False
    kind._registered_with_atexit = False  # among the parent's functions, which it has forgotten


def own_pools() -> None:
    """In a forked worker: leave the parent's process pools to it."""
    if (pools := sys.modules.get("concurrent.futures.process")) is not None:
        pools._threads_wakeups.clear()


def end_pools() -> None:
    """At a worker's end: let process pools end that nobody has shut down.

    At the end of a program Python does so first; at that of a process of ``multiprocessing`` it
    waits for their processes before, for ever.
    """
    if (pools := sys.modules.get("concurrent.futures.process")) is not None:
        pools._python_exit()


def _open_again(fd: int, flags: int) -> None:
    own = _opened_again(fd, flags)
    try:
        os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, fd, inheritable=os.get_inheritable(fd))
    finally:
        os.close(own)


def _opened_again(fd: int, flags: int) -> int:
    """Another descriptor of the file, whatever has become of its name."""
    return os.open(f"{_DESCRIPTORS}/{fd}", flags & _KEPT_FLAGS | os.O_CLOEXEC)


def _shared_files() -> Iterator[tuple[int, int]]:
    """Files with a position that readers share: all that can be read and keep nobody out."""
    printed = {_identity(fd) for fd in (0, 1, 2, *_printing())}
    for fd, flags in _open_files():
        reads = flags & os.O_ACCMODE != os.O_WRONLY
        if reads and _identity(fd) not in printed and not _is_locked(fd):
            yield fd, flags


def _open_files() -> Iterator[tuple[int, int]]:
    """Descriptors of files, and their flags; without shared memory of ours."""
    if not _DESCRIPTORS.is_dir():  # not Linux
        return
    for fd in [int(entry.name) for entry in _DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # that of the directory, which is closed
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            is_file = stat.S_ISREG(os.fstat(fd).st_mode) and not flags & getattr(os, "O_PATH", 0)
            if is_file and not str((_DESCRIPTORS / str(fd)).readlink()).startswith(_OURS):
                yield fd, flags


def _may_write() -> bool:
    """Whether a file is open for writing, other than those that ``print`` writes to."""
    if not _DESCRIPTORS.is_dir():
        return True
    printed = {_identity(fd) for fd in (0, 1, 2, *_printing())}
    return any(
        flags & os.O_ACCMODE != os.O_RDONLY and _identity(fd) not in printed
        for fd, flags in _open_files()
    )


def _printing() -> Iterator[int]:
    """The descriptors that ``print`` writes to."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(Exception):  # there is none, or it is no file
            yield stream.fileno()  # type: ignore[union-attr]


def _identity(fd: int) -> tuple[int, int]:
    try:
        found = os.fstat(fd)
    except OSError:
        return -1, -1
    return found.st_dev, found.st_ino


def _is_locked(fd: int) -> bool:
    """Whether it keeps others out (``flock``): another descriptor would not."""
    try:
        return " WRITE " in Path(f"/proc/self/fdinfo/{fd}").read_text()
    except OSError:
        return False


def _kept_in_common() -> Iterator[str]:
    """Lines on files that may not be opened again.

    They are not opened for it: to close one would release this process' ``fcntl`` locks on it.
    """
    effective = os.access in os.supports_effective_ids
    for fd, flags in _shared_files():
        wanted = os.R_OK if flags & os.O_ACCMODE == os.O_RDONLY else os.R_OK | os.W_OK
        if not os.access(_DESCRIPTORS / str(fd), wanted, effective_ids=effective):
            name = (_DESCRIPTORS / str(fd)).readlink()
            yield f"{name} may not be opened a second time by this user, {_ONE_POSITION}"


# ---- before the fork: what parts hold -----------------------------------------------------------

_NAMED = 4  # objects in one line
_INSTEAD = "open it on first use, or in a setup hook, which each worker calls"
_ONE_POSITION = (
    f"so all workers share one position in it, and read what others look for; {_INSTEAD}"
)


@dataclass
class Inherited:
    """Resources of the parent, found before workers start.

    ``lines``: on what they cannot use, or share. For forked workers ``pools`` are to be made anew,
    and ``parts`` may hold files; ``beyond``: objects that are not looked into.
    """

    lines: list[str] = field(default_factory=list)
    pools: list[Any] = field(default_factory=list)
    parts: Mapping[str, Any] = field(default_factory=dict)
    beyond: Sequence[Any] = ()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """In a worker: with pools of its own; a fork's end does not write out files, this does."""
        for pool in self.pools:
            _renew(pool)
        try:
            yield
        finally:
            for reached in _walk(self.parts, self.beyond) if _may_write() else ():
                if reached.mark is _file:
                    _flush(reached.value)


def look_through(
    parts: Mapping[str, Any],
    data: Collection[str],
    n_workers: int,
    forked: bool,
    beyond: Sequence[Any] = (),
) -> Inherited:
    """Look at what workers inherit, and write out what files have in their buffers.

    Args:
        parts: that workers get, by their names.
        data: names of the parts from which samples come.
        n_workers: W, on this host.
        forked: workers are forked; else they get pickles.
        beyond: objects that are not looked into.
    """
    found = Inherited(parts=parts, beyond=beyond) if forked else Inherited()
    walk = _walk(parts, beyond)
    paths: defaultdict[str, list[str]] = defaultdict(list)  # by what is wrong
    for reached in walk:
        judge = reached.mark
        if not (forked or judge in _ALWAYS):
            continue
        if (line := judge(_Case(reached, n_workers, reached.part in data))) is not None:
            paths[line].append(reached.path)
        elif judge is _pool and _is_open(reached.value):
            found.pools.append(reached.value)
    found.lines += [_in_one_line(names, line) for line, names in paths.items()]
    if forked:
        found.lines += [line for each in threading.enumerate() for line in _at_work(each, walk)]
        found.lines += _kept_in_common() if n_workers > 1 else ()
    return found


def _in_one_line(names: Sequence[str], line: str) -> str:
    """``names``: of objects that have the same fault."""
    others = ", ".join(names[1:_NAMED]) + f" and {len(names) - _NAMED} others" * (
        len(names) > _NAMED
    )
    return f"{names[0]} {line}" + f"; the same holds for {others}" * (len(names) > 1)


def _walk(parts: Mapping[str, Any], beyond: Iterable[Any]) -> Walk[_Judge]:
    return Walk(parts, beyond, _judge_of)


@dataclass(frozen=True)
class _Case:
    """``of_data``: samples come from it."""

    reached: ReachedObject[Any]
    n_workers: int
    of_data: bool

    @property
    def value(self) -> Any:
        return self.reached.value


_Judge = Callable[[_Case], str | None]  # returns what is wrong with it, if anything is

# ---- files --------------------------------------------------------------------------------------


def _file(case: _Case) -> str | None:
    """Also writes out its buffer, or each worker would write that."""
    _flush(case.value)
    try:
        flags = fcntl.fcntl(case.value.fileno(), fcntl.F_GETFL)
        seeks = case.value.seekable()
    except (OSError, ValueError):  # closed
        return None
    mode = flags & os.O_ACCMODE
    if case.n_workers == 1 or mode == os.O_WRONLY or not seeks:
        return None
    if not _DESCRIPTORS.is_dir():
        return f"is an open file that cannot be opened a second time here, {_ONE_POSITION}"
    if mode == os.O_RDONLY or flags & os.O_APPEND or case.of_data:
        return None
    return (
        "is a file that is open for reading and writing, in which each worker has a position of "
        "its own, so they write over one another; open it with 'a', or give each worker a file of "
        "its own in a setup hook"
    )


def _flush(file: Any) -> None:
    with suppress(OSError, ValueError):  # a full disk; it is closed
        file.flush()


def _hdf5(case: _Case) -> str | None:
    """Reading goes by descriptors, which each worker has of its own."""
    if not case.value or case.value.mode == "r":
        return None
    return f"is a file that is open for writing, and several processes destroy it; {_INSTEAD}"


# ---- pools, threads and locks -------------------------------------------------------------------

_ARGUMENTS = {  # of constructors, and the attributes that keep them
    "concurrent.futures.thread.ThreadPoolExecutor": {
        "max_workers": "_max_workers",
        "thread_name_prefix": "_thread_name_prefix",
        "initializer": "_initializer",
        "initargs": "_initargs",
    },
    "concurrent.futures.process.ProcessPoolExecutor": {
        "max_workers": "_max_workers",
        "mp_context": "_mp_context",
        "initializer": "_initializer",
        "initargs": "_initargs",
        "max_tasks_per_child": "_max_tasks_per_child",
    },
    "multiprocessing.pool.ThreadPool": {
        "processes": "_processes",
        "initializer": "_initializer",
        "initargs": "_initargs",
    },
    "multiprocessing.pool.Pool": {
        "processes": "_processes",
        "initializer": "_initializer",
        "initargs": "_initargs",
        "maxtasksperchild": "_maxtasksperchild",
        "context": "_ctx",
    },
}


_OF_POOLS = ("concurrent.futures.", "multiprocessing.")


def _pool(case: _Case) -> str | None:
    """Each worker makes it anew, by its constructor."""
    known = all(hasattr(case.value, name) for name in _arguments_of(type(case.value))[1].values())
    return None if known else f"is a pool whose threads forked workers do not have; {_INSTEAD}"


def _is_open(pool: Any) -> bool:
    """Whether it was not shut down."""
    closed = getattr(pool, "_shutdown", False) or getattr(pool, "_shutdown_thread", False)
    return not closed and getattr(pool, "_state", "RUN") == "RUN"


def _renew(pool: Any) -> None:
    base, names = _arguments_of(type(pool))
    base.__init__(pool, **{name: getattr(pool, attribute) for name, attribute in names.items()})


def _arguments_of(kind: type) -> tuple[Any, dict[str, str]]:
    """The class of the pool that is known, and where it keeps its arguments."""
    base = next(each for each in kind.__mro__ if _name_of(each) in _ARGUMENTS)
    return base, _ARGUMENTS[_name_of(base)]


def _future(case: _Case) -> str | None:
    if case.value.done():
        return None
    return (
        "is a result that a thread of this process has still to compute: forked workers do not "
        "have it, and would wait for ever; wait for it before training, or begin it in a setup "
        "hook, which each worker calls"
    )


_NO_THREAD = (
    "is a running thread, and forked workers do not have it: what waits for it there waits for "
    "ever; start it on first use, or in a setup hook, which each worker calls"
)


def _thread(case: _Case) -> str | None:
    return _NO_THREAD if case.value.is_alive() else None


def _at_work(thread: Any, walk: Walk[_Judge]) -> Iterator[str]:
    """On a thread that no part holds, but that works on an object of one."""
    target = getattr(thread, "_target", None)
    if walk.reaches(thread) or str(getattr(target, "__module__", "")).startswith(_OF_POOLS):
        return
    given = (getattr(target, "__self__", None), *getattr(thread, "_args", ()))
    if any(walk.reaches(each) for each in given if not isinstance(each, tuple | type)):
        name = getattr(target, "__qualname__", type(thread).__qualname__)
        yield f"{thread.name} ({name}) {_NO_THREAD}"


def _lock(case: _Case) -> str | None:
    if not _is_held(case.value):
        return None
    return (
        "is a lock that is held while training starts, and a forked worker that wants it waits "
        "for ever; release it before training, or make it in a setup hook, which each worker calls"
    )


def _is_held(lock: Any) -> bool:
    if hasattr(lock, "locked"):
        return bool(lock.locked())
    if lock._is_owned():  # reentrant, and this thread's
        return True
    if free := lock.acquire(blocking=False):
        lock.release()
    return not free


# ---- connections, processes and random generators -----------------------------------------------


def _connection(case: _Case) -> str | None:
    return (
        "is a connection that was opened here, and its library does not allow forked processes to "
        f"use it; {_INSTEAD}"
    )


def _socket(case: _Case) -> str | None:
    try:
        case.value.getpeername()
    except OSError:  # closed, or not connected
        return None
    return _mixed("a connection", case.n_workers)


def _process(case: _Case) -> str | None:
    process = case.value
    silent = process.stdin is None and process.stdout is None
    return None if silent or process.returncode is not None else _mixed("a process", case.n_workers)


def _mixed(what: str, n_workers: int) -> str | None:
    if n_workers == 1:
        return None
    return (
        f"is {what} that all {n_workers} workers would write to and read from at once, so each "
        f"would get parts of others' answers; {_INSTEAD}"
    )


def _generator(case: _Case) -> str | None:
    """Loaders and samplers draw the order of samples, which is the same in all workers."""
    value, owner = case.value, case.reached.owner
    if isinstance(value, random.SystemRandom) or any(value is each for each in _of_process()):
        return None
    if isinstance(owner, torch.utils.data.DataLoader | torch.utils.data.Sampler):
        return None
    if case.n_workers == 1 or not (case.of_data or isinstance(owner, torch.utils.data.Dataset)):
        return None
    return (
        "is a random generator, of which each worker has a copy, so all draw the same numbers (as "
        "under ddp); if they are to differ, make it on first use from a seed and the worker's "
        "number (trainer.global_rank)"
    )


def _of_process() -> Iterator[Any]:
    """The process' own generators, with which all libraries draw."""
    yield getattr(random.random, "__self__", None)
    yield getattr(np.random.rand, "__self__", None)
    yield torch.default_generator


def _study(case: _Case) -> str | None:
    """Describe an Optuna study in memory, which workers cannot report to."""
    return (
        "is an Optuna study in this process' memory: what a worker reports to it stays in the "
        "worker, so nothing is pruned; give create_study a storage that processes share, as "
        'storage=JournalStorage(JournalFileBackend("study.log"))'
    )


def _nothing(case: _Case) -> str | None:
    """It is not looked into."""
    return None


_FILES = ("TextIOWrapper", "BufferedReader", "BufferedWriter", "BufferedRandom", "FileIO")
_JUDGES: dict[str, _Judge] = {
    **dict.fromkeys(_ARGUMENTS, _pool),
    **{f"_io.{name}": _file for name in _FILES},
    "h5py._hl.files.File": _hdf5,
    "concurrent.futures._base.Future": _future,
    "threading.Thread": _thread,
    "_thread.lock": _lock,
    "_thread.RLock": _lock,
    "sqlite3.Connection": _connection,
    "builtins.Environment": _connection,  # of lmdb, as it calls itself
    "lmdb.cffi.Environment": _connection,
    "psycopg2.extensions.connection": _connection,
    "_socket.socket": _socket,
    "subprocess.Popen": _process,
    "random.Random": _generator,
    "numpy.random._generator.Generator": _generator,
    "numpy.random.mtrand.RandomState": _generator,
    "torch._C.Generator": _generator,
    "optuna.storages._in_memory.InMemoryStorage": _study,
    "logging.Logger": _nothing,
}
_ALWAYS = (_generator, _study)  # also where workers get pickles


def _judge_of(kind: type) -> _Judge | None:
    """How objects of a class are judged, by its name: most of these are not imported."""
    names = map(_name_of, kind.__mro__)
    return next((_JUDGES[name] for name in names if name in _JUDGES), None)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
