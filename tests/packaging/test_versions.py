"""``scripts/versions.py``: its rows, what it makes of results; nothing is installed here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import versions
from make_environment import SetupError

ROWS = {row.name: row for row in versions.ROWS}


class Played(versions.Trial):
    """An environment that a test makes, or cannot make."""

    fails: str | None = None
    said = "12 passed in 3.21s"

    def make(self) -> None:
        if self.fails is not None:
            raise SetupError(self.fails)

    def test(self) -> str:
        return self.said


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "install.md"
    file.write_text(f"before\n\n{versions.BEGIN}{versions.END}\n\nbehind\n")
    monkeypatch.setattr(versions, "PAGE", file)
    monkeypatch.setattr(versions, "Trial", Played)
    return file


def test_the_page_has_a_row_for_each_environment() -> None:
    text = (versions.ROOT / "docs" / "install.md").read_text()
    assert versions.written(text, {}) == text, "run scripts/versions.py"
    assert len(ROWS) == len(versions.ROWS) >= 10


def test_the_pinned_row_is_what_the_constraints_pin() -> None:
    pins = (versions.ROOT / "constraints.txt").read_text()
    row = ROWS["pinned"]
    assert f"\ntorch=={row.torch}\n" in pins and f"\nhydra-core=={row.hydra}\n" in pins


def test_the_list_says_what_was_not_tried(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert versions.main(["--list"]) == 0
    assert capsys.readouterr().out.count("| not tried |") == len(ROWS)


def test_a_result_is_written_beside_those_of_other_rows(page: Path) -> None:
    assert versions.main(["pinned"]) == 0
    assert versions.main(["lightning"]) == 0
    found = versions.known(page.read_text())
    assert set(found) == {"pinned", "lightning"}
    assert re.fullmatch(r"12 passed in 3\.21s \(\d{4}-\d\d-\d\d\)", found["pinned"])
    assert page.read_text().startswith("before\n") and page.read_text().endswith("behind\n")


def test_a_row_that_cannot_be_had_says_why_and_is_no_failure(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "pip failed: ERROR: No matching distribution (the whole log: /tmp/x)"
    monkeypatch.setattr(Played, "fails", why)
    assert versions.main(["torch-2.15"]) == 0
    said = versions.known(page.read_text())["torch-2.15"]
    assert said.startswith("not to be had: pip failed: ERROR: No matching distribution (20")


def test_tests_that_fail_are_its_exit_status(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Played, "said", "1 failed, 11 passed in 3.21s")
    assert versions.main(["pinned"]) == 1


def test_an_unknown_row_of_the_version_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        versions.main(["torch-1.0"])
    assert stop.value.code == 2 and "no row torch-1.0" in capsys.readouterr().err


def test_a_python_that_there_is_not_is_named() -> None:
    with pytest.raises(SetupError, match=r"no python3\.99 on this machine"):
        versions.interpreter("3.99")


def test_the_rows_versions_take_the_place_of_the_projects_bounds(tmp_path: Path) -> None:
    needed = list(versions.Trial(ROWS["lightning"], tmp_path, False).needed())
    assert "lightning>=2.6,<2.7,!=2.6.2,!=2.6.3" in needed and "hydra-core==1.3.8" in needed
    assert not [text for text in needed if text.startswith(("torch", "pytorch-lightning"))]
    newest = list(versions.Trial(ROWS["hydra-newest"], tmp_path, False).needed())
    assert "hydra-core>=1.4.0.dev0" in newest


def test_the_core_tests_exist() -> None:
    assert [path for path in versions.TESTS if not (versions.ROOT / path).exists()] == []
