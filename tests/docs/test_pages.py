"""Pages are as long as they may be, name what exists, and leave out no public name."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
FOLDERS = ("docs", "examples", "experiments", "masks", "sparseflash", "tests")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")
PUBLIC = [
    (module, name)
    for module in (
        "masks",
        "masks.analysis",
        "sparseflash",
        "sparseflash.advisor",
        "sparseflash.lab",
        "sparseflash.nn",
    )
    for name in importlib.import_module(module).__all__
]
REFERENCE = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))


def test_readme_has_at_most_120_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_design_has_at_most_1800_words():
    assert len((ROOT / "DESIGN.md").read_text().split()) <= 1800


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page):
    named = PATH.findall(page.read_text())
    history = page.parent.name == "notebook" or page.name == "CHANGELOG.md"
    assert history or [path for path in named if not (ROOT / path).exists()] == []


def test_files_that_design_pages_name_exist():
    known = [
        str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    ]
    for page in [ROOT / "DESIGN.md", *(ROOT / "docs/design").glob("*.md")]:
        named = re.findall(r"[\w/]+\.py\b", page.read_text())
        missing = [
            name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in known)
        ]
        assert missing == [], page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_name_modules_that_exist(page):
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    modules = {name for block in blocks for name in re.findall(r"python -m ([\w.]+)", block)}
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    assert missing == []


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_name_is_in_the_reference(module, name):
    found = getattr(importlib.import_module(module), name)
    paths = {f"{module}.{name}", getattr(found, "__name__", "")}
    if not inspect.ismodule(found):
        paths.add(f"{found.__module__}.{name}")
    entries = re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE)
    assert paths & {*entries} or any(entry.startswith(f"{module}.{name}.") for entry in entries)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_name_has_a_summary(module, name):
    """One sentence on the first line, or on the first two, and then a blank line."""
    found = getattr(importlib.import_module(module), name)
    summary = inspect.getdoc(found).split("\n\n")[0]
    assert summary.rstrip().endswith((".", ":")), summary
    assert len(summary) <= 250, summary


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_parameters_that_a_docstring_explains_exist(module, name):
    found = getattr(importlib.import_module(module), name)
    documented = [(name, found)]
    if inspect.isclass(found):
        documented += [
            (n, getattr(found, n)) for n, m in vars(found).items() if inspect.isroutine(m)
        ]
    for path, member in documented:
        own = not path.startswith("_") and (inspect.getdoc(member) or "")
        if own and (section := re.search(r"^Args:\n((?: {4}.*\n?|\n)*)", own, re.MULTILINE)):
            explained = re.findall(r"^ {4}(?! )([*\w, ]+):", section[1], re.MULTILINE)
            names = {part.strip(" *") for entry in explained for part in entry.split(",")}
            fields = {*getattr(member, "__annotations__", {}), *vars(found)}
            assert names <= {*inspect.signature(member).parameters} | fields, path
