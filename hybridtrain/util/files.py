"""Write files atomically, and verify the checksums of checkpoints.

Writing: the content goes to a file without a name (``O_TMPFILE``), which is linked to its name once
it is synced. Where that name exists, it is linked to another one and renamed, which is atomic. A
process killed in between leaves the old file.

Checking: a checkpoint is a zip archive in which ``torch.save`` keeps a CRC-32 of each record.
``torch.load`` does not compare them (torch is built with ``MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS``)
and loads weights with flipped bits; :func:`fault_of` compares them, in checkpoints of any program.
No CRC covers the archive's table of contents; :func:`seal` puts one into the archive's comment,
which other readers ignore.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import os
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from io import BufferedReader
from mmap import PROT_READ, mmap
from pathlib import Path
from typing import BinaryIO, cast

from hybridtrain.errors import UserError
from hybridtrain.util.pickle_calls import call_for_memory

_NAMELESS = getattr(os, "O_TMPFILE", 0)  # Linux, and not on every file system
_LONGEST = 200  # of 255 bytes that names may have
_SEAL = b"hybridtrain crc32 %08x"
_SEAL_BYTES = len(_SEAL % 0)


def interrupted_in(folder: Path) -> Path:
    """The checkpoint of an interrupted run that keeps its checkpoints in ``folder``.

    It is not among them: callbacks list that folder, and count or delete what they find. It lies
    beside ``checkpoints``, which a run makes, and below any other folder, which is the user's.
    """
    beside = folder.name == "checkpoints"
    return (folder.parent if beside else folder / "interrupted") / "interrupted.ckpt"


_BEGINNINGS: list[str] = []  # working directories in which commands have begun


@contextmanager
def seen_from_here() -> Iterator[None]:
    """Let :func:`short` go by this working directory, though Hydra changes it for a job."""
    before = list(_BEGINNINGS)
    with suppress(FileNotFoundError):  # it has been deleted
        _BEGINNINGS.append(str(Path.cwd()))
    try:
        yield
    finally:
        _BEGINNINGS[:] = before


def short(path: str | Path) -> str:
    """The path as seen from the working directory of the command, where it lies below it."""
    relative = os.path.relpath(path, *_BEGINNINGS[-1:])
    return str(path) if relative.startswith("..") else relative


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write the file atomically, also if the machine loses power.

    Raises:
        OSError: if it could not be written; an earlier file is unchanged.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a name has no zero byte", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = f".{path.name[:_LONGEST]}.part"
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(FileNotFoundError):
            if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO):
                raise FileExistsError(errno.EEXIST, "it is a device or a FIFO")
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)  # left by a process that was killed
        if not _write_part(part, folder, content, path.name):
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise
    finally:
        os.close(folder)


def write_named(path: Path, content: bytes) -> None:
    """Write the file that a user names: atomically, at the end of its symbolic links.

    A character device, a FIFO that is read, and the file of standard output or error are written
    into, never replaced.

    Raises:
        OSError: if it could not be written, or the folder is missing.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    if found is None or not _takes_bytes(found):
        path = Path(os.path.realpath(path))
        path.parent.stat()  # a misspelt folder is not made
        write_whole(path, content)
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nothing reads this FIFO; give a file's name") from error
        raise
    os.set_blocking(fd, True)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def _takes_bytes(found: os.stat_result) -> bool:
    if stat.S_IFMT(found.st_mode) in (stat.S_IFCHR, stat.S_IFIFO):
        return True
    for stream in (1, 2):
        with suppress(OSError):  # closed
            if os.path.samestat(found, os.fstat(stream)):
                return True
    return False


def _write_part(part: str, folder: int, content: bytes | memoryview, name: str) -> bool:
    """Write and sync a file without a name, where the file system can, then link it.

    Returns whether it is linked to ``name`` already, which it is unless another file has the name.
    """
    fd, named = _open(part, folder)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
        if named:
            return False
        link = partial(os.link, f"/proc/self/fd/{fd}", dst_dir_fd=folder, follow_symlinks=True)
        try:
            link(name)
            return True
        except FileExistsError:
            link(part)
            return False


