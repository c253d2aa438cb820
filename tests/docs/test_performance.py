"""The page of measurements and the README show the records of every device."""

import copy
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.long_context.choices import Way
from tests.helpers.records import EIGHTH, ENVIRONMENT, FULL, record

SOURCE = Path(__file__).parents[2] / "docs/performance.py"
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
STEMS = {H200: "nvidia-h200", H100: "nvidia-h100-80gb-hbm3"}
SIZE = {"seq_len": 16384, "heads": 16, "head_dim": 128, "block_size": 128}
PASSES = ("forward", "backward")


@pytest.fixture
def performance(tmp_path, monkeypatch) -> Any:
    """docs/performance.py on an empty folder of records."""
    spec = importlib.util.spec_from_file_location("performance", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys.modules["records"], "RESULTS", tmp_path)
    return module


def save(folder, name, device, rows, date="2026-01-01", gaps=(), size=SIZE):
    saved = record(replace(row, **size) for row in rows)
    about = {"device": device, "date": date, "command": "python -m x"}
    saved.environment = ENVIRONMENT | about | {"versions": {"torch": "2", "triton": "3"}}
    saved.complete, saved.gaps = True, list(gaps)
    saved.save(folder / f"{name}-{STEMS[device]}.json")


def speedup(folder, device, date="2026-01-01", gaps=()):
    rows = [replace(row, direction=d) for row in (FULL, EIGHTH) for d in PASSES]
    save(folder, "speedup", device, rows, date, gaps)
    (folder / f"speedup-{STEMS[device]}-speedup-16384.png").touch()


def sparse(folder, device, others=()):
    rows = [
        replace(FULL, suite="sparse", direction=d, implementation=name, sustained_ms=8.0)
        for d in PASSES
        for name in ("sparseflash", *others)
    ]
    save(folder, "bench-sparse", device, rows)


def test_a_section_shows_the_record_of_each_device(performance, tmp_path):
    speedup(tmp_path, H200)
    alone = performance.page()
    assert "\n### " not in alone  # one device is named below its tables
    assert f"\n*{H200}, torch 2, triton 3" in alone
    speedup(tmp_path, H100)
    page = performance.page()
    assert page.count("## Speed-up against density") == 1
    first, second = page.index(f"### {H200}\n"), page.index(f"### {H100}\n")
    assert first < page.index(f"\n*{H200}, torch 2") < second < page.index(f"\n*{H100}, torch 2")
    for stem in STEMS.values():
        assert f"(../experiments/results/speedup-{stem}-speedup-16384.png)" in page


def test_the_section_of_a_backend_has_the_rows_of_that_backend(performance, tmp_path):
    named = replace(FULL, implementation="sparseflash:triton", median_ms=8.0)
    rows = [
        replace(r, direction=d)
        for r in (named, replace(EIGHTH, implementation=named.implementation))
        for d in PASSES
    ]
    save(tmp_path, "speedup", H200, rows)
    (tmp_path / "triton").mkdir()
    (tmp_path / f"speedup-{STEMS[H200]}.json").rename(
        tmp_path / f"triton/speedup-{STEMS[H200]}.json"
    )
    page = performance.page()
    assert "## The backend `triton`" in page
    assert "| `local(16)` | 0.125 | 8.0x | 1.25 | 6.40x |" in page


def test_the_picture_of_the_readme_is_of_the_device_that_was_measured_last(performance, tmp_path):
    assert performance.readme_picture() == ""
    speedup(tmp_path, H200, "2026-01-02")
    speedup(tmp_path, H100, "2026-01-01")
    assert "(experiments/results/speedup-nvidia-h200-" in performance.readme_picture()
    speedup(tmp_path, H100, "2026-01-03")
    shown = performance.readme_picture()
    assert shown.startswith(f"![Speed-up over the full mask against density, {H100}](")
    (tmp_path / f"speedup-{STEMS[H100]}-speedup-16384.png").unlink()
    assert H200 in performance.readme_picture()


