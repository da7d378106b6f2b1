"""What names code is read from files and directories that no other user can have written."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.errors import UserError
from hybridtrain.util import own_directory
from hybridtrain.util.own_directory import (
    Foreign,
    OwnDirectory,
    check_below,
    stranger_of,
    stranger_to,
    why_not_own,
)
from tests.support.strangers import STRANGER, give_away

GROUPS = {os.getegid(), *os.getgroups()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run/.hydra").mkdir(parents=True)
    (tmp_path / "run/.hydra/config.yaml").write_text("mine")
    return tmp_path / "run"


def read(run: Path) -> str | None:
    with OwnDirectory(run, f"resume={run.name}") as opened:
        return opened.text(".hydra/config.yaml")


def test_a_file_of_this_user_is_read_and_a_missing_one_is_none(run: Path) -> None:
    assert read(run) == "mine"
    with OwnDirectory(run, "x") as opened:
        assert opened.text("nothing") is None
        assert opened.text("nowhere/nothing") is None
        opened.check("nothing")


PARTS = ["", ".hydra", ".hydra/config.yaml"]


@pytest.mark.parametrize("part", PARTS)
def test_another_users_directory_or_file_is_refused_by_name_and_owner(
    part: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(run / part, monkeypatch)
    with pytest.raises(Foreign, match=rf"^resume=run: {run / part} belongs to .*{STRANGER}\)"):
        read(run)


@pytest.mark.parametrize("part", PARTS)
def test_what_all_users_can_write_is_refused_with_the_command_that_mends_it(
    part: str, run: Path
) -> None:
    path = run / part
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(Foreign, match=rf"can be written by everybody, .* say chmod o-w {path}$"):
        read(run)
    path.chmod(path.stat().st_mode & ~0o002)
    assert read(run) == "mine"


def status(mode: int, uid: int | None = None, gid: int | None = None) -> os.stat_result:
    uid = os.geteuid() if uid is None else uid
    gid = os.getegid() if gid is None else gid
    return os.stat_result((mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


def test_a_group_may_write_if_this_user_is_in_it() -> None:
    """A umask of 002 with a group of one's own, and the folders of a project, are ordinary."""
    for gid in GROUPS:
        assert stranger_of(status(stat.S_IFDIR | 0o2775, gid=gid)) is None
        assert stranger_of(status(stat.S_IFREG | 0o664, gid=gid)) is None
    other = max(GROUPS) + 1
    assert stranger_of(status(stat.S_IFREG | 0o644, gid=other)) is None
    for mode in (stat.S_IFDIR | 0o2775, stat.S_IFREG | 0o664):
        said = stranger_of(status(mode, gid=other))
        assert said == (
            f"can be written by a group that you are not in (number {other})",
            "say chmod g-w",
        )


NO_ONE = 0xFFFFFFFF
OWN, USER, OWN_GROUP, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20  # tags
GROUP_OF_OTHERS = max(GROUPS) + 1


def put_list(path: Path, *named: tuple[int, int, int], mask: int = 7) -> None:
    """Give a file an access control list: tag, permissions and number of those that it names."""
    entries = [(OWN, 7, NO_ONE), (OWN_GROUP, 5, NO_ONE), (MASK, mask, NO_ONE), (OTHER, 5, NO_ONE)]
    content = struct.pack("<I", 2)
    for entry in sorted([*entries, *named]):
        content += struct.pack("<HHI", *entry)
    try:
        os.setxattr(path, "system.posix_acl_access", content)
    except (AttributeError, OSError):
        pytest.skip("no access control lists here")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("tag", "number", "kind"),
    [(USER, STRANGER, "user"), (GROUP, GROUP_OF_OTHERS, "group")],
)
def test_what_an_access_list_lets_others_write_is_refused(
    part: str, tag: int, number: int, kind: str, run: Path
) -> None:
    """With a list, the group's bits of the mode are its mask, and the group is one's own."""
    path = run / part
    put_list(path, (tag, 7, number))
    with pytest.raises(
        Foreign, match=rf"by another {kind} \(number {number}, of its ACL\), .* setfacl -b {path}$"
    ):
        read(run)
    if part:
        assert "of its ACL" in str(stranger_to(path if path.is_file() else path / "config.yaml"))
    os.removexattr(path, "system.posix_acl_access")
    path.chmod(0o700)
    assert read(run) == "mine"


@pytest.mark.parametrize("part", PARTS)
def test_an_access_list_that_lets_no_other_write_is_allowed(part: str, run: Path) -> None:
    put_list(run / part, (USER, 5, STRANGER), (USER, 7, os.geteuid()), (GROUP, 7, os.getegid()))
    assert read(run) == "mine"
    put_list(run / part, (USER, 7, STRANGER), mask=5)
    assert read(run) == "mine"
    put_list(run / part, (USER, 7, 0))
    assert read(run) == "mine"


def test_a_sticky_directory_may_have_an_access_list(run: Path) -> None:
    put_list(run, (USER, 7, STRANGER))
    run.chmod(run.stat().st_mode | stat.S_ISVTX)
    assert read(run) == "mine"


def test_root_may_write_and_in_a_sticky_directory_nobody_replaces_files_of_others() -> None:
    assert stranger_of(status(stat.S_IFDIR | 0o755, uid=0)) is None
    assert stranger_of(status(stat.S_IFDIR | 0o1777, uid=0)) is None
    assert stranger_of(status(stat.S_IFDIR | 0o1777, uid=STRANGER)) is not None


