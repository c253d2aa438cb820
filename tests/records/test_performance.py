"""docs/performance.md, docs/paper.md and the table of the README are what the records say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.records


@pytest.mark.parametrize("script", ["docs/performance.py", "docs/paper.py"])
def test_pages_about_measurements_are_current(script):
    command = [sys.executable, script, "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run: python {script}"
