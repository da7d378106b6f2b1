"""Damage to files and data, the same for the same seed; and a process in which readers bear it."""

from __future__ import annotations

import os
import pickle
import random
import resource
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hybridtrain.errors import UserError

EXTREMES = [
    *(-1, -5, 0, 1, 2**31, 2**32, 2**63, 10**30, 10**400),
    *(1e30, -1e308, float("nan"), float("inf"), float("-inf"), 0.5),
    *("", "x", "-5", "nan", "1e40", "\0", "../../x", "/dev/zero", "9" * 50),
    *(None, True, False, [], {}, [[]], [None], {"x": 1}, {"": None}),
]
WORDS = [
    *(b"-1", b"-5", b"0", b"1e40", b"1e-400", b"nan", b"inf", b"-inf", b"x", b"", b"\xff\xfe"),
    *(b"4294967296", b"9" * 40, b"1_0", b"0x10", b"\0", b",", b'"', b"|", b":", b"\n\n", b"\\"),
    *(b"/dev/zero", b"..", b"a" * 3000, "\u0663\u0664".encode(), b"#", b"\r", b"1:1 1:1", b"0 0\n"),
]
EXTRA_BYTES = 2**30  # of address space, beyond what the process has: more is unbounded
BUSY_S, CASE_S = 10.0, 60.0  # of the processor, and in all: a case that takes longer hangs

Case = Callable[[random.Random, int], None]  # raises UserError, or is content


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Some bytes are others, missing, repeated; or the end is."""
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        at, n = draw.randrange(len(content) + 1), draw.choice((1, 2, 4, 8, 64))
        before, after = content[:at], content[at:]
        match draw.randrange(8):
            case 0 if after:
                content = before + bytes([after[0] ^ 1 << draw.randrange(8)]) + after[1:]
            case 1:
                content = before
            case 2:
                content = before + after[n:]
            case 3:
                content = before + after[:n] * draw.choice((2, 3, 50)) + after[n:]
            case 4:
                content = before + draw.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * n + after[n:]
            case 5:
                word = draw.choice((0, 1, 2**31 - 1, 2**32 - 1)).to_bytes(4, draw.choice(_ORDERS))
                content = before + word + after[4:]
            case 6:
                content = before + draw.randbytes(n) + after[n:]
            case 7:
                content = _with_another_word(content, draw)
    return content


_ORDERS: list[Any] = ["little", "big"]


def _with_another_word(content: bytes, draw: random.Random) -> bytes:
    """What lies between two separators of a text."""
    separators = [i for i, byte in enumerate(content[:4000]) if byte in b" ,\n:|;\t"]
    if len(separators) < 2:
        return content + draw.choice(WORDS)
    place = draw.randrange(len(separators) - 1)
    start, stop = separators[place], separators[place + 1]
    return content[: start + 1] + draw.choice(WORDS) + content[stop:]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all that lies in mappings and lists."""
    members = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in members:
        yield (*path, key)
        if isinstance(value, dict | list | tuple):
            yield from places(value, (*path, key))


def swapped(tree: Any, draw: random.Random, others: list[Any]) -> tuple[str, Any]:
    """Put something else in one place, or take it away; where and what, and the tree."""
    path = draw.choice(list(places(tree)))
    other = draw.choice([*others, _AWAY])
    return f"{path} := {str(other)[:60]!r}", _put(tree, path, other)


_AWAY = object()


def _put(tree: Any, path: tuple[Any, ...], other: Any) -> Any:
    key, *rest = path
    members = dict(tree.items() if isinstance(tree, dict) else enumerate(tree))
    if rest:
        members[key] = _put(members[key], tuple(rest), other)
    elif other is _AWAY:
        del members[key]
    else:
        members[key] = other
    if isinstance(tree, dict):
        return type(tree)(members)
    return type(tree)(members.values())


# ---- a process that may hang, take too much memory, or die ---------------------------------------


class Hangs(BaseException):
    """Nobody catches it."""


def faults(case: Case, n: int, seed: str) -> tuple[Counter[str], list[str]]:
    """Try cases 0 to n - 1 in a fork: how they ended, and each that was neither read nor refused.

    A case ends well if it returns, or raises ``UserError`` of one line.
    """
    ends: Counter[str] = Counter()
    found: list[str] = []
    first = 0
    while first < n:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _be_the_child(case, range(first, n), seed, writer)
        os.close(writer)
        last = first - 1
        for number, end, text in _said(reader, pid):
            last = number
            ends[end] += 1
            if text:
                found.append(f"{seed} {number}: {end}: {text}")
        _, status = os.waitpid(pid, 0)
        first = last + 1
        if first < n:  # it has died of the next one
            ends["dead"] += 1
            found.append(f"{seed} {first}: dead: status {status}")
            first += 1
    return ends, found


def _said(reader: int, pid: int) -> Iterator[tuple[int, str, str]]:
    with os.fdopen(reader, "rb") as pipe:
        while True:
            if not select.select([reader], [], [], 3 * CASE_S)[0] and not pipe.peek(1):
                os.kill(pid, signal.SIGKILL)
                return
            try:
                yield pickle.load(pipe)
            except EOFError:
                return


def _be_the_child(case: Case, numbers: range, seed: str, writer: int) -> None:
    try:
        signal.signal(signal.SIGALRM, _hangs)
        signal.signal(signal.SIGPROF, _hangs)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA_BYTES, size + EXTRA_BYTES))
        for number in numbers:
            os.write(writer, pickle.dumps((number, *_end_of(case, number, seed))))
    finally:
        os._exit(0)


def _hangs(signum: int, frame: FrameType | None) -> None:
    raise Hangs


def _end_of(case: Case, number: int, seed: str) -> tuple[str, str]:
    signal.setitimer(signal.ITIMER_PROF, BUSY_S)
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    began_s = time.monotonic()
    try:
        case(random.Random(f"{seed}/{number}"), number)
        return "read", ""
    except UserError as error:
        return ("lines", repr(str(error))) if "\n" in str(error).strip() else ("refused", "")
    except Hangs:
        return "hang", f"after {time.monotonic() - began_s:.0f} s\n{traceback.format_exc()[-800:]}"
    except MemoryError:
        return "memory", traceback.format_exc()[-800:]
    except AssertionError as error:
        return "nonsense", str(error) or traceback.format_exc()[-800:]
    except BaseException:
        return "traceback", traceback.format_exc()[-1500:]
    finally:
        with suppress(Hangs):
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
