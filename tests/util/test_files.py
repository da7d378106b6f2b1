"""Files are written whole, and damaged checkpoints are told from good ones."""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch

from hybridtrain.util import files
from hybridtrain.util.files import (
    fault_of,
    interrupted_in,
    is_archive,
    seal,
    write_named,
    write_whole,
)


@pytest.mark.parametrize("nameless", [True, False])
def test_a_file_is_the_old_one_or_the_new_one_and_never_a_part(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    if not nameless:
        monkeypatch.setattr(files, "_NAMELESS", 0)
    write_whole(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()

    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and [*path.parent.iterdir()] == [path]
    monkeypatch.undo()
    (path.parent / ".last.ckpt.part").write_bytes(b"left by somebody who was killed")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and [*path.parent.iterdir()] == [path]


def test_a_name_with_a_zero_byte_is_an_error_of_the_system_like_others(tmp_path: Path) -> None:
    """As a record or a configuration from elsewhere may have it; the text is that of the caller."""
    for path in (tmp_path / "a\0b.ckpt", tmp_path / "a\0b" / "last.ckpt"):
        with pytest.raises(OSError, match="zero byte"):
            write_whole(path, b"new")
    assert [*tmp_path.iterdir()] == []


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


WRITING = """
import sys
from pathlib import Path
from hybridtrain.util.files import write_whole
for n in range(10**6):
    write_whole(Path(sys.argv[1]), bytes([n % 256]) * 2**20)
"""


def test_a_new_file_has_its_own_name_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ended between a name beside it and the renaming left a hidden file."""
    if not hasattr(os, "O_TMPFILE"):
        pytest.skip("files without a name are Linux's")
    renamed: list[Any] = []
    monkeypatch.setattr(os, "replace", lambda *args, **rest: renamed.append(args))
    write_whole(tmp_path / "new.ckpt", b"first")
    assert [x.name for x in tmp_path.iterdir()] == ["new.ckpt"] and not renamed
    write_whole(tmp_path / "new.ckpt", b"second")  # not at its place: it would have been renamed
    assert renamed == [(".new.ckpt.part", "new.ckpt")]
    assert (tmp_path / "new.ckpt").read_bytes() == b"first"


def test_a_fifo_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="a device or a FIFO"):
        write_whole(path, b"new")
    assert path.is_fifo() and [x.name for x in tmp_path.iterdir()] == ["fifo"]


def test_whoever_is_killed_while_writing_leaves_a_whole_file_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    if not _without_name(tmp_path):
        pytest.skip("this file system has no files without a name")
    for number in range(5):
        writer = Popen([sys.executable, "-c", WRITING, str(path)])
        deadline = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline
        time.sleep(0.013 * number)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        content = path.read_bytes()
        assert len(content) == 2**20 and len(set(content)) == 1
        # Only between its name and its place, microseconds, it could have left the name.
        assert sum(p.name.startswith(".") for p in tmp_path.iterdir()) <= 1
        path.unlink()


def _without_name(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except (OSError, AttributeError):
        return False
    return True


# ---- checksums ----------------------------------------------------------------------------------


def saved(path: Path) -> bytes:
    weights = torch.arange(300, dtype=torch.float32)
    content = io.BytesIO()
    torch.save({"state_dict": {"w": weights}, "epoch": 3, "names": ["a", "b"]}, content)
    seal(content)
    seal(content)  # once is enough
    path.write_bytes(content.getvalue())
    return path.read_bytes()


def test_a_whole_checkpoint_has_no_fault_and_one_cut_short_has(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    whole = saved(path)
    assert fault_of(path) is None
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 22, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert fault_of(path) is not None, length
    path.write_bytes(whole[:1000] + bytes(len(whole) - 1000))  # the disk lost what came later
    assert fault_of(path) is not None
    assert fault_of(tmp_path / "b.ckpt") == "there is no such file"
    assert fault_of(tmp_path) is not None


@pytest.mark.slow
def test_every_byte_that_has_changed_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    """``torch.load`` would load some of these without a word, with other weights."""
    path = tmp_path / "a.ckpt"
    whole, noticed, wrong = saved(path), 0, 0
    before = torch.load(path, weights_only=True)
    for place in range(0, len(whole), 2):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        fault = fault_of(path)
        noticed += fault is not None
        if fault is None:
            assert _same(before, torch.load(path, weights_only=True)), place
        elif "of its data/0 is" in fault:
            with suppress(RuntimeError):
                wrong += not _same(before, torch.load(path, weights_only=True))
    assert wrong >= 300 * 4 // 2, "the checksums are needed"
    assert noticed > wrong


def test_a_checkpoint_written_by_others_is_checked_as_well(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"w": torch.zeros(1000)}, path)
    assert fault_of(path) is None
    whole = path.read_bytes()
    path.write_bytes(whole[:2000] + b"!" + whole[2001:])
    assert fault_of(path) == "the checksum of its data/0 is wrong"
    assert torch.load(path, weights_only=True)["w"].sum() != 0, "torch does not look"


def test_a_size_that_torch_would_believe_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"w": torch.zeros(1000)}, path)
    whole = bytearray(path.read_bytes())
    entry = whole.index(b"PK\x01\x02")  # the table of contents
    whole[entry + 24 : entry + 28] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(whole)
    assert fault_of(path) == "the size of its data.pkl is wrong"


def test_an_archive_is_told_by_its_beginning_however_its_end_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"w": torch.zeros(3)}, path)
    whole = path.read_bytes()
    end = whole.rindex(b"PK\x06\x07")  # of an archive on several disks
    path.write_bytes(whole[: end + 16] + b"\x09\0\0\0" + whole[end + 20 :])
    assert is_archive(path)
    assert "damaged" in str(fault_of(path))
    path.write_bytes(whole[1:])
    assert not is_archive(path)


def test_a_sealed_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    saved(path)
    for mmap in (False, True):
        assert torch.load(path, weights_only=True, mmap=mmap)["epoch"] == 3


def _same(one: dict[str, object], other: dict[str, object]) -> bool:
    w, v = one["state_dict"]["w"], other["state_dict"]["w"]  # type: ignore[index]
    return torch.equal(w, v) and (one["epoch"], one["names"]) == (other["epoch"], other["names"])


def test_an_archive_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    assert fault_of(tmp_path / "a.ckpt") == "it is no checkpoint"


@pytest.mark.parametrize("name", ["checkpoints", "mine"])
def test_the_checkpoint_of_an_early_end_is_not_among_the_others(name: str, tmp_path: Path) -> None:
    path = interrupted_in(tmp_path / name)
    assert path.parent != tmp_path / name and tmp_path in path.parents
    assert name == "checkpoints" or tmp_path / name in path.parents, "what is beside is not ours"


# ---- files that a user names --------------------------------------------------------------------


def test_a_named_file_is_written_through_links_and_into_what_takes_bytes(tmp_path: Path) -> None:
    real, link, dangling = tmp_path / "real", tmp_path / "link", tmp_path / "dangling"
    real.write_bytes(b"old")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "new")
    write_named(link, b"text")
    write_named(dangling, b"text")
    assert link.is_symlink() and real.read_bytes() == (tmp_path / "new").read_bytes() == b"text"
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    write_named(null, b"text")
    assert null.is_symlink() and Path("/dev/null").is_char_device()
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    write_named(tmp_path / "fifo", b"text")
    assert os.read(reader, 9) == b"text" and (tmp_path / "fifo").is_fifo()
    os.close(reader)


def test_a_fifo_without_a_reader_is_refused_at_once_and_a_full_device_says_so(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="nothing reads"):
        write_named(tmp_path / "fifo", b"text")
    assert (tmp_path / "fifo").is_fifo()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_named(full, b"text")
    assert full.is_symlink() and Path("/dev/full").is_char_device()


def test_the_file_of_standard_output_is_appended_to(tmp_path: Path) -> None:
    """``json=/dev/stdout >file``: a new file in its place would lose what is printed later."""
    path, former = tmp_path / "out", os.dup(1)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"table ")
    os.dup2(fd, 1)
    try:
        write_named(Path("/proc/self/fd/1"), b"figures")
    finally:
        os.dup2(former, 1)
        os.close(former)
    assert path.read_bytes() == b"table figures" and os.fstat(fd).st_ino == path.stat().st_ino
    os.close(fd)