def test_the_readme_has_a_table_and_a_sentence_for_every_other_device(
    performance, tmp_path, monkeypatch
):
    sparse(tmp_path, H200, ("sparseflash:auto/any-order", "flash4", "flex"))
    assert "| full | 100.0% | 8.00 | 8.00 (FlashAttention-4) |" in performance.readme_table()
    assert performance.readme_devices() == ""
    sparse(tmp_path, H100)  # no other implementation
    assert performance.readme_devices() == ""
    assert "| 128 | forward: sparseflash |  |  |  |  |" in performance.page()
    sparse(tmp_path, H100, ("flex",))
    told = performance.readme_devices()
    speeds = "1.00 to 1.00 times as fast forward and 1.00 to 1.00 times as fast backward"
    assert told == f" On one {H100} sparseflash is {speeds} as FlexAttention."
    sparse(tmp_path, H100, ("flash4", "flex"))
    assert "as the fastest of FlashAttention-4, FlexAttention." in performance.readme_devices()
    readme = tmp_path / "README.md"
    page = "![x](experiments/results/speedup-y.png)\n<!-- speed -->\nold\n<!-- /speed -->\n"
    scaling = "<!-- context-parallel --><!-- /context-parallel -->"
    readme.write_text(f"{page}End.<!-- devices --><!-- /devices -->\n{scaling}\n")
    monkeypatch.setattr(performance, "README", readme)
    speedup(tmp_path, H100)
    of_two_gpus(tmp_path, "long-context-weak-128k-2")
    shown = performance.readme()
    assert re.search(
        r"efficiency of \d\.\d\d for a window and \d\.\d\d for a butterfly; an", shown
    )
    assert shown.startswith(f"![Speed-up over the full mask against density, {H100}](")
    assert "old" not in shown
    assert "End.<!-- devices --> On one NVIDIA H100" in shown


def of_two_gpus(folder, name: str, change=lambda record: None) -> dict:
    """Puts the record of a measurement on two H200 into a folder, as that of both devices."""
    shipped = SOURCE.parents[1] / "experiments/results"
    record = json.loads((shipped / f"{name}-{STEMS[H200]}.json").read_text())
    change(record)
    for stem in STEMS.values():
        (folder / f"{name}-{stem}.json").write_text(json.dumps(record))
    return record


def test_context_parallelism_has_the_records_of_a_device_and_explains_them(performance, tmp_path):
    assert "Context parallelism" not in performance.page()

    def halved(record):
        """The plan of a window takes half of its time, and a third of its memory."""
        for row in record["rows"]:
            if (row["pattern"], row["implementation"], row["ranks"]) == ("window", "plan", 2):
                row |= {"total_ms": row["total_ms"] / 2, "tflops": 2 * row["tflops"]}
                row["peak_bytes"] /= 3

    weak = of_two_gpus(tmp_path, "long-context-weak-128k-2")
    names = ("weak-128k-16-4-heads-2", "strong-256k-2")
    for name in names:
        of_two_gpus(tmp_path, f"long-context-{name}")
    page = performance.page()
    assert page.count("## Context parallelism on two GPUs\n") == 1
    assert page.count("**Weak scaling, 131,072 tokens a GPU, 16 heads**") == 2
    assert page.count("**The time model on two GPUs**") == page.count("**Butterfly.**") == 2
    assert page.count("**Strong scaling, 262,144 tokens, 16 heads**") == 2
    assert "fits the rates of the time model" not in page
    (window,) = (
        row
        for row in weak["rows"]
        if (row["pattern"], row["implementation"], row["ranks"]) == ("window", "all-gather", 2)
    )
    sizes = "131,072 tokens a GPU, 16 heads | window"
    aims = {line.split(" | ")[0]: line for line in page.splitlines() if f" | {sizes} | " in line}
    assert len(aims) == 3
    of_two_gpus(tmp_path, "long-context-weak-128k-2", halved)
    changed = performance.page()
    for aim, line in aims.items():
        assert line not in changed, aim
        assert f"{aim} | {sizes} | " in changed
    assert f"{window['gathered_mb']:,.0f} while it computes" in page
    one, two = (
        row["peak_bytes"]
        for ranks in (1, 2)
        for row in weak["rows"]
        if (row["pattern"], row["implementation"], row["ranks"]) == ("top-k", "plan", ranks)
    )
    assert page.count(f", {two / (2 * one):.2f} for *top-k*.") == 2
    machine = of_two_gpus(tmp_path, "long-context-machine")
    page = performance.page()
    assert f"has a median of {machine['median_error']:.1%}" in page
    errors = [row["total_error"] for row in machine["rows"] if row["pattern"] == "butterfly"]
    assert f"| butterfly | {len(errors)} | {min(errors):+.0%} | {max(errors):+.0%} |" in page


