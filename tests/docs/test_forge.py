"""What a forge reads: workflows, the citation, the changelog."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import sparseflash

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED = json.loads((ROOT / "tests/versions.json").read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_may_read_alone_and_pins_its_actions(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action)] == []


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_versions_that_pip_takes_are_the_tested_ones(name):
    needs = [need for need in map(Requirement, PROJECT["dependencies"]) if need.name == name]
    for row in TESTED:
        machine = {"python_version": row["python"], "sys_platform": "linux"}
        here = [n for n in needs if n.marker is None or n.marker.evaluate(machine)]
        assert [n.specifier.contains(row[name]) for n in here] == [True], row
    minors = {int(row[name].split(".")[1]) for row in TESTED}
    assert minors == {*range(min(minors), max(minors) + 1)}
    major = TESTED[0][name].split(".")[0]
    for minor in (min(minors) - 1, max(minors) + 1):
        assert not any(need.specifier.contains(f"{major}.{minor}") for need in needs)


def test_pages_name_the_tested_versions():
    found = [[int(row[name].split(".")[1]) for row in TESTED] for name in ("torch", "triton")]
    torch, triton = (f"{m}.{min(n)} to {m}.{max(n)}" for m, n in zip((2, 3), found, strict=True))
    readme = (ROOT / "README.md").read_text()
    start = (ROOT / "docs/getting-started.md").read_text()
    assert f"PyTorch {torch}" in readme
    assert f"Triton {triton}" in readme
    assert f"PyTorch {torch}" in start
    columns = ("python", "torch", "triton", "tested", "result")
    rows = ["| " + " | ".join(row[name] for name in columns) + " |" for row in TESTED]
    assert "\n".join(["|---|---|---|---|---|", *rows, ""]) in start


def test_citation_is_of_the_present_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == sparseflash.__version__
    assert citation["license"] == PROJECT["license"]


def test_changelog_has_the_usual_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert {*sections} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "Unreleased"
    assert [
        r for r in releases[1:] if not re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", r)
    ] == []
