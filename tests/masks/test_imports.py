"""How the modules of masks import one another, and what `import masks` imports."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import masks

ROOT = Path(__file__).parents[2]
COMMANDS = {ROOT / "masks/__main__.py", ROOT / "masks/commands.py"}  # imported to print help
FILES = sorted({*(ROOT / "masks").rglob("*.py")} - COMMANDS)


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("masks", cache_dir=None)
    modules = graph.modules - {"masks"}  # the package gathers all public names
    circles = {
        frozenset((a, b))
        for a in modules
        for b in graph.find_modules_directly_imported_by(a) & modules
        if graph.chain_exists(importer=b, imported=a)
    }
    assert circles == set()


def test_public_names_are_found_at_their_first_use():
    program = (
        "import sys, masks; assert 'torch' not in sys.modules\n"
        "import masks._api; found = {n for n in vars(masks._api) if not n.startswith('_')}\n"
        "assert found == {*masks.__all__}, found ^ {*masks.__all__}\n"
        "from masks import *; assert local is masks.local and parse('full') == full()"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    assert {*masks.__all__} <= {*dir(masks)}
    with pytest.raises(AttributeError, match="'masks' has no attribute 'locale'"):
        masks.locale  # noqa: B018


READERS = {
    "text": "from masks._parse import parse; assert parse('local(3)').name == 'local(3)'",
    "pickle": (
        f"import pickle; assert pickle.loads({pickle.dumps(masks.local(3))}).name == 'local(3)'"
    ),
    "to pickle": "import pickle; from masks.patterns import local; pickle.dumps(local(3))",
    "command": (
        "from masks.__main__ import app; app(['diff', 'local(3)', 'full', '--seq-len', '64'])"
    ),
}


def test_patterns_are_read_in_a_process_that_has_imported_none():
    """One process imports torch, and forks for each program."""
    code = (
        "import os, sys, torch\n"
        f"for name, program in {READERS!r}.items():\n"
        "    assert 'masks' not in sys.modules\n"
        "    if not os.fork():\n"
        "        sys.exit(exec(program))\n"
        "    assert os.wait()[1] == 0, name"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_module_has_the_name_of_a_public_function():
    """Once such a module is imported, the package has it in the place of the function."""
    modules = {path.stem for path in (ROOT / "masks").iterdir()} - {"interop"}
    assert modules & {*masks.__all__} == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_own_modules_are_imported_at_the_top(file):
    assert own_imports_inside_functions(ast.parse(file.read_text())) == []


def own_imports_inside_functions(tree: ast.Module) -> list[int]:
    """The lines where a function imports from masks."""
    functions = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda)))
    nodes = (node for function in functions for node in ast.walk(function))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [node.lineno for node in imports if any(map(is_own, imported(node)))]


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["masks" if node.level else str(node.module)]


def is_own(module: str) -> bool:
    return module.split(".")[0] == "masks"


@pytest.mark.parametrize(
    "line", ["import masks._pattern", "from masks import x", "from . import x"]
)
def test_an_import_inside_a_function_is_found(line):
    assert own_imports_inside_functions(ast.parse(f"def f():\n    {line}")) == [2]
    assert own_imports_inside_functions(ast.parse(line)) == []