def test_each_pass_of_context_parallelism_is_shown(performance, tmp_path):
    """The efficiency of a pass follows from its own time; those of both passes stay."""
    name, times = "long-context-weak-128k-2", {}

    def slow_forward(record):
        """The forward pass of the butterfly takes all of the time of both but a millisecond."""
        for row in record["rows"]:
            if (row["pattern"], row["implementation"]) == ("butterfly", "plan"):
                times[row["ranks"]] = row["total_ms"], row["forward_ms"], row["tflops"]
                if row["ranks"] == 2:
                    row["forward_ms"] = row["total_ms"] - 1
            if (row["pattern"], row["implementation"], row["ranks"]) == ("butterfly", "ring", 2):
                times["ring"] = row["total_ms"], row["forward_ms"], row["tflops"]

    of_two_gpus(tmp_path, name, slow_forward)
    of_two_gpus(tmp_path, "long-context-weak-128k-16-4-heads-2")
    page = performance.page()
    (one, forward, rate), (two, _, other), (ring, ring_forward, _) = (
        times[key] for key in (1, 2, "ring")
    )
    more = other * two / (rate * one)  # work of a GPU over that of the only one
    line = f"| butterfly | {forward:.2f} | {two - 1:.2f} | {more * forward / (two - 1):.2f} | "
    (found,) = {each for each in page.splitlines() if each.startswith(line)}
    backward = f"{one - forward:.2f} | 1.00 | {more * (one - forward):.2f} | "
    assert backward in found
    assert f" | {ring_forward / (two - 1):.2f}x | " in found
    assert found.endswith(f" | {ring - ring_forward:.2f}x |")
    told = f"In it the ring takes {ring_forward / (two - 1):.2f} times as long for *butterfly*"
    assert told in page


def test_a_plan_with_limited_memory_is_named_where_its_memory_is_shown(performance, tmp_path):
    """The aims for time are those of the plan without a limit."""
    times = {}

    def without(record):
        limited = str(Way.LIMITED), str(Way.CAPTURED)
        record["rows"] = [r for r in record["rows"] if r["implementation"] not in limited]

    def measured(record):
        without(record)
        for row in [*record["rows"]]:
            if (row["pattern"], row["implementation"], row["ranks"]) == ("butterfly", "plan", 2):
                slower = {"total_ms": 2 * row["total_ms"], "tflops": row["tflops"] / 2}
                slower |= {"implementation": str(Way.LIMITED), "peak_bytes": 10**9}
                record["rows"].append(row | slower)
                times.update(plan=row["total_ms"])

    aim = "memory of a GPU of two at most 0.55 of that of one with the same sequence"
    of_two_gpus(tmp_path, "long-context-weak-128k-2", without)
    page = performance.page()
    before = [line for line in page.splitlines() if "GPU, 16 heads | butterfly" in line]
    assert not any("with limited memory" in line for line in before)
    of_two_gpus(tmp_path, "long-context-weak-128k-2", measured)
    page = performance.page()
    after = [line for line in page.splitlines() if "GPU, 16 heads | butterfly" in line]
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert [line.split(" | ")[0] for line in changed] == [f"| {aim}"] * len(changed)
    assert len(changed) == 2  # H100 and H200
    assert all(" with limited memory, at an efficiency of 0." in line for line in changed)
    assert all(line.endswith("| yes |") for line in changed)
    for plan, ms in ("without a limit", times["plan"]), ("with limited memory", 2 * times["plan"]):
        assert page.count(f"| butterfly | {plan} | {ms:.1f} | ") == 2


@pytest.mark.parametrize(("share", "reached"), [(0.897, "**no**"), (0.9001, "yes")])
def test_an_aim_is_not_reached_by_rounding(performance, tmp_path, share, reached):
    def changed(record):
        (one,) = (
            row
            for row in record["rows"]
            if (row["pattern"], row["implementation"], row["ranks"]) == ("butterfly", "plan", 1)
        )
        for row in record["rows"]:
            if (row["pattern"], row["implementation"], row["ranks"]) == ("butterfly", "plan", 2):
                row["tflops"] = share * one["tflops"]

    of_two_gpus(tmp_path, "long-context-weak-128k-2", changed)
    aim = "weak-scaling efficiency of at least 0.90 | 131,072 tokens a GPU, 16 heads | butterfly"
    assert f"{aim} | {share:.3f} | {reached} |" in performance.page()