def _open(part: str, folder: int) -> tuple[int, bool]:
    if _NAMELESS and Path("/proc/self/fd").is_dir():
        with suppress(OSError):
            return os.open(".", _NAMELESS | os.O_WRONLY, 0o666, dir_fd=folder), False
    return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666, dir_fd=folder), True


# ---- checksums ----------------------------------------------------------------------------------


def seal(content: io.BytesIO) -> None:
    """Put the checksum of the table of contents into the comment of ``torch.save``'s archive."""
    with zipfile.ZipFile(content) as archive:
        start, comment = archive.start_dir, archive.comment
    if comment:
        return
    end = content.seek(-2, io.SEEK_END) + 2
    content.write(struct.pack("<H", _SEAL_BYTES))  # the comment's length
    with content.getbuffer() as whole:
        checksum = zlib.crc32(whole[start:end])
    content.write(_SEAL % checksum)


def is_archive(path: str | Path) -> bool:
    """Whether torch reads the file as an archive, which has checksums; it may be damaged."""
    with Path(path).open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def fault_of(path: Path) -> str | None:
    """Describe a damaged checkpoint in a few words; ``None`` if every checksum is right.

    The answer is cached until the file changes.
    """
    state = _settled(path)
    return _fault_of(path) if state is None else _settled_fault_of(path, state)


SETTLED_S = 2.0  # clocks of file systems: a later change has a later time


@cache
def _settled_fault_of(path: Path, state: tuple[int, ...]) -> str | None:
    """Read a file once for each of its states."""
    return _fault_of(path)


def _settled(path: Path) -> tuple[int, ...] | None:
    """A key that changes with the file; ``None`` if its last change is too recent to tell."""
    try:
        now = path.stat()
    except OSError:
        return None
    if time.time() - max(now.st_mtime, now.st_ctime) < SETTLED_S:
        return None
    return (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


def _fault_of(path: Path) -> str | None:
    try:
        if path.stat().st_size == 0:
            return "it is empty"
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            for entry in entries:  # before it is read: a few bytes may stand for terabytes
                if entry.compress_type != zipfile.ZIP_STORED:
                    return f"its {_name(entry)} is packed, and torch.save packs nothing"
            bad = archive.testzip() or _unsealed(path, archive)
            pickles = [] if bad else [x for x in entries if x.filename.endswith("data.pkl")]
            size = path.stat().st_size
            found = (call_for_memory(archive.read(x), size) for x in pickles)
            calls = next(filter(None, found), None)
    except FileNotFoundError:
        return "there is no such file"
    except zipfile.BadZipFile as error:
        cut = "not a zip" in str(error)  # the end, with the table of contents, is missing
        return "it is cut short, or no checkpoint" if cut else f"it is damaged ({error})"
    except Exception as error:  # readers of damaged files raise whatever they stumble over
        return f"it cannot be read ({type(error).__name__}: {error})"
    if bad is not None:
        return f"the checksum of its {bad.partition('/')[2] or bad} is wrong"
    for entry in entries:  # torch would read as many bytes as are promised
        if entry.file_size != entry.compress_size:
            return f"the size of its {_name(entry)} is wrong"
    return calls or (None if pickles else "it is no checkpoint")


def _name(entry: zipfile.ZipInfo) -> str:
    return entry.filename.partition("/")[2] or entry.filename


def fault_of_old(path: Path) -> str | None:
    """Describe the fault of a checkpoint that is no archive, as far as that is known unread."""
    with open_input(path, "the checkpoint") as file:
        if not os.fstat(file.fileno()).st_size:
            return None  # torch.load says so
        with mmap(file.fileno(), 0, prot=PROT_READ) as content:
            return call_for_memory(content, len(content))


def _unsealed(path: Path, archive: zipfile.ZipFile) -> str | None:
    """``table of contents`` if its checksum is not the one in the comment."""
    with path.open("rb") as file:
        file.seek(archive.start_dir)
        rest = file.read()
    comment = archive.comment
    contents = rest[: len(rest) - len(comment)]
    (promised,) = struct.unpack("<H", contents[-2:])
    if len(comment) == promised and not comment.startswith(_SEAL[:12]):
        return None  # not sealed
    return None if comment == _SEAL % zlib.crc32(contents) else "table of contents"


# ---- open files that a user names, after checks of their kind and size --------------------------
# A path may lead to a FIFO, which blocks the process that opens it; to a device, which never ends;
# or to a file larger than memory. All readers open their files here, or call :func:`check_input`
# before a library opens one by name.

TEXT_BYTES = 2**30  # of a text that is read as a whole


def open_input(path: str | Path, what: str, most_bytes: int | None = None) -> BufferedReader:
    """Open a regular file to read its bytes. Opening never waits.

    Args:
        path: as the user has given it.
        what: its name in messages: ``the alphabet file``.
        most_bytes: limit of its size.

    Raises:
        UserError: if it cannot be opened, is no regular file, or is too large.
    """
    try:
        fd = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, RuntimeError) as error:  # zero bytes; the home of a stranger
        raise _refused(path, what, reason_of(error)) from error
    found = os.fstat(fd)
    fault = None
    if not stat.S_ISREG(found.st_mode):
        fault = "it is a directory, a FIFO or a device, and no regular file"
    elif most_bytes is not None and found.st_size > most_bytes:
        fault = f"it has {found.st_size:,} bytes, and at most {most_bytes:,} are read"
    if fault is not None:
        os.close(fd)
        raise _refused(path, what, fault)
    return open(fd, "rb")  # noqa: PTH123  (a descriptor)


