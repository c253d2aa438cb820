import json
from dataclasses import replace

import pytest
import torch
import typer

from experiments.lra import TASKS, speed, steps
from experiments.lra.model import Classifier
from experiments.lra.steps import Step
from experiments.timing import Timing


def step(task, attention, clock, median_ms):
    return Step(task, attention, 128, 1024, 4, 9, clock, median_ms, median_ms, median_ms, 1)


def read(folder, name):
    (path,) = folder.glob(name)
    return json.loads(path.read_text())


def test_means_are_geometric_and_over_all_tasks():
    rows = [
        *(step("a", name, "cpu", ms) for name, ms in (("standard", 8.0), ("flash", 4.0))),
        *(step("b", name, "cpu", ms) for name, ms in (("standard", 8.0), ("flash", 1.0))),
        step("a", "linear", "cpu", 1.0),
    ]
    assert steps.means(rows)["cpu"] == pytest.approx({"standard": 1.0, "flash": 4.0})
    by_graph = [replace(one, clock="graph", median_ms=1.0) for one in rows]
    assert steps.means([*rows, *by_graph])["cpu"] == steps.means(rows)["cpu"]
    assert set(steps.means(by_graph)["graph"].values()) == {1.0}


def test_table_is_measured_and_kept(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    speed.main(
        tasks="image",
        only=["standard", "butterfly()", "linear"],
        scale=300,
        compiled=False,
        name="small",
        output=folder,
    )
    record = read(folder, "lra-small-*.json")
    assert {s["attention"] for s in record["steps"]} == {"standard", "butterfly()", "linear"}
    assert all(s["median_ms"] > 0 and s["batch"] == 1 for s in record["steps"])
    # Attentions without parameters of their own are compared in the same model.
    assert len({s["parameters"] for s in record["steps"]}) == 1
    assert all(means["standard"] == 1 for means in record["geometric_mean_speedup"].values())
    assert "butterfly() of 64" in capsys.readouterr().out


def test_an_attention_that_no_task_is_measured_with_is_an_error(tmp_path):
    with pytest.raises(typer.BadParameter, match="unknown attention 'butterfly'; known: standard"):
        speed.main(tasks="image", only=["standard", "butterfly"], output=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_step_that_no_graph_holds_is_told_and_the_others_are_kept(tmp_path, monkeypatch, capsys):
    def measured(task, case, implementation, compiled, device):
        yield step(task, implementation.attention, "events", 2.0)
        steps.timed(waits, steps.Clock.GRAPH)

    def waits():
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(steps, "measure", measured)
    monkeypatch.setattr(steps, "time_call", lambda prepare, clock, budget: prepare()())
    speed.main(tasks="image", only=["reformer"], name="small", output=tmp_path)
    record = read(tmp_path, "lra-small-*.json")
    assert len(record["steps"]) == 1
    assert record["failed"] == [
        ["image", "reformer", "no CUDA graph: operation not permitted when stream is capturing"]
    ]
    assert "image: reformer: no CUDA graph" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="not permitted"):
        steps.timed(waits, steps.Clock.EVENTS)


def test_an_interruption_keeps_the_tasks_before(tmp_path, monkeypatch):
    def measured(task, case, implementation, compiled, device):
        if task == "listops":
            raise KeyboardInterrupt
        return [step(task, implementation.attention, "cpu", 2.0)]

    monkeypatch.setattr(steps, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        speed.main(tasks="image,listops", only=["linear"], name="cut", output=tmp_path)
    assert [s["task"] for s in read(tmp_path, "lra-cut-*.json")["steps"]] == ["image"]


def test_a_step_that_needs_more_memory_than_there_is_is_told_by_either_clock(
    tmp_path, monkeypatch
):
    def full(*arguments):
        raise torch.OutOfMemoryError("out of memory\nby far")

    monkeypatch.setattr(steps, "time_call", full)
    for clock in (steps.Clock.EVENTS, steps.Clock.GRAPH):
        with pytest.raises(torch.OutOfMemoryError):
            steps.timed(lambda: None, clock)
    monkeypatch.setattr(steps, "measure", full)
    speed.main(tasks="image", only=["linear"], compiled=True, name="small", output=tmp_path)
    record = read(tmp_path, "lra-small-*.json")
    assert record["failed"] == [["image", "linear", "out of memory"]]
    assert record["compiled"]


def test_models_are_compiled_and_made_as_the_implementation_says(monkeypatch):
    made = []

    class Small(torch.nn.Module):
        def __init__(self, config, shape):
            super().__init__()
            made.append((config, shape))

        def compile(self, **options):
            made.append(options)

    monkeypatch.setattr(steps, "Classifier", Small)
    monkeypatch.setattr(steps, "training_step", lambda *arguments: lambda: None)
    monkeypatch.setattr(steps, "peak_bytes", lambda *arguments: 7)
    monkeypatch.setattr(steps, "timed", lambda step, clock: Timing(2.0, 1.0, 3.0, 5))
    case, cpu = steps.case_of("image"), torch.device("cpu")
    (found,) = steps.measure("image", case, steps.Implementation("butterfly()", 64), True, cpu)
    (config, shape), options = made
    assert (config.attention, config.block_size, shape) == ("butterfly()", 64, case.shape)
    assert options == {"dynamic": False}
    assert (found.median_ms, found.low_ms, found.high_ms, found.peak_bytes) == (2.0, 1.0, 3.0, 7)
    list(steps.measure("image", case, steps.Implementation("flash"), False, cpu))
    assert len(made) == 3


def test_gradients_are_memory_of_a_step(monkeypatch):
    """Those of the step before would be memory that a step begins with, and frees."""
    models, there = [], []

    def made(model, *facts):
        models.append(model)
        return training_step(model, *facts)

    def measured(run, device):
        there.extend(parameter.grad for parameter in models[0].parameters())
        return 7

    training_step = steps.training_step
    monkeypatch.setattr(steps, "training_step", made)
    monkeypatch.setattr(steps, "peak_bytes", measured)
    monkeypatch.setattr(steps, "timed", lambda step, clock: Timing(2.0, 1.0, 3.0, 5))
    case = steps.case_of("image")
    case = replace(case, batch=1, model=replace(case.model, layers=1))
    list(steps.measure("image", case, steps.Implementation("linear"), False, torch.device("cpu")))
    assert there
    assert all(gradient is None for gradient in there)


def test_a_step_trains():
    case = replace(steps.case_of("image"), batch=1)
    model = Classifier(replace(case.model, layers=1), case.shape)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    steps.training_step(model, case, torch.device("cpu"))()
    changed = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert all(changed)


def test_an_attention_that_one_clock_lacks_has_an_empty_cell():
    table = steps.table_of_means({"events": {"standard": 1.0, "flash": 2.0}, "graph": {}})
    assert [list(column.cells) for column in table.columns] == [
        ["standard", "flash"],
        ["1.00", "2.00"],
        ["", ""],
    ]


def test_a_row_of_the_table():
    measured = [step("image", "standard", "graph", 8.0), step("image", "flash", "graph", 2.0)]
    measured = [replace(one, peak_bytes=3 * 2**20) for one in measured]
    table = steps.table_of("image", steps.case_of("image"), measured)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows[1] == ("flash", "graph", "2.00", "2000", "4.00", "3")
    assert table.title == "image: batch 256, N = 1024"


def test_a_folder_that_cannot_be_is_told_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "measure", lambda *arguments: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(typer.BadParameter, match=r"--output: .*Not a directory"):
        speed.main(tasks="image", output=tmp_path / "file" / "folder")


def test_unknown_tasks_list_the_known_ones():
    with pytest.raises(typer.BadParameter, match=r"unknown task 'x'; known: listops, .*path-256"):
        speed.main(tasks="x")


def test_cases_are_those_of_the_presets():
    case = steps.case_of("path-x")
    assert (case.shape.seq_len, case.model.layers, case.model.order) == (128 * 128, 6, "tiles")
    own = case.implementations[-1]
    assert (own.attention.split(" | ")[0], own.block_size) == ("neighborhood2d(16, 3)", 64)
    assert steps.case_of("image").batch == 256
    assert {steps.case_of(task).model.attention_dropout for task in TASKS} == {0.0}


def test_what_cannot_run_is_recorded(tmp_path, monkeypatch):
    def measure(*arguments):
        raise ImportError("no package")

    monkeypatch.setattr(steps, "measure", measure)
    speed.main(tasks="image", only=["linear"], scale=256, name="none", output=tmp_path)
    record = read(tmp_path, "lra-none-*.json")
    assert record["failed"] == [["image", "linear", "no package"]]


def test_real_batches_have_the_lengths_masks_and_dropout_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "BATCHES", 2)
    case = steps.case_of("pathfinder", tmp_path, scale=128)
    assert [batch.ids.shape for batch in case.real] == [(2, 1, 1024)] * 2
    assert not torch.equal(case.real[0].ids, case.real[1].ids)
    assert case.model.mask_black
    assert case.model.attention_dropout == 0.1
    seen = []

    class Small(torch.nn.Linear):
        def forward(self, ids):
            seen.append(ids)
            return super().forward(ids[:, 0].float())

    steps.training_step(Small(1024, 2), case, torch.device("cpu"))()
    assert [torch.equal(*pair) for pair in zip(seen, (b.ids for b in case.real), strict=True)] == [
        True,
        True,
    ]


def test_data_that_are_missing_are_named_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "measure", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(typer.BadParameter, match=r"aclImdb.* is missing"):
        speed.main(tasks="pathfinder,text", real=tmp_path, output=tmp_path)
