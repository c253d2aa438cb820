"""What a forge reads: workflows, the citation, the changelog."""

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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_may_read_alone_and_pins_its_actions(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action)] == []


def test_matrix_has_versions_that_the_package_supports_and_both_ends_of_them():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    needs = {need.name: need.specifier for need in map(Requirement, PROJECT["dependencies"])}
    for name, lowest, highest in (("torch", "2.11", "2.13"), ("triton", "3.6", "3.9")):
        versions = [entry[name] for entry in matrix]
        assert {lowest, highest} <= {*versions}
        assert all(needs[name].contains(version) for version in versions)


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
