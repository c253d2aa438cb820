from dataclasses import replace
from pathlib import Path

import pytest

from experiments.plots import draw
from experiments.record import (
    Record,
    crossover,
    crossovers,
    dense_baseline,
    is_ours,
    relative,
)
from tests.helpers.records import BASELINE, EIGHTH, FULL, HALF, record


def test_useful_flops():
    assert FULL.tflops == pytest.approx(4 * 64 * 2 * 4 * 1024**2 / 8e-3 / 1e12)
    assert HALF.tflops == pytest.approx(FULL.tflops * 0.5 * 8 / 5)
    assert replace(FULL, direction="backward").tflops == pytest.approx(2.5 * FULL.tflops)


def test_a_record_holds_what_decoding_is_judged_by(tmp_path):
    decoded = replace(FULL, q_len=1, kv_heads=2, key_value_bytes=8 * 10**9)
    assert decoded.useful == (pytest.approx(1.0), "TB/s")
    assert decoded.tflops == pytest.approx(FULL.tflops / 1024)
    assert decoded.group != FULL.group
    record([FULL, decoded]).save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json").rows == [FULL, decoded]
    assert len(draw(record([replace(decoded, suite="decode")]), tmp_path / "drawn")) == 1


def test_figures_relative_to_the_full_mask_of_the_same_kernels():
    figures = relative(HALF, [BASELINE, FULL, HALF])
    assert figures == pytest.approx({"speedup": 1.6, "ideal": 2.0, "retention": 0.8})
    assert relative(HALF, [BASELINE, HALF])["speedup"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"suite": "length"},
        {"implementation": "sparseflash:triton"},
        {"batch": 1},
        {"heads": 8},
        {"seq_len": 512},
        {"head_dim": 128},
        {"block_size": 128},
        {"direction": "backward"},
        {"q_len": 1},
        {"kv_heads": 2},
    ],
    ids=str,
)
def test_rows_of_other_sizes_are_not_compared(change):
    other = replace(HALF, **change)
    assert relative(other, [FULL]) == {"speedup": None, "ideal": 2.0, "retention": None}
    if "implementation" not in change:
        assert dense_baseline(other.group, [BASELINE]) is None


def test_baselines_are_those_that_are_not_ours():
    ours = replace(FULL, implementation="sparseflash:hopper/any-order", median_ms=1.0)
    assert dense_baseline(FULL.group, [FULL, ours]) is None
    assert not is_ours("sdpa")


@pytest.mark.parametrize(
    ("dense_ms", "density"),
    [(8.0, 1.0), (9.0, 1.0), (5.0, 0.5), (2.5, 0.25), (1.25, 0.125), (1.0, None)],
)
def test_crossover_interpolates_between_densities(dense_ms, density):
    times = {1.0: 8.0, 0.5: 5.0, 0.125: 1.25}
    assert crossover(times, dense_ms) == (density and pytest.approx(density))


def test_crossovers_of_every_pattern():
    (entry,) = crossovers([FULL, HALF, EIGHTH, BASELINE])
    assert entry["family"] == "local"
    assert entry["baseline"] == "sdpa"
    assert entry["against_full"] == 1.0
    assert entry["against_baseline"] == pytest.approx(0.25)
    others = [
        replace(EIGHTH, family="causal"),
        replace(EIGHTH, suite="length"),
        replace(EIGHTH, implementation="flex"),
        replace(FULL, suite="length"),
        replace(FULL, implementation="flex"),
    ]
    assert crossovers([FULL, BASELINE, *others]) == []
    ours = [replace(row, implementation="sparseflash:triton") for row in (FULL, EIGHTH)]
    assert [e["implementation"] for e in crossovers(ours)] == ["sparseflash:triton"]


def test_the_fastest_dense_baseline_counts():
    faster = replace(BASELINE, implementation="flash", median_ms=2.0)
    assert dense_baseline(FULL.group, [FULL, BASELINE, faster, HALF]) is faster


def test_a_record_survives_its_file(tmp_path: Path):
    before = record([FULL, HALF])
    before.save(tmp_path / "deep" / "record.json")
    assert Record.load(tmp_path / "deep" / "record.json") == before
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"crossovers": [], "rows": [3]}', '{"a": 1}', "[" * 10**5], ids=len
)
def test_other_files_are_no_records(text, tmp_path):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a record"):
        Record.load(tmp_path / "other.json")


def test_pictures_of_all_kinds_of_rows(tmp_path: Path):
    rows = [FULL, HALF, EIGHTH, BASELINE, replace(HALF, implementation="flex")]
    rows += [replace(row, direction="backward") for row in rows]
    rows += [replace(FULL, suite="length", seq_len=n) for n in (1024, 65536)]
    names = [path.name for path in draw(record(rows), tmp_path / "run")]
    assert names == ["run-speedup-1024.png", "run-time.png", "run-memory.png"]
    assert all((tmp_path / name).stat().st_size > 10_000 for name in names)
