"""Read back what names code: from files and directories that no other user can have written.

Theory of operation. A check of a path says nothing about the file that is opened a moment later:
whoever can write in a directory on the way puts another file, or a link, there in between. So a
directory is opened once and judged by its descriptor, its files are opened relative to that without
following links, and each file is judged by its own descriptor. Links on the way to the directory
are followed if they are this user's or root's. A name that another user has moved away since leads
nowhere else.

May be written by: this user, root, and members of a group that this user is in (a umask of 002, a
group's project folder). In a sticky directory (``/tmp``) nobody replaces a file of another's. Users
and groups that an access control list names count as others do: with a list, the group's bits of
the mode are only its mask.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePath
from types import TracebackType

from hybridtrain.errors import UserError
from hybridtrain.util.files import TEXT_BYTES, reason_of

_MOST_LINKS = 40
_LOOK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC  # elsewhere than on Linux: plain
_FOLDER = _LOOK | os.O_NOFOLLOW | os.O_DIRECTORY
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_ACL, _HEADER_BYTES = "system.posix_acl_access", 4
_ENTRY = struct.Struct("<HHI")  # tag, permissions, number of the user or group
_USER, _GROUP, _MASK = 0x02, 0x08, 0x10
_WRITE = 2


class Foreign(UserError):
    """Another user can have written what was to be read."""


def _owner(found: os.stat_result) -> int:
    return found.st_uid


def stranger_of(found: os.stat_result) -> tuple[str, str] | None:
    """Describe who else can change a file or directory, and the way out; ``None``: nobody."""
    if (owner := _owner(found)) not in (os.geteuid(), 0):
        said = f"belongs to another user (number {owner})"
        return said, "make a copy and give that"
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return "can be written by everybody", "say chmod o-w"
    if found.st_mode & stat.S_IWGRP and found.st_gid not in (os.getegid(), *os.getgroups()):
        said = f"can be written by a group that you are not in (number {found.st_gid})"
        return said, "say chmod g-w"
    return None


def named_stranger_of(path: Path, found: os.stat_result) -> tuple[str, str] | None:
    """Describe who else an access control list (POSIX ACL) lets write, as :func:`stranger_of`.

    Args:
        path: may be that of a descriptor, in ``/proc``.
        found: its status.
    """
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return None
    try:
        entries = [*_ENTRY.iter_unpack(os.getxattr(path, _ACL)[_HEADER_BYTES:])]
    except (AttributeError, OSError):  # not on Linux, a file system without lists, or no list
        return None
    mask = next((allowed for tag, allowed, _ in entries if tag == _MASK), _WRITE)
    own = {_USER: (os.geteuid(), 0), _GROUP: (os.getegid(), *os.getgroups())}
    for tag, allowed, number in entries:
        if allowed & mask & _WRITE and number not in own.get(tag, (number,)):
            kind = "user" if tag == _USER else "group"
            said = f"can be written by another {kind} (number {number}, of its ACL)"
            return said, "say setfacl -b"
    return None


class OwnDirectory:
    """A directory that no other user can have written in, opened once.

    Args:
        path: may lead through links of this user's and root's.
        asked: the user's option, for messages: ``resume=DIR``.

    Raises:
        Foreign: if another user can write there, or a link on the way is another user's.
        UserError: if it cannot be opened.
    """

    def __init__(self, path: Path, asked: str) -> None:
        self.path, self._asked = path, asked
        try:
            self._fd = self._open()
        except UserError:
            raise
        except (OSError, ValueError) as error:  # zero bytes
            raise UserError(f"{asked}: {path} cannot be read ({reason_of(error)})") from error
        try:
            self._judge(self._fd, path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OwnDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory."""
        os.close(self._fd)

    def text(self, name: str) -> str | None:
        """The text of a file in the directory, or in one below it; ``None``: there is no such file.

        Bytes that are no text are kept as ``surrogateescape`` has them.

        Raises:
            Foreign: if another user can have written it.
            UserError: if it is a link, no regular file, or cannot be read.
        """
        try:
            with self._file(name) as fd, open(fd, "rb", closefd=False) as file:
                return file.read(TEXT_BYTES).decode(errors="surrogateescape")
        except FileNotFoundError:
            return None

    def check(self, name: str) -> None:
        """Check a file before a library opens it by name; it may be missing. Raises as ``text``."""
        with suppress(FileNotFoundError), self._file(name):
            pass

    def holds(self, name: str, found: os.stat_result) -> bool:
        """Whether a file in the directory is this one. Raises as ``text``."""
        with suppress(FileNotFoundError), self._file(name) as fd:
            return os.path.samestat(os.fstat(fd), found)
        return False

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        """The descriptor of a regular file. Raises FileNotFoundError; others as ``text``."""
        parts, fds = PurePath(name).parts, [self._fd]
        try:
            for n, part in enumerate(parts, 1):
                fds.append(self._below(fds[-1], part, is_last=n == len(parts)))
                path = self.path.joinpath(*parts[:n])
                self._judge(fds[-1], path)
            if not stat.S_ISREG(os.fstat(fds[-1]).st_mode):
                raise UserError(f"{self._asked}: {path} is a FIFO or a device, and no file")
            yield fds[-1]
        finally:
            for fd in fds[1:]:
                os.close(fd)

    def _below(self, folder: int, name: str, is_last: bool) -> int:
        """Open a file, or a directory on the way to it. Raises FileNotFoundError, UserError."""
        try:
            return os.open(name, _READ if is_last else _FOLDER, dir_fd=folder)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # zero bytes
            is_link = isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR)
            why = "links are not followed there" if is_link else reason_of(error)
            raise UserError(
                f"{self._asked}: {name} in {self.path} cannot be read: {why}"
            ) from error

    def _judge(self, fd: int, path: Path) -> None:
        status, opened = os.fstat(fd), Path(f"/proc/self/fd/{fd}")  # O_PATH has no fgetxattr
        found = stranger_of(status) or named_stranger_of(opened, status)
        if found is not None:
            said, way_out = found
            name = f" {path}" if way_out.startswith("say") else ""
            raise Foreign(
                f"{self._asked}: {path} {said}, and names the code that would be run; if you trust "
                f"it, {way_out}{name}"
            )

    def _open(self) -> int:
        """Open the directory, name by name, so that each link on the way can be judged."""
        if not hasattr(os, "O_PATH"):
            return os.open(self.path, _LOOK | os.O_DIRECTORY)
        fd = os.open(self.path.anchor or ".", _LOOK | os.O_DIRECTORY)
        try:
            left, n_links = [*reversed(self.path.relative_to(self.path.anchor).parts)], 0
            while left:
                found = os.open(left.pop(), _LOOK | os.O_NOFOLLOW, dir_fd=fd)
                if stat.S_ISLNK(os.fstat(found).st_mode):
                    n_links += 1
                    if n_links > _MOST_LINKS:
                        os.close(found)
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    target = self._target(found)
                    left += reversed(target.relative_to(target.anchor).parts)
                    if not target.anchor:
                        continue
                    found = os.open(target.anchor, _LOOK | os.O_DIRECTORY)
                os.close(fd)
                fd = found
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _target(self, link: int) -> PurePath:
        """Where a link leads; closes it."""
        try:
            owner = _owner(os.fstat(link))
            if owner not in (os.geteuid(), 0):
                raise Foreign(
                    f"{self._asked}: {self.path} leads through a link of another user (number "
                    f"{owner}), who decides what it names; give the directory itself"
                )
            return PurePath(os.readlink("", dir_fd=link))
        finally:
            os.close(link)