def check_input(path: str | Path, what: str) -> None:
    """Check as :func:`open_input` does, before a library opens the file by name."""
    open_input(path, what).close()


def read_text(path: str | Path, what: str, errors: str = "strict") -> str:
    """The whole text of a UTF-8 file, without a byte order mark; ``errors`` as in ``bytes.decode``.

    Raises:
        UserError: as :func:`open_input`, and if the file is no text.
    """
    with open_input(path, what, TEXT_BYTES) as file:
        try:
            return file.read().decode("utf-8-sig", errors)
        except (OSError, UnicodeDecodeError) as error:
            raise _refused(path, what, reason_of(error)) from error


def text_lines(path: str | Path, what: str) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each line of a file that :func:`read_text` reads.

    Lines end with LF, CRLF or CR; ``str.splitlines`` would also cut at characters of the text, such
    as U+2028.
    """
    text = io.StringIO(read_text(path, what), newline=None)
    yield from ((number, line.removesuffix("\n")) for number, line in enumerate(text, 1))


def reason_of(error: Exception) -> str:
    """Why a file could not be read, in a few words."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, UnicodeDecodeError):
        byte = f"byte {error.object[error.start]:#04x} at {error.start}"
        wide = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        return f"it is {'UTF-16' if wide else 'no UTF-8'} ({byte}); convert it to UTF-8"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _refused(path: str | Path, what: str, reason: str) -> UserError:
    gap = "" if what.endswith("=") else " "
    return UserError(f"cannot read {what}{gap}{path}: {reason}")


# ---- packed with gzip, which the first bytes say -------------------------------------------------

_GZIP = b"\x1f\x8b"
_LINE_BYTES = 2**25  # of one line


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressing it if it is gzip.

    Raises:
        UserError: if it cannot be read, or is damaged; also while it is read.
    """
    with open_input(path, "the file") as raw:
        try:
            packed = raw.read(len(_GZIP)) == _GZIP
            raw.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw) if packed else raw)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is damaged: {error}; pack it again with gzip") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from error


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each line; the length of a line is limited.

    Raises:
        UserError: also if it is no text.
    """
    with unpacked(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), 1):
            if len(line) == _LINE_BYTES:
                raise UserError(f"{path}, line {number} has more than {_LINE_BYTES:,} bytes")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number} cannot be read: {reason_of(error)}"
                ) from error
