"""The tables of a record, figure by figure."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from experiments import report
from experiments.record import Record
from tests.helpers.records import BASELINE, EIGHTH, FULL, HALF, record


def shown(found: Record) -> str:
    printed = StringIO()
    report.show(found, Console(file=printed, width=report.TABLE_WIDTH))
    return printed.getvalue()


def cells(text: str, first: str) -> list[str]:
    """Those of the one line that begins so."""
    (found,) = (line for line in text.splitlines() if line.split()[:1] == [first])
    return found.split()


def test_a_row_says_what_was_measured_and_what_follows():
    half = replace(HALF, low_ms=4.0, high_ms=6.0, blocks_per_row=8.0, peak_bytes=300 * 2**20)
    text = shown(record([FULL, half, BASELINE]))
    useful = f"{half.tflops:.3g}"
    assert cells(text, "local(64)") == [
        *("local(64)", "0.5000", "8.0", "sparseflash", "5", "20.0", useful),
        *("1.60", "2.00", "0.80", "300.0"),
    ]
    header = next(line.split() for line in text.splitlines() if "retention" in line)
    assert " ".join(header) == (
        "pattern density blocks/row kernels ms ±% useful speed-up ideal retention peak MiB"
    )
    assert "forward, N = 1,024, batch 2, 4 heads of 64; useful TFLOP/s" in text


def test_a_decoded_row_is_shown_by_its_bytes():
    decoded = replace(FULL, suite="decode", q_len=1, kv_heads=2, key_value_bytes=20 * 10**9)
    text = shown(record([decoded]))
    assert "4 heads of 64, 2 of keys, 1 queries; useful TB/s" in text
    assert cells(text, "full")[6] == "2.5"


def test_where_sparse_beats_dense():
    text = shown(record([FULL, HALF, EIGHTH, BASELINE]))
    assert cells(text, "1,024") == ["1,024", "forward", "local", "1.000", "0.250", "(sdpa)"]
    slow = replace(EIGHTH, median_ms=9.0)
    assert "at none measured" in shown(record([FULL, slow]))
    assert "not measured" in shown(record([FULL, HALF]))


def test_roofs_noise_and_skipped_peers_are_told():
    quiet = record([FULL])
    quiet.drift = report.DRIFT_LIMIT
    assert "not quiet" not in shown(quiet)
    noisy = record([FULL])
    noisy.drift, noisy.roofline = 1.3, {"copy_terabytes_per_second": 4.2}
    noisy.skipped = [["flex", "full at N = 1024", "no such kernel"]]
    text = shown(noisy)
    assert "not quiet" in text
    assert "1.30 times" in text
    assert "copy_terabytes_per_second 4.2" in text
    assert "flex did not run on full at N = 1024: no such kernel" in text


def test_the_table_of_a_suite_is_of_its_first_size():
    rows = [FULL, replace(FULL, implementation="sparseflash:triton", direction="backward"), HALF]
    rows = [replace(row, suite="sparse") for row in rows]
    other = replace(rows[0], seq_len=2048)
    backward = f"{rows[1].tflops:.2f}"
    assert report.markdown(record([*rows, other])).splitlines() == [
        "| pattern | density s | forward, sparseflash | backward, triton |",
        "|---|---|---|---|",
        f"| full | 1 | {FULL.tflops:.2f} | {backward} |",
        f"| local(64) | 0.5 | {HALF.tflops:.2f} |  |",
    ]
    fast = replace(rows[0], median_ms=0.01)
    assert f"| full | 1 | {fast.tflops:.0f} |" in report.markdown(record([fast]))


def test_the_table_of_a_sweep_is_of_densities_next_to_a_sixteenth_at_the_longest():
    sixteenth = replace(HALF, pattern="local(8)", density=1 / 20, median_ms=0.8)
    flex = replace(sixteenth, implementation="flex", median_ms=1.2)
    rows = [FULL, BASELINE, HALF, EIGHTH, sixteenth, flex]
    rows += [replace(row, direction="backward", median_ms=2 * row.median_ms) for row in rows]
    shorter = [replace(row, seq_len=512, median_ms=1.0) for row in rows]
    *_, full, local = report.markdown(record([*shorter, *rows])).splitlines()
    assert full == "| `full` | 1 | 8 | 1.00x |  | 16 | 1.00x |  |"
    assert local == "| `local(8)` | 0.05 | 0.8 | 10.00x | 1.50x | 1.6 | 10.00x | 1.50x |"


@pytest.mark.parametrize(("implementation", "figure"), [("sdpa", ""), ("flex", "3.20x")])
def test_only_flex_attention_is_a_column_of_its_own(implementation, figure):
    other = replace(BASELINE, implementation=implementation, median_ms=25.6)
    rows = [FULL, other, *(replace(row, direction="backward") for row in (FULL, other))]
    assert report.markdown(record(rows)).splitlines()[-1].split(" | ")[4] == figure
