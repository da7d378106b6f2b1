"""Files that appear whole or not at all, and how a damaged checkpoint is told from a good one.

Writing: what is written has no name until all of it is on the disk; then it gets its own. If there
is such a file already, it gets one beside that, and takes its place by renaming, which a file
system does at once. So whoever is killed leaves the old file and no half of a new one.

Checking: a checkpoint is a zip archive in which ``torch.save`` keeps a CRC-32 of each record.
``torch.load`` does not compare them (torch is built with ``MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS``)
and takes weights in which bits have flipped for good ones; here they are compared. No second file
has to be kept beside the first, and checkpoints written by anybody can be checked. What no CRC
covers is the archive's table of contents; for that a checkpoint written here has one in the
archive's comment, which other readers pass over (:func:`seal`).
"""

from __future__ import annotations

import io
import os
import struct
import time
import zipfile
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

_NAMELESS = getattr(os, "O_TMPFILE", 0)  # Linux, and not on every file system
_LONGEST = 200  # of 255 bytes that names may have
_SEAL = b"hybridtrain crc32 %08x"
_SEAL_BYTES = len(_SEAL % 0)


def interrupted_in(folder: Path) -> Path:
    """Where a run that keeps its checkpoints in ``folder`` writes the one of its early end.

    Not among them: callbacks and users list that folder, and count or delete what they find. Beside
    ``checkpoints``, which is made for a run; what is named otherwise is the user's, so below it.
    """
    beside = folder.name == "checkpoints"
    return (folder.parent if beside else folder / "interrupted") / "interrupted.ckpt"


def short(path: str | Path) -> str:
    """The path as seen from the working directory, where it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """The file is there with all its content, or not at all, also if the machine loses power.

    Raises:
        OSError: if it could not be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = f".{path.name[:_LONGEST]}.part"
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)  # somebody was killed in the midst of this
        if not _write_part(part, folder, content, path.name):
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise
    finally:
        os.close(folder)


def _write_part(part: str, folder: int, content: bytes | memoryview, name: str) -> bool:
    """All of it is on the disk before it has a name, where the file system can do that.

    Returns whether that is its own ``name``, which it gets at once unless another file has it.
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
    """Add the checksum of its table of contents to what ``torch.save`` has written."""
    with zipfile.ZipFile(content) as archive:
        start, comment = archive.start_dir, archive.comment
    if comment:
        return
    end = content.seek(-2, io.SEEK_END) + 2
    content.write(struct.pack("<H", _SEAL_BYTES))  # the comment's length
    with content.getbuffer() as whole:
        checksum = zlib.crc32(whole[start:end])
    content.write(_SEAL % checksum)


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; ``None`` if every checksum is right.

    A file that nobody has touched since it was last asked for is not read again.
    """
    state = _settled(path)
    if state is not None and state in _known:
        return _known[state]
    fault = _fault_of(path)
    if state is not None:
        _known[state] = fault
    return fault


SETTLED_S = 2.0  # clocks of file systems: a later change has a later time
_known: dict[tuple[int, ...], str | None] = {}


def _settled(path: Path) -> tuple[int, ...] | None:
    """What is another one if the file is changed; ``None`` if that cannot be known yet."""
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
            bad = archive.testzip() or _unsealed(path, archive)
            names = archive.namelist()
    except FileNotFoundError:
        return "there is no such file"
    except zipfile.BadZipFile as error:
        cut = "not a zip" in str(error)  # the end, with the table of contents, is missing
        return "it is cut short, or no checkpoint" if cut else f"it is damaged ({error})"
    except Exception as error:  # readers of damaged files raise whatever they stumble over
        return f"it cannot be read ({type(error).__name__}: {error})"
    if bad is not None:
        return f"the checksum of its {bad.partition('/')[2] or bad} is wrong"
    if not any(name.endswith("data.pkl") for name in names):
        return "it is no checkpoint"
    return None


def _unsealed(path: Path, archive: zipfile.ZipFile) -> str | None:
    """The table of contents, if it is not the one whose checksum is in the comment."""
    with path.open("rb") as file:
        file.seek(archive.start_dir)
        rest = file.read()
    comment = archive.comment
    contents = rest[: len(rest) - len(comment)]
    (promised,) = struct.unpack("<H", contents[-2:])
    if len(comment) == promised and not comment.startswith(_SEAL[:12]):
        return None  # written by somebody else
    return None if comment == _SEAL % zlib.crc32(contents) else "table of contents"