def test_context_parallelism_is_shown_without_records_of_other_heads(performance, tmp_path):
    of_two_gpus(tmp_path, "long-context-weak-128k-2")
    page = performance.page()
    assert "**Weak scaling, 131,072 tokens a GPU, 16 heads**" in page
    assert "16 heads, 4 of keys" not in page
    assert "**Butterfly.**" not in page  # its text compares both numbers of key heads
    assert "Strong scaling" not in page


def test_the_line_below_a_table_has_the_command_without_where_it_writes(performance):
    found = ENVIRONMENT | {
        "device": H100,
        "date": "2026-01-01",
        "git": {"commit": "a", "dirty": 0},
    }
    found |= {"versions": {"torch": "2", "triton": "3"}}
    found["command"] = "python -m x weak --output /tmp/out --overwrite --kv-heads 4"
    found["command"] += " --machine /tmp/d/experiments/results/a.json --data=/tmp/data/books"
    shown = performance.measured({"environment": found})
    told = "python -m x weak --kv-heads 4 --machine experiments/results/a.json --data=data/books"
    assert shown.endswith(f"`{told}`*")


def test_the_line_below_a_table_has_the_note_of_the_record(performance):
    found = {"device": H100, "date": "2026-01-01", "git": {"commit": "a", "dirty": False}}
    found |= {"versions": {"torch": "2", "triton": "3"}, "command": "x", "note": "A busy host."}
    shown = performance.measured({"environment": found, "complete": False})
    assert "2026-01-01: `x`* A busy host.\n\nThis measurement was interrupted" in shown


def test_gaps_name_the_parts_above_their_noise_and_what_to_change(performance, tmp_path):
    assert "Gap to the ideal" not in performance.page()
    gap = {
        "pattern": "local(16)",
        "seq_len": 16384,
        "direction": "forward",
        "measured": 1.25,
        "ideal": 1.0,
        "parts": {"gather": 0.2, "tail of the grid": 0.04, "remainder": 0.01},
        "noise": {"gather": 0.01, "tail of the grid": 0.05, "remainder": 0.001},
        "largest": "gather",
        "change": "reorder the tokens",
    }
    none = gap | {"direction": "backward", "largest": None, "change": None}
    speedup(tmp_path, H100, gaps=[gap, none])
    page = performance.page()
    assert "**Gap to the ideal time at 16,384 tokens, and its parts, in milliseconds**" in page
    assert "| mask | pass | measured | ideal | gather | remainder | largest part" in page
    assert "| `local(16)` | forward | 1.250 | 1.000 | +0.200 | +0.010 | gather |" in page
    assert "| `local(16)` | backward | 1.250 | 1.000 | +0.200 | +0.010 | none |" in page
    assert "\n- gather: reorder the tokens\n" in page
    assert "\nThe remainder is at most 0.8 % of the measured time.\n" in page
    large = gap | {"parts": gap["parts"] | {"remainder": -0.1}}
    speedup(tmp_path, H100, gaps=[none, large])
    above = (
        "at most 8.0 % of the measured time. Above 5 %, where the parts do not explain the gap:"
    )
    assert f"{above} `local(16)` forward -8.0 %.\n" in performance.page()


def test_first_calls_have_a_column_for_each_call(performance, tmp_path):
    assert "First calls" not in performance.page()
    calls = {"flex": {"first mask": 9.0}, "warmup": {"warmup": 3.125, "first mask": 0.25}}
    rows = [
        {"implementation": name, "cache": "empty", "call": call, "seconds": seconds}
        for name, of_calls in calls.items()
        for call, seconds in of_calls.items()
    ]
    versions = {"torch": "2", "triton": "3"}
    environment = ENVIRONMENT | {"device": H200, "command": "python -m x", "versions": versions}
    record = {"environment": environment, "complete": True, "rows": rows, "shape": {"heads": 16}}
    (tmp_path / f"first-call-{STEMS[H200]}.json").write_text(json.dumps(record))
    page = performance.page()
    assert "\n## First calls\n" in page
    assert "| | caches | first mask, s | warmup, s |".replace("| |", "|  |") in page
    assert "| FlexAttention | empty | 9.00 |  |" in page
    assert "| sparseflash after `sparseflash.warmup` | empty | 0.25 | 3.12 |" in page


