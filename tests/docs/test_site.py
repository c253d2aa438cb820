"""The documentation site builds without a network, and no link of it is broken."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow(20)
def test_site_builds_strictly(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = "".join(path.read_text() for path in site.rglob("*.html"))
    fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', pages)
    assert fetched == []
    for name in ("performance.html", "index.html"):  # pictures of records
        for picture in re.findall(r'<img[^>]+src="([^"]+)"', (site / name).read_text()):
            assert (site / picture).exists(), picture
    assert "figure-2.png" in (site / "performance.html").read_text()
    assert 'id="masks.Pattern.__call__"' in (site / "api/masks.html").read_text()
    assert '<code>python -m masks "local(256) | butterfly()"</code>' in pages
    assert len(list((site / "gallery").glob("*.png"))) >= 13
