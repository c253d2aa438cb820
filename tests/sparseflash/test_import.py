"""`import sparseflash`: what it costs, what it needs, and what must not stand in its way."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

import pytest

import sparseflash
from sparseflash import _shadowing

ROOT = Path(sparseflash.__file__).parents[1]
SLOW = (
    *("matplotlib", "rich", "scipy", "torch._dynamo", "torch.utils.benchmark", "transformers"),
    *("triton", "typer"),
)


def run(program: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    code = f"import sys; sys.path[:0] = ['', {str(ROOT)!r}]\n{program}"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_what_takes_long_to_import_is_imported_when_it_is_used():
    """Torch at the first use of a name."""
    found = run(
        "import sparseflash; print('torch' in sys.modules, sparseflash.attention)\n"
        f"print([m for m in {SLOW} if m in sys.modules])"
    )
    first, slow = found.stdout.splitlines() or [found.stderr] * 2
    assert first.startswith("False <function attention")
    assert slow == "[]"


def test_a_first_call_imports_no_compiler_of_torch():
    """sympy alone takes seconds to import, which a call would wait for."""
    program = """
import torch, masks, sparseflash
from sparseflash.backends import hopper, triton
from sparseflash.backends.triton_common import launcher
from tests.helpers.calls import call_on

launcher.launch = launched = lambda *arguments: names.append(arguments[0].__name__)
launcher.multiprocessors = lambda device: 132
tensor = torch.zeros(1, 2, 2048, 128, dtype=torch.bfloat16)
for backend in hopper, triton:
    names = []
    for query in tensor, tensor.mT.contiguous().mT, torch.cat([tensor] * 2, -1)[..., :128]:
        for mask in masks.causal()(2048, 128), masks.full()(2048, 128):
            for deterministic in True, False:
                call = call_on(
                    backend, query, query, mask, query, scale=1.0, deterministic=deterministic
                )
                out, lse = backend.forward(call, query, query, query)
                needs = (True,) * 3 + (False,) * 3
                backend.backward(call, out, None, (query, query, query, out, lse), needs)
    found = [m for m in ("sympy", "torch._dynamo") if m in sys.modules]
    print(backend.__name__.split(".")[-1], len(names) >= 36, found)
"""
    found = run(program, ROOT)
    assert found.stdout.splitlines() == ["hopper True []", "triton True []"], found.stderr


def test_no_module_has_the_name_of_a_public_function():
    """Once such a module is imported, the package has it in the place of the function."""
    modules = {path.stem for path in (ROOT / "sparseflash").iterdir()} - {"nn"}
    assert modules & {*sparseflash.__all__} == set()


def test_what_is_imported_on_demand_is_found():
    names = (*sparseflash.__all__, "io_model", "reference", "testing")
    assert {*names, "huggingface"} <= set(dir(sparseflash))
    assert all(hasattr(sparseflash, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        sparseflash.atention  # noqa: B018


@pytest.mark.parametrize("own", ["masks.py", "masks/__init__.py"])
def test_masks_of_ones_own_are_named_and_not_run(own, tmp_path):
    path = tmp_path / own
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('it was run')")
    found = run("import sparseflash", tmp_path)
    named = path if own == "masks.py" else path.parent
    assert f"Python finds {named} under this name: rename that" in found.stderr
    assert "it was run" not in found.stderr


def test_a_folder_of_data_that_hides_ours_is_named(monkeypatch):
    spec = ModuleSpec("masks", None, is_package=True)
    spec.submodule_search_locations = ["/home/one/masks"]
    monkeypatch.setattr(_shadowing, "find_spec", lambda name: spec)
    with pytest.raises(
        ImportError, match=r"package 'masks', .*, but Python finds /home/one/masks"
    ):
        _shadowing.check_masks()


def test_the_version_is_that_of_the_package():
    assert sparseflash.__version__ == version("sparseflash")
