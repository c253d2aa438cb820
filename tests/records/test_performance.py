"""docs/performance.md, docs/paper.md and figures of the README are what the records say."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

from experiments.cli import SHIPPED
from experiments.record import read_rows

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.records


@pytest.mark.parametrize("script", ["docs/performance.py", "docs/paper.py"])
def test_pages_about_measurements_are_current(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 0, f"{capsys.readouterr().out}run: python {script}"


def ratios(record: str, ours: str, baseline: str, **chosen: object) -> list[float]:
    """The time of ours over that of a baseline, for each mask, size and pass of an H200."""
    rows = read_rows(json.loads((SHIPPED / f"{record}-nvidia-h200.json").read_text()))
    names = ("batch", "heads", "seq_len", "head_dim", "pattern", "direction")
    times = {
        (row["implementation"], *(row[name] for name in names)): row["median_ms"]
        for row in rows
        if all(row[name] == value for name, value in chosen.items())
    }
    problems = [problem for name, *problem in times if name == ours]
    return [
        times[ours, *problem] / times[baseline, *problem]
        for problem in problems
        if (baseline, *problem) in times
    ]


def test_the_readme_says_how_often_and_by_how_much_baselines_are_faster():
    text = " ".join((ROOT / "README.md").read_text().split())
    for ours, named in (
        ("sparseflash", "the default"),
        ("sparseflash:auto/any-order", "`deterministic=False`"),
    ):
        found = ratios("bench-sparse", ours, "cudnn-flex", head_dim=64, direction="backward")
        faster = sum(ratio > 1 for ratio in found)
        told = f"than {named} in {faster} of {len(found)} rows, up to"
        assert f"{told} {100 * (1 - 1 / max(found)):.0f} % less" in text
    for baseline, named in (("cudnn", "cuDNN"), ("flash4", "FlashAttention-4")):
        found = ratios("bench-dense", "sparseflash", baseline)
        assert f"{min(found):.2f} to {max(found):.2f} times as long as with {named}" in text


def test_the_design_page_says_how_two_gpus_scale(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = importlib.import_module("long_context")
    names = [*page.WEAK_SCALING, *page.LONGER, *page.STRONG_SCALING]
    both, forward = {}, {}
    for record in filter(None, (page.runs(name, "nvidia-h200") for name in names)):
        rows = record["rows"]
        for mask in page.patterns(rows):
            kind = mask if mask in page.AIMED else "other"
            both.setdefault(kind, []).append(page.efficiency(rows, mask))
            share = page.efficiency_of_pass(rows, mask, "forward")
            each = page.row_of(rows, mask, "plan", 2)
            forward[mask, each["kv_heads"], each["seq_len"], each["kind"]] = share
    window, butterfly, other = (
        f"{min(found):.2f} to {max(found):.2f}" for found in map(both.get, (*page.AIMED, "other"))
    )
    text = " ".join((ROOT / "docs/design/context-parallel.md").read_text().split())
    told = f"{window} for a window, {butterfly} for a butterfly, and {other} for the other masks"
    assert f"both passes together scale with efficiency {told}" in text
    told = told_of_limited_memory(page)
    assert all(each in text for each in told), told
    least, most = min(forward.values()), max(forward.values())
    assert f"The forward pass alone scales with {least:.2f} to {most:.2f}. With 262,144" in text
    short = [share for (_, _, length, _), share in forward.items() if length == 2**18]
    assert sum(share < 0.90 for share in short) > len(short) / 2
    below = {key for key, share in forward.items() if share < 0.90 and key[2] > 2**18}
    assert {mask for mask, heads, *_ in below if heads == 16} == {"butterfly", "random", "top-k"}
    assert {mask for mask, heads, *_ in below if heads == 4} == {"random", "top-k"}


def told_of_limited_memory(page) -> list[str]:
    """What the page says of efficiency and memory of a butterfly with limited memory."""
    efficiency, part = {}, {}
    for name in (page.WEAK, page.STRONG, page.GROUPED, page.MANY, "long-context-weak-512k-2"):
        rows = page.runs(name, "nvidia-h200")["rows"]
        for way in (page.LIMITED, page.CAPTURED):
            if page.row_of(rows, "butterfly", way, 2):
                share = page.efficiency(rows, "butterfly") / page.over(rows, "butterfly", way)
                efficiency[name, way] = f"{share:.2f}"
                part[name] = f"{page.memory(rows, 'butterfly', way):.2f}"
    weak, strong = (efficiency[name, page.LIMITED] for name in (page.WEAK, page.STRONG))
    few, many = (efficiency[name, page.CAPTURED] for name in (page.GROUPED, page.MANY))
    return [
        f"a rank needs {part[page.WEAK]} with 16 groups, and",
        f"efficiency was {weak} and {strong} in the newest runs of weak and of strong scaling",
        f"In a CUDA graph of both passes it is {efficiency[page.WEAK, page.CAPTURED]}, with 4 key "
        f"heads {few} ({part[page.GROUPED]} of the memory), with 32 heads, 8 of keys, {many} "
        f"({part[page.MANY]}), and at 524,288 tokens, called from Python, "
        + efficiency["long-context-weak-512k-2", page.LIMITED],
    ]
