"""Every Python block of the README, DESIGN and docs, and every example, runs on a CPU."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST_EXAMPLE = 60  # lines
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if BLOCK.search(path.read_text())
]

# What other packages warn of is not the reader's concern.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """The blocks of a page, one after another, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text("\n".join(BLOCK.findall(page.read_text())))
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_is_short(example):
    assert len(example.read_text().splitlines()) < LONGEST_EXAMPLE