def check_below(folder: Path, asked: str, ending: str) -> None:
    """Check the files with this ending in a folder and below it, before a library opens them.

    So are the directories on the way to them. Links are followed to what is as much this user's
    own; hidden directories are left out. Raises as :class:`OwnDirectory`.
    """
    left: list[tuple[Path, ...]] = [(folder,)]  # a directory behind those on the way to it
    while left:
        way = left.pop()
        here, names = way[-1], list[str]()
        if os.path.realpath(here) in map(os.path.realpath, way[:-1]):
            continue  # a link to a directory that it is in
        with suppress(OSError):  # closed to this user: nothing reads it
            names = os.listdir(here)  # noqa: PTH208  (names)
        wanted = [name for name in names if name.endswith(ending)]
        for each in way if wanted or len(way) == 1 else ():
            OwnDirectory(each, asked).close()
        for path in (Path(os.path.realpath(here / name)) for name in wanted):
            with OwnDirectory(path.parent, asked) as opened:
                opened.check(path.name)
        below = (here / name for name in names if not name.startswith("."))
        left += [(*way, each) for each in below if os.path.isdir(each)]  # noqa: PTH112


def stranger_to(path: Path) -> str | None:
    """Describe who else can change a data file; ``None``: nobody, or it cannot be read.

    Its directory is judged as well: there a file can be replaced.
    """
    try:
        for each in (path.parent, path):
            found = stranger_of(status := each.stat()) or named_stranger_of(each, status)
            if found is not None:
                return f"{'it' if each is path else 'its folder'} {found[0]}"
    except OSError:
        pass
    return None


def why_not_own(file: BufferedReader, path: Path, asked: str) -> str | None:
    """Why no code may be made of a file that was opened as data; ``None``: it is this user's own.

    Args:
        file: opened at ``path``.
        path: must have the file still, in a directory as :class:`OwnDirectory` allows it.
        asked: the user's option, for messages.
    """
    path = path.expanduser()
    try:
        with OwnDirectory(path.parent, asked) as directory:
            same = directory.holds(path.name, os.fstat(file.fileno()))
            return None if same else f"{asked}: {path} was replaced while it was read"
    except UserError as error:
        return str(error)
