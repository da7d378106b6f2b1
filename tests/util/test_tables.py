"""Tables that people, spreadsheets and pandas write: read as they are meant, or refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtrain.errors import UserError
from hybridtrain.util.files import text_lines
from hybridtrain.util.tables import read_table, whole_number

Cells = list[tuple[str, str]]


def read(path: Path, text: str, known: tuple[str, ...] = ()) -> Cells:
    path.write_bytes(text.encode())
    return [tuple(row.cells.values()) for row in read_table(path, "the table", ("a", "b"), known)]


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,x\n2,y z\n",
        "\ufeffa,b\r\n1,x\r\n\r\n2,y z",
        "a,b\r1,x\r2,y z\r",
        "a;b\n1;x\n2;y z\n",
        "a\tb\n1\tx\n2\ty z\n",
        "\n\na, b\n1, x\n , \n2,   y z  \n",
        "a,b,,\n1,x,,\n,,,\n2,y z,,,,,\n",
        '"a","b"\n"1","x"\n"2", "y z"\n',
        "b,other,a\nx,,1\ny z,more,2\n",
        ",a,b,a.1\n0,1,x,\n1,2,y z,1\n",
    ],
)
def test_what_spreadsheets_and_pandas_write_is_read_as_it_is_meant(
    text: str, tmp_path: Path
) -> None:
    assert read(tmp_path / "t.csv", text) == [("1", "x"), ("2", "y z")]


def test_a_separator_within_quotes_is_part_of_its_cell(tmp_path: Path) -> None:
    assert read(tmp_path / "t.csv", 'a,b\n1,"x, y"\n') == [("1", "x, y")]
    assert read(tmp_path / "t.csv", "a;b\n1;x, y\n") == [("1", "x, y")]
    assert read(tmp_path / "t.csv", 'a,b\n1,5" nails\n') == [("1", '5" nails')]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("1,x, y", "cells in the row: 3, columns in the header: 2; put quotes"),
        ("1", "cells in the row: 1, columns in the header: 2; write all of them"),
        ("1;x", "cells in the row: 1"),
        ("a,b", "the header stands here again; remove the line"),
        ("b,a", "the header stands here again; remove the line"),
    ],
)
def test_a_row_that_does_not_match_the_header_has_a_fault_and_no_cells(
    row: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(f"a,b\n1,x\n{row}\n\n2,y\n")
    good, bad, after = read_table(tmp_path / "t.csv", "the table", ("a", "b"))
    assert (good.fault, after.fault, after.line) == ("", "", 5)
    assert bad.line == 3 and bad.cells == {} and bad.fault.startswith(fault)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t.csv, line 1: the column a is missing \(needed: a,b; found: none\)"),
        ("1,x\n", r"line 1: the column a is missing \(needed: a,b; found: 1,x\); the first line"),
        ("\na|b\n", r"line 2: the column a is missing \(needed: a,b; found: a\|b\)"),
        ("a,b,b\n1,x,y\n", "line 1: the column b is there twice; rename or remove one"),
        ("a,b,c,c\n1,x,y,z\n", "line 1: the column c is there twice"),
        ('a,b\n1,"x\n2,y\n', "line 2: a quoted cell goes on in the line below"),
        (f"a,b\n1,{'x' * 200_000}\n", "cannot read the table .*t.csv, line 2: field larger than"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_with_its_line(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path / "t.csv", text, ("c",))


@pytest.mark.parametrize(
    ("encoding", "said"), [("utf-16", "it is UTF-16"), ("latin-1", "it is no UTF-8")]
)
def test_another_encoding_is_named_with_what_to_do(
    encoding: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,ä\n", encoding=encoding)
    with pytest.raises(UserError, match=rf"t\.csv: {said} .*convert it to UTF-8"):
        read_table(tmp_path / "t.csv", "the table", ("a", "b"))


def test_a_whole_number_may_be_written_as_pandas_writes_it() -> None:
    cells = ["64044", "64044.0", " 7 ", "6.5", "", "nan", "inf", "1_0", "x"]
    assert list(map(whole_number, cells)) == [64044, 64044, 7, *6 * [None]]


def test_lines_of_a_text_end_where_editors_end_them(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffa\u2028b\x85c\x0bd\r\n\r\ne\rf".encode())
    found = list(text_lines(tmp_path / "text", "the text"))
    assert found == [(1, "a\u2028b\x85c\x0bd"), (2, ""), (3, "e"), (4, "f")]
