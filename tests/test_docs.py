"""What the documentation names is there, and what it lists is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from enum import StrEnum
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

import hybridtrain
from hybridtrain.engine.recovery import roster
from hybridtrain.lightning.checkpointing import epoch_state
from tests import api_page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridtrain"
README = ROOT / "README.md"
DECISIONS = ROOT / "docs" / "decisions.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PAGE = pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])

FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
TOP = {"hybridtrain", "conf", "docs", "scripts", "tests"}
_PATH = re.compile(r"\b(?:[\w-]+/)+(?:[\w-]+\.(?:py|yaml|md|sh))?")
_SPOKEN = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"\bhybridtrain(?:\.[A-Za-z_]\w*)+")
_LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def paths_in(text: str) -> set[str]:
    """Those that begin with a folder of the repository or, in code marks, of the package."""
    found = {path for path in _PATH.findall(text) if path.split("/")[0] in TOP}
    for spoken in _SPOKEN.findall(text):
        match = _PATH.fullmatch(spoken)
        if match and spoken.split("/")[0] in FOLDERS:
            found.add(spoken)
    return found


def is_there(path: str) -> bool:
    return (ROOT / path).exists() or (PACKAGE / path).exists()


def resolves(name: str) -> bool:
    """Whether it is a module, or one that speaks of what follows. Nothing of ours is imported."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        at = ROOT.joinpath(*parts[:cut])
        file = at / "__init__.py" if at.is_dir() else at.with_suffix(".py")
        if file.is_file():
            rest = parts[cut : cut + 1]
            return all(re.search(rf"\b{part}\b", file.read_text()) for part in rest)
    return False


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = [title.lower() for title in _HEADING.findall(page.read_text())]
    return {"#" + re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@PAGE
def test_paths_and_names_of_modules_exist(page: Path) -> None:
    text = page.read_text()
    assert {path for path in paths_in(text) if not is_there(path)} == set()
    assert {name for name in _DOTTED.findall(text) if not resolves(name)} == set()


def test_what_does_not_exist_would_be_found() -> None:
    text = "`cli/nowhere.py`, hybridtrain/nowhere.py and `engine/policies/policy.py`"
    assert {p for p in paths_in(text) if not is_there(p)} == {
        "cli/nowhere.py",
        "hybridtrain/nowhere.py",
    }
    assert resolves("hybridtrain.engine.policies.Needs")
    assert not resolves("hybridtrain.engine.policies.Regiment")
    assert not resolves("hybridtrain.nowhere")


@PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in _LINK.findall(page.read_text()):
        if link.startswith("http"):
            continue
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link + anchor


def named_tests(text: str) -> tuple[int, list[str]]:
    """How many tests it names, and those that do not exist."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    return len(named), [
        f"{path}::{test}"
        for path, test in named
        if not re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE)
    ]


def test_the_tests_that_hold_faults_exist() -> None:
    pages = [(ROOT / "docs/faults" / name).read_text() for name in ("found.md", "gpu.md")]
    n_named, missing = named_tests("".join(pages))
    assert n_named > 90 and missing == []


def test_each_cause_of_faults_has_a_section_its_rows_and_two_examples() -> None:
    folder = ROOT / "docs/faults"
    head, *sections = re.split(r"^## ", (folder / "causes.md").read_text(), flags=re.MULTILINE)
    counts = {
        name.lower(): int(n) for name, n in re.findall(r"^\| \[(.*?)\].*?\| (\d+) \|", head, re.M)
    }
    assert list(counts) == [section.partition("\n")[0].lower() for section in sections]
    rows, others = map(int, re.findall(r"the (\d+) rows of .*; (\d+) rows are no faults", head)[0])
    assert sum(counts.values()) + others == rows
    assert len(re.findall(r"^\| ", (folder / "found.md").read_text(), re.MULTILINE)) >= rows
    for section in sections:
        examples = [line for line in section.splitlines() if line.startswith("- ")]
        assert len(examples) == 2 and all("](found.md#" in line for line in examples)
        assert all(named_tests(line) == (1, []) for line in examples), examples
        assert named_tests(section)[1] == []


def held_rows(page: Path) -> list[str]:
    """The rows of its tables whose last column is `held by`."""
    table = re.compile(r"^\| .* held by \|\n\|[ |-]+\n((?:\|.*\n)+)", re.MULTILINE)
    tables: list[str] = table.findall(page.read_text())
    return [row for table in tables for row in table.splitlines()]


@pytest.mark.parametrize(
    ("name", "at_least", "at_most"), [("comes_home", 16, 45), ("exactness", 40, 100)]
)
def test_each_promise_names_one_test_that_exists(name: str, at_least: int, at_most: int) -> None:
    page = ROOT / "docs" / f"{name}.md"
    found = [named_tests(row) for row in held_rows(page)]
    assert len(found) >= at_least and {n_named for n_named, _ in found} == {1}
    assert [missing for _, missing in found if missing] == []
    assert len(page.read_text().splitlines()) <= at_most, "it is one page"


def test_a_promise_that_is_no_longer_made_says_what_to_do_instead() -> None:
    text = (ROOT / "docs/exactness.md").read_text().partition("## No longer promised\n")[2]
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "| promise | who would miss it | instead |"
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert cells and all(len(row) == 3 and all(row) for row in cells)


def test_the_readme_is_a_front_page() -> None:
    assert len(README.read_text().splitlines()) <= 150
    named = {(ROOT / link).resolve() for link, _ in _LINK.findall(README.read_text()) if link}
    assert set((ROOT / "docs").glob("*.md")) <= named


def test_the_table_of_strategies_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README.read_text(), re.MULTILINE)
    files = {file.stem for file in (ROOT / "conf" / "strategy").glob("*.yaml")}
    assert sorted(rows) == sorted(files)


def test_every_option_of_a_strategy_is_listed() -> None:
    common = (ROOT / "conf" / "strategy" / "host" / "common.yaml").read_text()
    options = set(re.findall(r"^([a-z]\w*):", common, re.MULTILINE))
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert {each for each in options if f"`{each}`" not in page} == set()


Transitions = Mapping[tuple[StrEnum, StrEnum], StrEnum]


@pytest.mark.parametrize(
    ("number", "table"),
    [(1, roster.TABLE), (2, epoch_state.TABLE)],
    ids=["of a worker", "of an epoch"],
)
def test_the_states_on_the_page_are_those_of_the_code(number: int, table: Transitions) -> None:
    page = (ROOT / "docs" / "ways.md").read_text()
    text = page.split("| event | from | to |")[number].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    rows = [line for line in lines if len(line) == 3 and line[0][:1] != "-"]
    states = {str(state) for pair in table.items() for state in (pair[0][0], pair[1])}
    found = {
        (state, event): then
        for event, before, then in rows
        for state in (states if before == "every state" else before.split(", "))
    }
    assert found == {(str(state), str(event)): str(then) for (state, event), then in table.items()}


def test_decisions_are_numbered_and_each_is_in_the_contents_once() -> None:
    contents, _, entries = DECISIONS.read_text().partition("\n## 1. ")
    titles = re.findall(r"^## (\d+\. .*)$", "\n## 1. " + entries, re.MULTILINE)
    assert [int(title.split(".")[0]) for title in titles] == list(range(1, len(titles) + 1))
    assert re.findall(r"\[(\d+\. [^\]]*)\]\(#", contents) == titles
    assert len(titles) <= 40 and len(DECISIONS.read_text().splitlines()) <= 500


# ---- docs/api.md ---------------------------------------------------------------------------------


def test_the_page_of_python_is_that_of_the_code() -> None:
    assert api_page.PAGE.read_text() == api_page.page(), "run python -m tests.api_page"


def test_the_page_of_python_has_all_that_is_public_with_a_line_each() -> None:
    text = api_page.PAGE.read_text()
    stubs = ast.parse("\n".join(re.findall(r"```pyi\n(.*?)```", text, re.DOTALL)))
    defined = {each.name: each for each in stubs.body if not isinstance(each, ast.ImportFrom)}
    public = {name for name in hybridtrain.__all__ if not name.startswith("__")}
    assert public | {"Policy", "Needs", "Pushed", "Apply", "Exchange", "Offer"} <= set(defined)
    assert all(ast.get_docstring(each) for each in defined.values())
    for cls in (each for each in defined.values() if isinstance(each, ast.ClassDef)):
        methods = [each for each in cls.body if isinstance(each, ast.FunctionDef)]
        assert all(ast.get_docstring(x) for x in methods if x.name != "__init__"), cls.name


def test_a_new_public_function_is_on_the_page_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(path: str, *names: str, at_s: float | None = 1.0, **options: object) -> list[int]:
        """Replay a :class:`hybridtrain.Server` run. Return what came of it.

        More is not in one line.
        """
        raise NotImplementedError

    monkeypatch.setattr(hybridtrain, "replay_it", replay, raising=False)
    monkeypatch.setattr(hybridtrain, "__all__", [*hybridtrain.__all__, "replay_it"])
    block = api_page.page().partition("## replay_it\n")[2].partition("<!-- end of api -->")[0]
    assert "<!-- api: hybridtrain.replay_it -->" in block
    assert (
        "def replay_it(path: str, *names: str, at_s: float | None = 1.0, **options: object)"
        ' -> list[int]:\n    """Replay a `Server` run. Return what came of it."""' in block
    )


def test_the_site_has_whole_docstrings_in_place_of_the_stubs() -> None:
    spec = spec_from_file_location("directives", ROOT / "scripts/site/api_directives.py")
    assert spec is not None and spec.loader is not None
    directives = module_from_spec(spec)
    spec.loader.exec_module(directives)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="api.md"))
    text = directives.on_page_markdown(api_page.PAGE.read_text(), page=page)
    assert "```" not in text and "<!--" not in text
    named = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    assert named >= {
        *api_page.publics(),
        "hybridtrain.engine.policies.Pushed",
        "hybridtrain.errors.Lost",
    }
    assert "::: hybridtrain.DeepDist\n    options:\n" in text
    assert "      members: [train, model, stats]\n" in text and "      members: []\n" in text
    page.file.src_uri = "start.md"
    assert directives.on_page_markdown("<!-- api: x -->", page=page) == "<!-- api: x -->"
