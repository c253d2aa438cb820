"""Fitting the rates of a machine, to times that a known machine would take."""

import json
from dataclasses import asdict, replace

import pytest
import typer
from typer.testing import CliRunner

from experiments.long_context import calibrate
from experiments.long_context.calibrate import Point, fitted, held_out, of_exchanges, read
from experiments.long_context.cases import Kind, cases, predicted
from sparseflash.distributed.simulation import Attention, Machine

KNOWN = Machine(1.5, 5.0, 300.0, 1.0, 40.0, 5.0)
EXCHANGES = [  # of a bandwidth of 8 GB/s and a latency of 50 microseconds
    {"ranks": 2, "received": size, "milliseconds": 0.05 + size / 8e6} for size in (1000, 10**6)
]


@pytest.fixture(scope="module")
def said():
    made = cases(Kind.WEAK, 4096, [1, 2, 4], 1024, ["window", "butterfly", "random"])
    return [predicted(case, Machine(), Attention(4, 4, 64)) for case in made]


@pytest.fixture
def points(said):
    found = []
    for each in said:
        point = Point("weak", each.pattern, each.prediction.ranks, each.seq_len, 0, 0, each.demand)
        forward, total = point.modelled(KNOWN)
        found.append(replace(point, forward_ms=forward, total_ms=total))
    return found


def test_the_rates_of_a_known_machine_are_found(points):
    machine = fitted(points, {})
    for name in calibrate.RATES:
        assert getattr(machine, name) == pytest.approx(getattr(KNOWN, name), rel=0.02), name


def test_one_rank_leaves_the_exchange_as_it_was(points):
    machine = fitted([point for point in points if point.ranks == 1], {})
    assert machine.tflops == pytest.approx(KNOWN.tflops, rel=0.01)
    for name in ("bandwidth", "latency_us", "memory"):
        assert getattr(machine, name) == pytest.approx(getattr(Machine(), name)), name


def test_known_rates_are_kept(points):
    known = {"bandwidth": 7.0, "latency_us": 200.0}
    machine = fitted(points, known)
    assert (machine.bandwidth, machine.latency_us) == (7.0, 200.0)
    assert machine.tflops == pytest.approx(KNOWN.tflops, rel=0.05)


def test_exchanges_of_known_sizes_give_bandwidth_and_latency():
    sizes = (2**20, 2**24, 2**28)
    measured = [(size, 0.04 + size / (5.0 * 1e6)) for size in sizes]
    found = of_exchanges(measured)
    assert found == {"bandwidth": pytest.approx(5.0), "latency_us": pytest.approx(40.0)}
    assert of_exchanges(measured[:1]) == of_exchanges([]) == {}
    proportional = of_exchanges([(size, size / 5e6) for size in sizes])
    assert proportional["latency_us"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="larger exchanges must take longer"):
        of_exchanges([(2**20, 1.0), (2**24, 0.01)])


@pytest.mark.slow(20)
def test_a_pattern_is_predicted_from_the_others(points):
    assert max(abs(row.total_error) for row in held_out(points, {})) < 0.03
    slow = [
        replace(p, forward_ms=2 * p.forward_ms, total_ms=2 * p.total_ms)
        if p.pattern == "butterfly"
        else p
        for p in points
    ]
    errors = {(row.pattern, row.ranks): row.total_error for row in held_out(slow, {})}
    # The others say nothing of what makes it slow.
    for ranks in (1, 2, 4):
        assert errors["butterfly", ranks] == pytest.approx(-0.5, abs=0.01)
    assert max(abs(found) for (name, _), found in errors.items() if name != "butterfly") > 0.02


def record_of(points, said, device="cpu"):
    rows = [
        {"implementation": way, **{name: getattr(p, name) for name in names}}
        for p in points
        for way in ("all-gather", "plan")
        if (names := ("kind", "pattern", "ranks", "seq_len", "forward_ms", "total_ms"))
    ]
    return {
        "environment": {"device": device},
        "predicted": [asdict(each) for each in said],
        "rows": rows,
    }


def run(*arguments: str):
    app = typer.Typer()
    app.command()(calibrate.main)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_what_simulate_reads(points, said, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record_of(points, said)))
    assert read([path]) == ("cpu", points, {})
    done = run(str(path), "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "error of both passes: median 0.0%, most " in done.output
    written = tmp_path / "long-context-machine-cpu.json"
    assert Machine.load(written).tflops == pytest.approx(KNOWN.tflops, rel=0.02)
    record = json.loads(written.read_text())
    assert record["records"] == ["record.json"]
    assert record["most_error"] == max(abs(row["total_error"]) for row in record["rows"])
    assert len(record["rows"]) == len(points)


def test_records_of_a_gpu_are_read_without_one(points, said, tmp_path):
    path = tmp_path / "record.json"
    few = [point for point in points if point.pattern != "random"]
    record = record_of(few, said, "NVIDIA H100 80GB HBM3")
    path.write_text(json.dumps(record | {"exchanges": EXCHANGES}))
    assert run(str(path), "--output", str(tmp_path)).exit_code == 0
    written = tmp_path / "long-context-machine-nvidia-h100-80gb-hbm3.json"
    record = json.loads(written.read_text())
    assert record["measured_on"] == "NVIDIA H100 80GB HBM3"
    assert record["environment"]["device"] != record["measured_on"]


def test_measured_exchanges_are_used(points, said, tmp_path):
    path = tmp_path / "record.json"
    few = [point for point in points if point.pattern != "random"]
    path.write_text(json.dumps(record_of(few, said) | {"exchanges": EXCHANGES}))
    assert run(str(path), "--output", str(tmp_path)).exit_code == 0
    machine = Machine.load(tmp_path / "long-context-machine-cpu.json")
    assert machine.bandwidth == pytest.approx(8.0)
    assert machine.latency_us == pytest.approx(50.0)


def test_wrong_records_are_named(points, said, tmp_path):
    first, second, third = (tmp_path / f"{i}.json" for i in range(3))
    first.write_text(json.dumps(record_of(points, said)))
    second.write_text(json.dumps(record_of(points, said, "another")))
    third.write_text(json.dumps(record_of([p for p in points if p.pattern == "window"], said)))
    assert "records must be of one device" in run(str(first), str(second)).output
    assert "records must be of two patterns" in run(str(third)).output
    third.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="must be a record of scaling: KeyError"):
        read([third])
