"""Docstrings of the public names have the sections that CONTRIBUTING names."""

import inspect
from types import ModuleType

import pytest

import masks
import sparseflash

PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (masks, sparseflash)
    for name in package.__all__
}
# Names without an idea of a paper or a library: the rest of them have a source.
OF_NO_SOURCE = {
    *("masks.MaskBatch", "masks.Pattern", "masks.full", "masks.stack"),
    *("masks.from_json", "masks.load", "masks.parse", "masks.save", "masks.to_json"),
    *("sparseflash.BackendError", "sparseflash.Explanation", "sparseflash.clear_cache"),
    *("sparseflash.explain", "sparseflash.selfcheck", "sparseflash.warmup"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_with_its_sections(name):
    found = PUBLIC[name]
    text = inspect.getdoc(found) or ""
    assert text.split("\n")[0].endswith((".", ":")), "it begins with a sentence in one line"
    if isinstance(found, ModuleType):
        return
    sections = {
        line[:-1] for line in text.splitlines() if line.endswith(":") and line[:-1].isalpha()
    }
    expected = set() if name in OF_NO_SOURCE else {"Reference"}
    if inspect.isfunction(found):
        signature = inspect.signature(found)
        if signature.parameters:
            expected |= {"Args", "Raises"}
        if signature.return_annotation not in (None, "None", masks.Pattern):
            expected |= {"Returns"}
    elif not issubclass(found, Exception):
        assert sections & {"Args", "Attributes"}, "the fields of a class are described"
    assert expected <= sections, expected - sections