def test_the_profile_of_a_model_has_its_time_and_memory(performance, tmp_path):
    assert "Profile of a model" not in performance.page()
    sizes = {"layers": 32, "heads": 32, "kv_heads": 8, "tokens": 32_768, "head_dim": 128}
    row = sizes | {"dtype": "bfloat16", "patterns": 8, "loss": True, "seconds": 12.345}
    row |= {"first_layer_seconds": 7.1, "layer_seconds": 0.0451, "peak_gb": 35.21}
    row |= {"scores_gb": 68.7}
    versions = {"torch": "2", "triton": "3"}
    environment = ENVIRONMENT | {"device": H200, "command": "python -m x", "versions": versions}
    text = json.dumps({"environment": environment, "complete": True, "rows": [row]})
    (tmp_path / f"lab-{STEMS[H200]}.json").write_text(text)
    page = performance.page()
    assert "\n## Profile of a model\n" in page
    assert "| 32 | 32 on 8 | 32,768 | 8 | yes | 12.3 | 7.1 | 0.0451 | 35.2 | 68.7 |" in page


def test_rows_in_which_a_baseline_is_faster_than_both_modes(performance, tmp_path):
    names = ("sparseflash:auto", "sparseflash:auto/any-order", "flash4", "cudnn")
    times = {  # of the default, of any order, of two baselines
        "full": (8.0, 8.0, 9.0, 10.0),
        "a": (8.0, 5.0, 6.0, 9.0),
        "b": (8.0, 5.0, 9.0, 4.0),
    }
    rows = [
        replace(FULL, implementation=name, pattern=pattern, median_ms=ms, sustained_ms=2 * ms)
        for pattern, own in times.items()
        for name, ms in zip(names, own, strict=True)
    ]
    save(tmp_path, "bench-sparse", H200, rows)
    found = performance.load("bench-sparse")["rows"]
    slower_rows = sys.modules["baselines"].slower_rows
    lines = slower_rows(found).splitlines()
    assert len(lines) == 5
    assert lines[-1] == "| 128 | 16,384 | b | forward | 0.800 | 0.800 | cuDNN |"
    assert slower_rows([r for r in found if r["pattern"] == "full"]) == ""


def test_a_planned_order_is_compared_where_the_kernel_of_64_dims_was_measured(
    performance, tmp_path
):
    planned = "sparseflash:auto/planned"
    names = ("sparseflash", planned, "sparseflash:auto/any-order", "flash4", "cudnn-flex")
    times = {  # under continuous load, of the modes and of baselines
        "full": (8.0, 5.0, 4.0, 10.0, 6.0),
        "causal": (8.0, 5.0, 4.0),
        "band": (8.0, 8.2, 4.0, 10.0, 6.0),
    }
    rows = [
        replace(FULL, implementation=name, pattern=pattern, direction=direction, sustained_ms=ms)
        for pattern, of_modes in times.items()
        for direction in PASSES
        for name, ms in zip(names, of_modes, strict=False)
    ]
    rows += [replace(row, pattern="random") for row in rows if row.implementation != planned]
    rows = [replace(row, **SIZE) for row in rows]
    few = {"blocks_per_row": 11.9}  # so few that the default kernels run
    rows = [replace(row, **(few if row.pattern == "band" else {})) for row in rows]
    save(tmp_path, "bench-dense-planned", H200, rows)
    assert "\n## Gradients in a planned order: full and causal masks\n" in performance.page()
    planned_order = sys.modules["baselines"].planned_order
    assert planned_order(performance.load("bench-dense-planned")).count("\n") == 1  # no row
    rows += [replace(row, head_dim=64) for row in rows]
    save(tmp_path, "bench-dense-planned", H200, rows, size={})
    lines = planned_order(performance.load("bench-dense-planned")).splitlines()
    default, planned, any_order = (f"{r}, {r}, {r}" for r in ("0.75", "1.20", "1.50"))
    assert lines[4:6] == [
        f"| planned order | {default}; 1 of 1 | {planned}; 0 of 1 | {any_order}; 0 of 1 |",
        f"| default kernels | {default}; 1 of 1 |  | {any_order}; 0 of 1 |",
    ]
    default, planned, any_order = (
        f"{2.5 * 4 * 64 * 2 * 16 * 16384**2 / (ms * 1e9):.0f}" for ms in (8, 5, 4)
    )
    assert lines[9:] == [
        f"| 16,384 | full | 16.0 | {default} | {planned} | {any_order} | 1.60 | 0.80 | 1.20 |",
        f"| 16,384 | causal | 16.0 | {default} | {planned} | {any_order} | 1.60 | 0.80 |  |",
        f"| 16,384 | band | 11.9 | {default} |  | {any_order} |  |  |  |",
    ]


