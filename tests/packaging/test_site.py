"""The pages of docs/ as a site: nothing is warned of, every page is reached, it reads from disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "scripts" / "site" / "mkdocs.yml"


def navigated(value: object) -> list[str]:
    match value:
        case str():
            return [value]
        case list():
            return [page for each in value for page in navigated(each)]
        case dict():
            return [page for each in value.values() for page in navigated(each)]
    raise AssertionError(value)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_every_page_once(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(site)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))
    nav = yaml.load(CONFIG.read_text(), Loader=yaml.BaseLoader)["nav"]
    assert sorted(navigated(nav)) == pages
    html = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert {page.replace("README.md", "index.md").replace(".md", ".html") for page in pages} <= html
    text = (site / "index.html").read_text()
    assert not re.search(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:css|js)"', text)
    assert "HybridStrategy" in (site / "api.html").read_text()
