"""The tables of a record, figure by figure."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from experiments import report
from experiments.record import Record
from experiments.report import compare
from tests.helpers.records import BASELINE, EIGHTH, ENVIRONMENT, FULL, HALF, record

app = typer.Typer()
app.command()(report.main)


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
        "pattern density blocks/row implementation ms ±% useful speed-up ideal retention peak MiB"
    )
    assert "forward, N = 1,024, batch 2, 4 heads of 64; useful TFLOP/s" in text


def test_a_decoded_row_is_shown_by_its_bytes():
    decoded = replace(FULL, suite="decode", q_len=1, kv_heads=2, key_value_bytes=20 * 10**9)
    text = shown(record([decoded]))
    assert "4 heads of 64, 2 of keys, 1 queries; useful TB/s" in text
    assert cells(text, "full")[6] == "2.5"


def test_where_sparse_beats_dense():
    text = shown(record([FULL, HALF, EIGHTH, BASELINE]))
    assert cells(text, "1,024") == [
        *("1,024", "forward", "sparseflash", "local", "1.000", "0.250", "(sdpa)"),
    ]
    slow = replace(EIGHTH, median_ms=9.0)
    assert "none measured" in shown(record([FULL, slow]))
    assert "not measured" in shown(record([FULL, HALF]))


def test_limits_noise_and_skipped_baselines_are_printed():
    quiet = record([FULL])
    quiet.drift = report.DRIFT_LIMIT
    assert "drifted" not in shown(quiet)
    noisy = record([FULL])
    noisy.drift, noisy.roofline = 1.3, {"copy_terabytes_per_second": 4.2}
    noisy.skipped = [["flex", "full at N = 1024", "no such kernel: install a[b]"]]
    text = shown(noisy)
    assert "drifted" in text
    assert "by a factor of 1.30" in text
    assert "copy_terabytes_per_second 4.2" in text
    assert "flex did not run on full at N = 1024: no such kernel: install a[b]" in text


def test_sustained_times_are_columns_beside_the_rested_ones():
    assert "sustained" not in shown(record([FULL]))
    loaded = replace(FULL, sustained_ms=10.0, sustained_low_ms=9.0, sustained_high_ms=11.0)
    *_, ms, useful = cells(shown(record([loaded, BASELINE])), "full")
    assert (ms, useful) == ("10", f"{0.8 * FULL.tflops:.3g}")


def report_of(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def save(rows, path: Path) -> Path:
    record(rows).save(path)
    return path


def test_a_record_is_drawn_into_another_folder(tmp_path):
    path = save([FULL, HALF], tmp_path / "run.json")
    result = report_of(path, "--output", tmp_path / "pictures")
    assert result.exit_code == 0, result.output
    (picture,) = (tmp_path / "pictures").iterdir()
    assert picture.name == "run-speedup-1024.png"


def test_two_records_are_compared_row_by_row(tmp_path):
    before = save([FULL, BASELINE], tmp_path / "before.json")
    after = save([replace(FULL, median_ms=4.0), BASELINE], tmp_path / "after.json")
    result = report_of(before, after)
    assert result.exit_code == 0, result.output
    assert "2.000x" in result.output
    assert "1.000x" in result.output


def test_a_comparison_holds_both_times_and_the_mean_of_each_implementation():
    wider = replace(FULL, head_dim=128)
    backward = replace(FULL, direction="backward", median_ms=20.0)
    before = Record(ENVIRONMENT, {}, [BASELINE, FULL, wider, backward])
    after = Record(
        ENVIRONMENT,
        {},
        [
            replace(FULL, median_ms=4.0),  # from 8
            replace(wider, median_ms=16.0),  # from 8
            backward,
            replace(BASELINE, median_ms=2.6),  # from 2.5
            replace(FULL, family="local", pattern="local(64)"),  # from nothing
            replace(BASELINE, pattern="full but another"),
        ],
    )
    table = compare(before, after)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [row[1:] for row in rows] == [
        ("forward", "sparseflash", "8", "4", "[green]2.000x[/]"),
        ("forward", "sparseflash", "8", "16", "[red]0.500x[/]"),
        ("backward", "sparseflash", "20", "20", "[dim]1.000x[/]"),
        ("forward", "sdpa", "2.5", "2.6", "[red]0.962x[/]"),
        ("", "sparseflash", "", "", "1.000x"),
        ("", "sdpa", "", "", "0.962x"),
    ]
    quiet = compare(before, Record(ENVIRONMENT, {}, [replace(FULL, median_ms=8.1)]))
    assert next(iter(quiet.columns[-1].cells)) == "[dim]0.988x[/]"


def test_records_of_other_cases_are_not_compared(tmp_path):
    paths = [save([FULL], tmp_path / "a.json"), save([BASELINE], tmp_path / "b.json")]
    result = report_of(*paths)
    assert result.exit_code == 2
    assert "no case in common" in result.output
    one = Record(ENVIRONMENT, {}, [FULL])
    other = Record(ENVIRONMENT, {}, [replace(FULL, head_dim=128)])
    with pytest.raises(ValueError, match="no case in common"):
        compare(one, other)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("timing", ("both", "sustained"), "timing, got both, sustained"),
        ("dropout_p", (0.1, 0.0), r"dropout_p, got 0\.1, 0\.0"),
        ("padding", (None, 0.3), r"padding, got 0\.0, 0\.3"),
    ],
)
def test_records_of_other_settings_are_not_compared(name, values, told):
    settings = [{} if value is None else {name: value} for value in values]
    one, other = (Record(ENVIRONMENT, each, [FULL]) for each in settings)
    with pytest.raises(ValueError, match=f"must share their {told}"):
        compare(one, other)


def test_rested_times_are_compared_whether_or_not_sustained_ones_were_taken():
    one, other = (Record(ENVIRONMENT, {"timing": t}, [FULL]) for t in ("both", "rested"))
    assert compare(one, other).row_count == 2


def test_a_graph_is_not_compared_with_a_call_from_python():
    graph, other = Record(ENVIRONMENT, {}, [FULL, BASELINE]), replace(BASELINE, clock="events")
    table = compare(graph, Record(ENVIRONMENT, {}, [FULL, other]))
    assert set(table.columns[2].cells) == {"sparseflash"}


def test_records_of_other_dtypes_are_not_compared():
    one, other = (Record(ENVIRONMENT, {"dtype": dtype}, [FULL]) for dtype in ("fp16", "bf16"))
    with pytest.raises(ValueError, match="must share their dtype, got fp16, bf16"):
        compare(one, other)