@pytest.mark.parametrize(
    ("blocks", "batch", "expected"),
    [(12, 1, True), (11.9, 1, False), (256, 8, True), (256, 9, False)],
)
def test_an_order_is_planned_for_many_blocks_in_a_row_and_not_too_many_in_all(
    performance, blocks, batch, expected
):
    row = {
        "batch": batch,
        "heads": 4,
        "seq_len": 16_380,
        "block_size": 128,
        "blocks_per_row": blocks,
    }
    assert sys.modules["baselines"].has_planned_order(row) is expected


def test_what_binds_has_the_figures_of_the_counters(performance):
    units = ("tensor cores", "exponentials", "shared memory")

    def row(problem, implementation, kernel, *percent):
        return {
            "problem": problem,
            "implementation": implementation,
            "kernel": kernel,
            "percent": dict(zip(units, percent, strict=True)),
        }

    rows = [
        row("full", "sparseflash:auto", "query_gradient", 81, 2, 3),
        row("full", "sparseflash:auto", "key_value_gradient", 72, 2, 3),
        row("full, in any order", "sparseflash:auto/any-order", "fused_gradient", 1, 2, 63),
        row("full, 64 dims", "sparseflash:auto", "forward", 54, 45, 3),
    ]
    told = performance.what_binds({"rows": rows})
    assert "tensor cores busy for 81 % and 72 % of their cycles" in told
    assert "busy for 63 % of its cycles (FlashAttention-4 – %)" in told
    assert "busy for 54 % and 45 % of the cycles (FlashAttention-4 – % and – %)" in told


@pytest.mark.parametrize("year", [2020, 2030])
def test_a_mask_of_two_runs_is_of_the_newest_one(performance, tmp_path, year):
    """The page says where the masks are from that are not of the first record."""
    name = "long-context-weak-128k-2"

    def without_window(record):
        record["rows"] = [row for row in record["rows"] if row["pattern"] != "window"]

    def slower(record):
        record["rows"] = [
            row | {"total_ms": 2 * row["total_ms"]}
            for row in record["rows"]
            if row["pattern"] in ("window", "butterfly")
        ]
        record["environment"] |= {"command": "another run", "date": f"{year}-01-01T00:00:00+00:00"}

    whole = of_two_gpus(tmp_path, name)
    of_two_gpus(tmp_path, name, without_window)
    for path in tmp_path.glob(f"{name}-nvidia-*.json"):
        later = copy.deepcopy(whole)
        slower(later)
        later["environment"]["device"] = json.loads(path.read_text())["environment"]["device"]
        path.with_name(path.name.replace(name, f"{name}-run-2")).write_text(json.dumps(later))
    page, newer = performance.page(), year == 2030

    def line(mask: str, factor: int) -> str:
        one, two = (
            row
            for ranks in (1, 2)
            for row in whole["rows"]
            if (row["pattern"], row["implementation"], row["ranks"]) == (mask, "plan", ranks)
        )
        return f"| {mask} | {two['density']:.3g} | {factor * one['total_ms']:.1f} | "

    assert page.count(line("window", 2)) == 2
    assert page.count(line("butterfly", 2)) == 2 * newer
    assert page.count(line("butterfly", 1)) == 2 * (not newer)
    masks = "butterfly and window" if newer else "window"
    assert len(re.findall(rf"^{masks}: \*.*`another run`", page, re.MULTILINE)) == 2
