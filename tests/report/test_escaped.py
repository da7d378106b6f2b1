"""No text of a user's becomes a tag, whatever it is a part of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.report import page, svg
from hybridtrain.report.charts import style
from hybridtrain.report.history import ALWAYS
from hybridtrain.report.runs import read_run, sheet
from hybridtrain.util.streams import printable

EVIL = '<b>&"\x1b'
STEERS = "\x1b[2J\x9b31m\x07\u202e\udcff"


@pytest.mark.parametrize(
    "made",
    [
        page.heading(EVIL),
        page.paragraph(EVIL),
        page.note(EVIL),
        page.code(EVIL),
        page.link(Path(EVIL), EVIL, Path()),
        page.figure("", EVIL),
        page.legend([(EVIL, style(0))]),
        page.details(EVIL, []),
        page.table([EVIL], [[EVIL]]),
        page.page(EVIL, [], EVIL),
        svg.text("ink", 0, 0, EVIL),
        svg.document(1, 1, EVIL, EVIL, []),
    ],
)
def test_every_part_of_a_page_or_picture_shows_a_users_text_escaped(made: str) -> None:
    assert "<b>" not in made and "&lt;b&gt;&amp;" in made and "\x1b" not in made


def test_texts_of_another_users_run_do_not_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    summary = {"strategy": STEERS, "error": STEERS, "exit": 1, "metrics": {STEERS: 1.0}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / ".hydra/overrides.yaml").write_text(json.dumps([f"a={STEERS}"]))
    (tmp_path / ".hydra/config.yaml").write_text(json.dumps({STEERS: {"x": [STEERS]}}))
    row = ",".join("1" for _ in (*ALWAYS, STEERS))
    (tmp_path / "history.csv").write_text(f"{','.join(ALWAYS)},{STEERS[:-1]}\n{row}\n")
    run = read_run(tmp_path)
    assert run.error == r"\x1b[2J\x9b31m\x07\u202e\udcff" and run.broken == ()
    shown = repr(run) + "".join(run.curve.columns) + "".join(run.metrics)
    assert printable(shown) == shown and len(run.curve.columns) == len(ALWAYS) + 1


def test_text_of_another_user_in_a_message_does_not_steer_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    to_stderr(f"{STEERS} belongs to another user\n\tnext line")
    said = r"hybridtrain: \x1b[2J\x9b31m\x07\u202e\udcff belongs to another user"
    assert capsys.readouterr().err == f"{said}\n\tnext line\n"


def test_a_cell_of_a_sheet_does_not_steer_a_terminal() -> None:
    """Names of directories are in it."""
    made = sheet([STEERS], [{STEERS: STEERS}, {STEERS: f"={STEERS}"}])
    said = r"\x1b[2J\x9b31m\x07\u202e\udcff"
    assert made.splitlines() == [f"\ufeff{said}", said, f"'={said}"]