@pytest.mark.parametrize("part", [".hydra", ".hydra/config.yaml"])
def test_a_link_within_a_directory_is_not_followed(part: str, run: Path) -> None:
    """A stranger's directory may have links to any file of this user's."""
    path = run / part
    path.rename(run.parent / "elsewhere")
    path.symlink_to(run.parent / "elsewhere")
    with pytest.raises(UserError, match=r"links are not followed there"):
        read(run)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_of_this_user_to_an_output_directory_is_followed(
    absolute: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = run.parent / "outputs"
    outputs.symlink_to(run.parent if absolute else ".")
    assert read(outputs / "run") == "mine"
    monkeypatch.chdir(run.parent)
    assert read(Path("outputs/run/../outputs/run")) == "mine"


def test_a_link_of_another_user_on_the_way_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lead to a directory of this user's that has the stranger's content: a clone."""
    link = run.parent / "link"
    link.symlink_to(run)
    give_away(link, monkeypatch)
    with pytest.raises(Foreign, match=rf"leads through a link of another user .*{STRANGER}"):
        read(link)


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match=r"a cannot be read \(Too many levels of symbolic links\)"):
        OwnDirectory(tmp_path / "a", "resume=a")


def test_a_directory_that_is_exchanged_while_it_is_read_leads_nowhere_else(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the directory above can do so: what was judged is what is read."""
    evil = run.parent / "evil"
    (evil / ".hydra").mkdir(parents=True)
    (evil / ".hydra/config.yaml").write_text("theirs")
    with OwnDirectory(run, "x") as opened:
        run.rename(run.parent / "moved")
        run.symlink_to(evil)
        assert opened.text(".hydra/config.yaml") == "mine"


@pytest.mark.parametrize("moment", range(12))
@pytest.mark.parametrize("part", PARTS[1:])
def test_a_name_that_is_exchanged_at_any_moment_gives_no_content_of_the_stranger(
    part: str, moment: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that call of the reader to the system, a link to the stranger's file is there."""
    evil = run.parent / "evil"
    (evil / ".hydra").mkdir(parents=True)
    (evil / ".hydra/config.yaml").write_text("theirs")
    calls = []

    def exchanging(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            calls.append(found)
            if len(calls) == moment:
                (run / part).rename(run.parent / "kept")
                (run / part).symlink_to(evil / part)
            return found

        return called

    for name in ("open", "fstat"):
        monkeypatch.setattr(os, name, exchanging(getattr(os, name)))
    try:
        assert read(run) == "mine"
    except UserError as error:
        assert "links are not followed there" in str(error)


def test_files_below_a_folder_are_judged_with_the_directories_on_the_way(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "a/b").mkdir(parents=True)
    (run / "data").mkdir()
    (run / "data").chmod(0o777)  # without such files
    (run / "a/b/x.yaml").write_text("mine")
    (run / "link").symlink_to("a")
    (run / "itself").symlink_to(".")
    check_below(run, "x", ".yaml")
    for part in ("a/b/x.yaml", "a/b", "a", "."):
        before = (run / part).stat().st_mode
        (run / part).chmod(0o777)
        with pytest.raises(Foreign, match="can be written by everybody"):
            check_below(run, "x", ".yaml")
        (run / part).chmod(before)
    (run / "a/link.yaml").symlink_to(run.parent / "theirs.yaml")
    check_below(run, "x", ".yaml")
    (run.parent / "theirs.yaml").write_text("theirs")
    give_away(run.parent / "theirs.yaml", monkeypatch)
    with pytest.raises(Foreign, match=r"theirs\.yaml belongs to another user"):
        check_below(run, "x", ".yaml")


def test_no_descriptor_is_left_whatever_happens(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir()))
    read(run)
    for path in (run / "nowhere", run / ".hydra/config.yaml", run / "a\0b"):
        with pytest.raises(UserError):
            OwnDirectory(path, "x")
    for part in reversed(PARTS):
        (run / part).chmod(0o777)
        with pytest.raises(Foreign):
            read(run)
    assert len(list(fds.iterdir())) == before


def test_a_fifo_does_not_wait(run: Path) -> None:
    (run / ".hydra/config.yaml").unlink()
    os.mkfifo(run / ".hydra/config.yaml")
    with pytest.raises(UserError, match="is a FIFO or a device"):
        read(run)


def test_without_o_path_the_directory_itself_is_judged(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "O_PATH", raising=False)
    plain = os.O_RDONLY | os.O_CLOEXEC
    monkeypatch.setattr(own_directory, "_LOOK", plain)
    monkeypatch.setattr(own_directory, "_FOLDER", plain | os.O_NOFOLLOW | os.O_DIRECTORY)
    assert read(run) == "mine"
    run.chmod(0o777)
    with pytest.raises(Foreign):
        read(run)


def test_code_is_made_of_a_file_of_data_only_if_it_is_the_one_in_an_own_directory(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / "record.bin"
    path.write_text("mine")
    with path.open("rb") as file:
        assert why_not_own(file, path, "replay") is None
        (run / "other").write_text("another")
        (run / "other").rename(path)
        assert why_not_own(file, path, "replay") == f"replay: {path} was replaced while it was read"
    with path.open("rb") as file:
        run.chmod(0o777)
        assert "can be written by everybody" in str(why_not_own(file, path, "replay"))
