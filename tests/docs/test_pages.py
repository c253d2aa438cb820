"""Pages are as long as they may be, name what exists, and leave out no public name."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any

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
        "masks.interop",
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


def routines(found: Any) -> list[tuple[str, Any]]:
    """A public function; or the public functions of a class or a module."""
    if not inspect.isclass(found) and not inspect.ismodule(found):
        return [(found.__name__, found)]
    public = [n for n, m in vars(found).items() if inspect.isroutine(m) and not n.startswith("_")]
    members = [(name, getattr(found, name)) for name in public]
    return [m for m in members if inspect.isclass(found) or m[1].__module__ == found.__name__]


def explained(member: Any) -> set[str]:
    """The parameters that a docstring explains."""
    own = inspect.getdoc(member) or ""
    section = re.search(r"^Args:\n((?: {4}.*\n?|\n)*)", own, re.MULTILINE)
    entries = re.findall(r"^ {4}(?! )([*\w, ]+):", section[1], re.MULTILINE) if section else []
    return {part.strip(" *") for entry in entries for part in entry.split(",")}


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_parameters_that_a_docstring_explains_exist(module, name):
    found = getattr(importlib.import_module(module), name)
    for path, member in [(name, found), *routines(found)]:
        if names := explained(member):
            fields = {*getattr(member, "__annotations__", {}), *vars(found)}
            assert names <= {*inspect.signature(member).parameters} | fields, path


@pytest.mark.parametrize("entry", re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE))
def test_a_docstring_explains_all_parameters_or_none_and_names_errors(entry):
    for path, member in routines(pkgutil.resolve_name(entry)):
        if not inspect.isfunction(member):
            continue
        parameters = {*inspect.signature(member).parameters} - {"self", "cls"}
        assert explained(member) in (set(), parameters), path
        tree = ast.parse(textwrap.dedent(inspect.getsource(member)))
        raises = any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(tree))
        assert not raises or path == "main" or "Raises" in (inspect.getdoc(member) or ""), path
