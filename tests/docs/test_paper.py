"""The page of the paper's experiments shows what records hold, and says where there is none."""

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from experiments.files import write_json
from experiments.language_model.results import record_of
from experiments.long_documents.results import gather
from experiments.pretraining import Case
from tests.experiments.language_model.test_results import write_run
from tests.experiments.long_documents.test_results import START, write_floors, write_runs
from tests.helpers.records import ENVIRONMENT, FULL, record

SOURCE = Path(__file__).parents[2] / "docs/paper.py"
FACTS = ENVIRONMENT | {"command": "python -m x", "versions": {"torch": "2", "triton": "3"}}


@pytest.fixture
def paper(tmp_path, monkeypatch) -> Any:
    """docs/paper.py on an empty folder of records."""
    spec = importlib.util.spec_from_file_location("paper", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    write_floors(tmp_path / "long-documents-floors.json")
    monkeypatch.setattr(sys.modules["records"], "RESULTS", tmp_path)
    return module


def row(text: str, name: str) -> list[str]:
    (found,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in found.split("|")[2:-1]]


def landscape(folder, name="bench-landscape", machine="nvidia-h200", date=""):
    """sdpa is slower from 256 tokens on; linformer was measured at 128 tokens alone."""
    times = {"sparseflash": (2.0, 4.0), "sdpa": (1.0, 8.0), "linformer": (3.0,)}
    rows = [
        replace(
            FULL, suite="landscape", implementation=i, seq_len=n, direction=d, median_ms=ms / 2
        )
        for i, both in times.items()
        for n, ms in zip((128, 256), both, strict=False)
        for d in ("forward", "backward")
    ]
    parts = {"sparseflash": 2.0, "standard": 9.0, "standard:product": 4.0, "standard:mask": 6.0}
    rows += [
        replace(FULL, suite="parts", family="causal", implementation=i, median_ms=ms)
        for i, ms in parts.items()
    ]
    saved = record(rows)
    saved.environment = FACTS | ({"date": date} if date else {})
    saved.save(folder / f"{name}-{machine}.json")


def test_what_has_no_record_says_so(paper):
    for name in ("parts", "landscape", "pretraining", "language-models"):
        shown = paper.TABLES[name]()
        assert shown.startswith("*Not measured yet"), name
    assert row(paper.overview(), "Figure 3")[-1] == "0 of 4"
    assert row(paper.authors(), "512") == ["–"] * 7 + ["30.0", "10.0"]


def test_figures_1_and_3(paper, tmp_path):
    landscape(tmp_path)
    assert row(paper.overview(), "Figure 3")[-1] == "1 of 4"
    parts = paper.TABLES["parts"]()
    assert row(parts, "sum of all parts") == ["10.0", "5.00"]
    assert row(parts, "mask") == ["6.00", "3.00"]
    shown = paper.TABLES["landscape"]()
    times, memory, crossings = (part for part in shown.split("\n\n") if part.startswith("|"))
    assert row(times, "SDPA (torch)") == ["1.00", "8.00"]
    assert row(times, "Linformer") == ["3.00", "–"]
    assert row(memory, "sparseflash") == ["1.0", "1.0"]
    # Ours crosses in the middle of the octave; the paper's pair is of its Table 20.
    assert row(crossings, "SDPA (torch)") == ["faster from 181", "–", "–"]
    assert row(crossings, "Linformer")[:2] == ["faster from 128", "slower from 725"]
    assert "bench-landscape-nvidia-h200-landscape.png" not in shown
    (tmp_path / "bench-landscape-nvidia-h200-landscape.png").touch()
    assert "bench-landscape-nvidia-h200-landscape.png" in paper.TABLES["landscape"]()
    landscape(tmp_path, "bench-landscape-dropout")
    assert "**With dropout 0.1: milliseconds" in paper.TABLES["landscape"]()


def test_figure_3_marks_what_was_called_from_python_and_says_why_cells_are_empty(paper, tmp_path):
    landscape(tmp_path)
    shown = paper.TABLES["landscape"]()
    assert "Not measured:" not in shown
    assert "*Not measured yet: with dropout 0.1; with padded keys; with dropout 0.1 and" in shown
    facts = {"suite": "landscape", "direction": "forward"}
    rows = [
        replace(FULL, implementation=name, seq_len=n, median_ms=ms, clock=clock, **facts)
        for name, clock, ms in (("sparseflash", None, 2.0), ("bigbird", "events", 8.0))
        for n in (512, 1024)[name == "bigbird" :]
    ]
    saved = record(rows)
    saved.environment = FACTS | {
        "command": "python -m y --trainer.logger.name= --deadline.at=1.5 --output there"
    }
    saved.skipped = [
        ["bigbird", "full at N = 512", "bigbird needs at least 768 tokens, got 512"],
        ["bigbird", "full at N = 2048", "CUDA out of memory. Tried to allocate 64.00 GiB."],
        [
            "routing",
            "full at N = 512",
            "routing: routing_transformer is not installed: pip install x",
        ],
        ["longformer", "full at N = 512", "longformer needs a multiple of 128 tokens, got 512"],
        ["longformer", "full at N = 1024", "longformer needs a multiple of 128 tokens, got 1024"],
    ]
    saved.save(tmp_path / "bench-landscape-nvidia-h200.json")
    shown = paper.TABLES["landscape"]()
    assert '"called from Python": a CUDA graph cannot contain this' in shown
    assert row(shown, "BigBird (called from Python)") == ["–", "8.00"]
    assert "- BigBird at 512 tokens: needs at least 768 tokens." in shown
    assert "- BigBird from 2,048 tokens on: out of memory." in shown
    assert "- Routing: routing_transformer is not installed." in shown
    assert "- Longformer at 512, 1,024 tokens: needs a multiple of" in shown
    # Of the same run and, in the columns of the paper, of its Table 20.
    crossing = [line for line in shown.splitlines() if line.startswith("| BigBird | faster")]
    assert crossing == ["| BigBird | faster from 1,024 | slower from 2,925 | faster from 128 |"]
    assert shown.count("`python -m y`") == 1


def test_the_latest_of_several_gpus_is_shown(paper, tmp_path):
    for machine, date in (("nvidia-h200", "2026-01-02"), ("nvidia-h100-80gb-hbm3", "2026-01-03")):
        landscape(tmp_path, machine=machine, date=date)
        (tmp_path / f"bench-landscape-{machine}-landscape.png").touch()
    shown = paper.TABLES["landscape"]()
    assert "bench-landscape-nvidia-h100-80gb-hbm3-landscape.png" in shown
    assert ("2026-01-03" in shown, "2026-01-02" in shown) == (True, False)
    landscape(tmp_path, date="2026-01-04")
    assert "2026-01-04" in paper.TABLES["landscape"]()


def test_tables_1_and_2(paper, tmp_path):
    case = asdict(Case("gpt2", "eager", 512))
    measured = {"tokens_per_second": 1000.0, "peak_bytes": 2**31, "loss": 5.0}
    rows = [case | measured, case | {"attention": "local(8) | butterfly()"} | measured]
    rows[1] |= {"tokens_per_second": 2500.0, "loss": 4.9}
    rows.append(case | {"attention": "sdpa", "reason": "out of memory"})
    longer = case | {"seq_len": 1024} | measured
    rows += [longer | {"attention": "ours"}, longer | {"attention": "sdpa"}]
    rows[-1]["tokens_per_second"] = 400.0
    commands = ["python -m x gpt2"] * 2 + ["python -m x bert-large"] * 3
    rows = [
        each | {"environment": FACTS | {"command": command}}
        for each, command in zip(rows, commands, strict=True)
    ]
    write_json(tmp_path / "pretraining-nvidia-h200.json", {"rows": rows})
    shown = paper.TABLES["pretraining"]().replace("\\|", "or").splitlines()
    assert shown[0] == "**a device**"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown[4:9]]
    assert cells[0][5:] == ["200", "1,000", "1.00", "–", "2.0", "5.0000", "+0.0000"]
    expected = [
        "`local(8) or butterfly()`",
        "0.1",
        "0",
        "200",
        "2,500",
        "2.50",
        "–",
        "2.0",
        "4.9000",
    ]
    assert cells[1][2:] == [*expected, "-0.1000"]
    assert cells[2][5:] == ["200", "out of memory", "", "", "", "", ""]
    assert [each[8] for each in cells[3:]] == ["2.50", "1.00"]  # over SDPA
    sources = [line for line in shown if line.startswith("*a device, torch 2")]
    assert [line.split("`")[1] for line in sources] == [
        "python -m x gpt2",
        "python -m x bert-large",
    ]


def test_training_steps_of_each_device_and_differences_of_exact_attentions(paper, tmp_path):
    measured = {"tokens_per_second": 1.0, "peak_bytes": 2**30, "loss": 5.0}

    def write(machine, device, dropout, losses):
        rows = [
            asdict(Case("gpt2", attention, 1024, dropout=dropout))
            | measured
            | {"losses": [5.0] * 8 + [5.0 + last, 5.0], "environment": FACTS | {"device": device}}
            for attention, last in losses.items()
        ]
        write_json(tmp_path / f"pretraining-{machine}.json", {"rows": rows})

    write("nvidia-h200", "NVIDIA H200", 0.1, {"sdpa": 0.0, "ours": 0.5})
    shown = paper.TABLES["pretraining"]()
    assert "**Exact attentions" not in shown  # none is without dropout
    found = {"eager": 0.0, "sdpa": 0.25, "ours": 0.125, "local(8)": 0.75}
    write("nvidia-h100-80gb-hbm3", "NVIDIA H100", 0.0, found)
    shown = paper.TABLES["pretraining"]()
    first, second, third = map(
        shown.index, ("**NVIDIA H200**", "**NVIDIA H100**", "**Exact attentions")
    )
    assert first < shown.index("*NVIDIA H200, torch") < second < shown.index("*NVIDIA H100, torch")
    cells = [line.split(" | ")[4:8] for line in shown[third:].splitlines()[4:]]
    assert cells == [
        ["0", "`eager`, `sdpa`", "0.00000", "0.25000"],
        ["0", "`eager`, `ours`", "0.00000", "0.12500"],
        ["0", "`sdpa`, `ours`", "0.00000", "0.12500"],
        ["0.1", "`sdpa`, `ours`", "0.00000", "0.50000"],
    ]


def write_model(folder, gpu="NVIDIA H200", *rest, **facts):
    """A run of a language model on a GPU; the other arguments are those of `write_run`."""
    return write_run(folder, *rest, environment=FACTS | {"device": gpu}, **facts)


def write_models(folder, name, gpu, runs):
    """A record of language models of a GPU; returns its path."""
    path = folder / f"language-model-{name}-nvidia-{gpu.rpartition(' ')[2].lower()}.json"
    write_json(path, record_of(name, runs))
    return path


def test_table_4(paper, tmp_path):
    runs = [
        write_model(tmp_path / "dense", "NVIDIA H200", 2.0, 1e6),
        write_model(tmp_path / "sparse", "NVIDIA H200", 2.02, 3e6, attention="local(8)"),
    ]
    path = write_models(tmp_path, "25m-contexts", "NVIDIA H200", runs)
    shown = paper.TABLES["language-models"]()
    assert f"`experiments/results/{path.name}`" in shown
    title = "**A token is a byte, without warm-up: 0M parameters, 0 MB of training data**"
    assert shown.startswith(title)
    found = ["2.0200", "2.020", "2.020", "+1.00 %", "+1.00 %", "3,000,000", "3.00"]
    equal_bytes, _, equal_times = shown.partition(
        "**Bits per byte after equal times of training**"
    )
    # Of the causal mask's 36 blocks a narrow window has those of two diagonals, 8 + 7.
    assert row(equal_bytes, "sparse") == ["1,024 bytes", "`local(8)`", "42 %", *found]
    assert row(equal_times, "sparse")[-1] == "–"
    assert row(paper.overview(), "Table 4")[-1] == "1 of 4"
    assert "bits per byte than dense" not in shown


def test_runs_of_table_4_on_two_gpus_are_compared_by_bits_per_byte_alone(paper, tmp_path):
    paths, trained = {}, {}
    for gpu, label, attention, bits, speed in (
        ("H200", "dense", "flash", 2.0, 1e6),
        ("H200", "narrow", "local(4)", 2.2, 4e6),
        ("H100", "sparse", "local(8)", 2.1, 3e6),
    ):
        run = write_model(tmp_path / gpu / label, gpu, bits, speed, attention=attention)
        trained.setdefault(gpu, []).append(run)
    for gpu, runs in trained.items():
        paths[gpu] = write_models(tmp_path, "25m-contexts", gpu, runs)
    shown = paper.TABLES["language-models"]()
    first, *equal_times = shown.split("**Bits per byte after equal times of training, ")
    assert row(first, "sparse")[7:] == ["+5.00 %", "–", "–", "3,000,000", "–"]
    assert row(first, "narrow")[7:] == ["+10.00 %", "4,000,000", "4.00", "–", "–"]
    assert "| bytes/s, H200 | speed-up over dense, H200 | bytes/s, H100 |" in first
    assert [text.partition("**")[0] for text in equal_times] == ["H200"]  # H100 has one run
    assert "| sparse |" not in equal_times[0]
    for path in paths.values():
        assert f"`experiments/results/{path.name}`" in shown
    # A run of fewer steps reads fewer bytes.
    record = json.loads(paths["H100"].read_text())
    record["runs"]["sparse"]["steps"] -= 10
    write_json(paths["H100"], record)
    with pytest.raises(ValueError, match="must have one training data in 25m-contexts"):
        paper.TABLES["language-models"]()


def test_seeds_of_table_4_are_a_row_and_are_compared_with_all_dense_runs(paper, tmp_path):
    """Whatever GPU each was trained on."""
    one = [
        write_model(tmp_path / "1/mid", "NVIDIA H200", 2.0, 3e6, attention="local(8)"),
        write_model(tmp_path / "1/dense", "NVIDIA H200", 1.9, 1e6),
    ]
    two = [
        write_model(tmp_path / "2/dense", "NVIDIA H100", 2.1, 2e6),
        write_model(
            tmp_path / "2/mid-seed-1", "NVIDIA H100", 2.2, 5e6, "a", 1024, "local(8)", seed=1
        ),
    ]
    write_models(tmp_path, "25m-warm-up", "NVIDIA H200", one)
    write_models(tmp_path, "25m-warm-up", "NVIDIA H100", two)
    shown = paper.TABLES["language-models"]()
    first, *equal_times = shown.split("**Bits per byte after equal times of training, ")
    names = [line.split(" | ")[0] for line in first.splitlines() if line.startswith("| ")][2:]
    assert names == ["| dense", "| mid"]  # dense ones come first
    assert row(first, "mid")[3:6] == ["2", "2.1000 (2.0000 to 2.2000)", "2.100"]
    assert row(first, "mid")[7:] == [
        "+5.00 %",
        "+5.00 %",
        "3,000,000",
        "3.00",
        "5,000,000",
        "2.50",
    ]
    assert row(first, "dense")[4] == "2.0000 (1.9000 to 2.1000)"
    assert [row(text, "mid")[-1] for text in equal_times] == ["–", "–"]


def test_a_run_of_table_4_that_has_not_ended_is_not_compared_by_its_loss(paper, tmp_path):
    cut = {"attention": "local(8)", "trained": 10, "ended": False, "context": 4096}
    runs = [
        write_model(tmp_path / "dense-1k", "NVIDIA H200", 2.0, 1e6),
        write_model(tmp_path / "dense-4k", "NVIDIA H200", 1.9, 1e6, context=4096),
        write_model(tmp_path / "wide-4k", "NVIDIA H200", 3.0, 3e6, **cut),
        write_model(tmp_path / "new-4k", "NVIDIA H200", 3.0, 0.0, **cut | {"trained": 2}),
    ]
    write_models(tmp_path, "25m-warm-up", "NVIDIA H200", runs)
    shown = paper.TABLES["language-models"]()
    first, *equal_times = shown.split("**Bits per byte after equal times of training")
    assert row(first, "wide-4k (step 10 of 20)")[-4:] == ["–", "–", "3,000,000", "3.00"]
    assert row(first, "new-4k (step 2 of 20)")[-4:] == ["–"] * 4
    assert "Fewer bits per byte than dense-1k after as much training: dense-4k." in first
    assert "| wide-4k" not in equal_times[0]
    assert "| dense-4k |" in equal_times[0]


def test_a_context_of_tokens_is_also_told_in_bytes(paper, tmp_path):
    facts = {"step_bytes": 4 * 4096.0, "short_steps": 5, "short_context": 512}
    facts |= {"short_bytes_per_second": 1e6}
    runs = [write_model(tmp_path / "dense-1k", "NVIDIA H200", 1.25, 1e6, **facts)]
    write_models(tmp_path, "25m-warm-up-tokens", "NVIDIA H200", runs)
    shown = paper.TABLES["language-models"]()
    assert "**A token is one of byte-level BPE, with warm-up: 0M parameters, 0 MB of" in shown
    told = "4.00 bytes in a token, the first 5 of 20 steps at 512 tokens**"
    assert told in shown
    assert row(shown, "dense-1k")[0] == "1,024 tokens, some 4 KB"


def test_the_readme_has_the_fastest_pattern_with_about_the_loss_of_dense_attention(
    paper, tmp_path
):
    briefly = sys.modules["language_models"].briefly
    assert briefly() == "not run"
    runs = [
        write_model(tmp_path / name, "NVIDIA H200", bits, speed, "a", 16384, attention)
        for name, attention, bits, speed in (
            ("dense", "flash", 2.0, 100.0),
            ("good", "local(8)", 2.01, 250.0),
            ("faster", "local(4)", 2.03, 400.0),
        )
    ]
    write_models(tmp_path, "25m-warm-up", "NVIDIA H200", runs)
    assert briefly().startswith("2.50 times as fast with a block-sparse pattern")
    assert briefly().endswith("to 0.5 % more bits per byte (one run of each)")
    # Another seed counts as much; a run that has not ended counts for nothing.
    seed = write_model(
        tmp_path / "good-1", "NVIDIA H200", 1.97, 270.0, "a", 16384, "local(8)", seed=1
    )
    cut = {"seed": 2, "trained": 10, "ended": False}
    unended = write_model(
        tmp_path / "cut", "NVIDIA H200", 1.0, 900.0, "a", 16384, "local(2)", **cut
    )
    write_models(tmp_path, "25m-warm-up", "NVIDIA H200", [*runs, seed, unended])
    assert briefly().startswith("2.60 times as fast with a block-sparse pattern")
    assert briefly().endswith("0.5 % fewer bits per byte (2 block-sparse runs, 1 dense run)")


def test_table_4_counts_equal_heads(paper):
    attention_of = sys.modules["language_models"].attention_of
    run = {"model": {"attention": ["full(); a | b; a | b", "a | b"]}}
    assert attention_of(run) == r"`full()`, 2 x `a \| b`; `a \| b`"


def test_table_4_has_the_mean_share_of_blocks_over_layers(paper):
    blocks_of = sys.modules["language_models"].blocks_of
    model = {"layers": 3, "heads": 2, "block_size": 64, "context": 256}  # 4 x 4 blocks, 10 causal
    run = {"model": model | {"attention": ["flash", "strided(64); full()"]}}
    assert blocks_of({"model": model | {"attention": ["sdpa"]}}) == "100 %"
    # Of 10 blocks the strided pattern has 4: mean of 10, (4 + 10) / 2 and 10.
    assert blocks_of(run) == "90 %"


def test_table_4_says_which_runs_of_its_script_are_not_trained(paper, tmp_path):
    not_trained = sys.modules["language_models"].not_trained
    shown = not_trained("language-model-25m-warm-up", {"dense-1k": {}, "heads-16k": {}})
    lacking = (
        "dense-4k, dense-16k, wide-16k, mid-16k, mid-16k-seed-1, narrow-16k, hybrid-16k, "
        "narrow-64k, dense-64k"
    )
    assert shown == f"*Not trained yet: {lacking}.*"
    every = dict.fromkeys([*lacking.split(", "), "dense-1k", "heads-16k"])
    assert not_trained("language-model-25m-warm-up-tokens", every) == ""
    assert not_trained("language-model-25m-contexts", {}) == ""
    shown = not_trained("language-model-124m-warm-up", {"dense-16k": {}})
    assert shown == "*Not trained yet: dense-1k, mid-16k.*"
    folder = write_model(tmp_path / "dense-1k")
    write_models(tmp_path, "25m-warm-up", "NVIDIA H200", [folder])
    assert "*Not trained yet: dense-4k, dense-16k, wide" in paper.TABLES["language-models"]()


def test_runs_of_table_4_are_compared_after_equal_times(paper, tmp_path):
    runs = {
        name: json.loads(
            (
                write_run(tmp_path / name, bits, speed, attention=attention) / "result.json"
            ).read_text()
        )
        for name, bits, speed, attention in (
            ("dense", 2.0, 1024e3, "flash"),
            ("sparse", 2.1, 1536e3, "local(8)"),
        )
    }
    at_equal_time = sys.modules["language_models"].at_equal_time

    def shown() -> str:
        return at_equal_time({name: [run] for name, run in runs.items()})

    # Validations of dense are after 40 and 80 ms, those of sparse after 27 and 53 ms.
    assert "| run | 0.0133 s | 0.0267 s | 0.0533 s | against dense |" in shown()
    assert row(shown(), "dense") == ["–", "–", f"{3 - 1 / 3:.4f}", "+0.0 %"]
    change = f"{100 * (2.1 / (3 - 1 / 3) - 1):+.1f} %"
    assert row(shown(), "sparse") == ["–", "3.0000", "2.1000", change]
    assert at_equal_time({"dense": [runs["dense"]]}) == ""
    runs["sparse"]["bytes_per_second"] = 0.0
    assert shown() == ""
    runs["sparse"]["bytes_per_second"] = 3 * 1024e3  # ends before the first validation of dense
    assert row(shown(), "sparse") == ["–", "3.0000", "2.1000", "–"]


@pytest.mark.parametrize(("bits", "told"), [(2.1, "No fewer"), (1.9, "Fewer")])
def test_a_longer_context_is_compared_where_both_have_as_many_bytes(paper, tmp_path, bits, told):
    long = write_model(tmp_path / "dense-4k", "NVIDIA H200", bits, context=4096)
    run = json.loads((long / "result.json").read_text())
    run["positions"].insert(3, 1024)
    run["curve"][-1]["by_position"].append(bits - 0.3)
    write_json(long / "result.json", run)
    runs = [long, write_model(tmp_path / "dense-1k")]
    write_models(tmp_path, "25m-contexts", "NVIDIA H200", runs)
    shown = paper.TABLES["language-models"]()
    assert f"{told} bits per byte than dense-1k after as much training: dense-4k." in shown
    cells = row(shown.partition("**Bits per byte after")[0], "dense-4k")
    assert cells[2:7] == [
        "100 %",
        f"{bits:.4f}",
        f"{bits:.3f}",
        f"{bits - 0.3:.3f}",
        f"{100 * (bits / 2 - 1):+.2f} %",
    ]
    assert "| positions 512 to 1,024 |" in shown


def test_table_5(paper, tmp_path):
    floors = {
        f"{n}": {"words": {"accuracy": words}, "bytes": {"accuracy": 0.1}}
        for n, words in ((512, 0.3), (65_536, 0.95))
    }
    write_json(tmp_path / "long-documents-floors.json", {"data": {"train": "a"}, "floors": floors})
    write_runs(tmp_path / "runs")
    for path in tmp_path.glob("runs/*/seed*/result.json"):
        run = json.loads(path.read_text())
        run["environment"] = FACTS | {"device": f"NVIDIA {'X' if '512' in path.parts else 'Y'}"}
        if "512" not in path.parts:
            run["curve"][-1][1] = 0.95
        write_json(path, run)
    name, floors = "authors-words", tmp_path / "long-documents-floors.json"
    _, (record, _) = gather(name, tmp_path / "runs", floors, tmp_path)
    assert record.name == "long-documents-authors-words-nvidia-x-nvidia-y.json"
    shown = paper.authors()
    read = ["words", "random weights", "2", "10 to 11", "40 to 44"]
    assert row(shown, "512") == [*read, "90.0", "45.0 ± 7.1", "30.0", "10.0"]
    assert row(shown, "65,536") == [*read, "95.0", "85.0 ± 7.1", "95.0", "10.0"]
    told = (
        "Encoders of words: test accuracy is 45.0 % at 512 bytes, 85.0 % at 65,536 bytes. It is "
        "above the floor of word counts at 512 bytes and below it by up to 10.0 points, at 65,536 "
        "bytes. Between the last two validations their accuracy rose most, by 25.0 points, at "
        "65,536 bytes."
    )
    assert told in shown
    for device, length in (("X", "512"), ("Y", "65,536")):
        assert f"\n\nEncoders of words, {length} bytes: *NVIDIA {device}, torch 2," in shown
    assert "(../experiments/results/long-documents-authors-words-nvidia-x-nvidia-y.png)" in shown
    assert row(paper.overview(), "Table 5")[-1] == "1 of 4"
    # Runs that are shorter than two intervals of validation have one validation.
    for path in tmp_path.glob("runs/*/seed*/result.json"):
        run = json.loads(path.read_text())
        write_json(path, run | {"curve": run["curve"][-1:]})
    gather(name, tmp_path / "runs", floors, tmp_path)
    assert "last two validations" not in paper.authors()
    # Longer runs of one length are a row of their own, and have no picture.
    (tmp_path / "runs/512").rename(tmp_path / "512")
    gather(f"{name}-long", tmp_path / "runs", floors, tmp_path)
    shown = paper.authors()
    assert shown.count("| 65,536 | words |") == 2
    assert (shown.count("!["), shown.count("Encoders of words: ")) == (1, 1)
    assert shown.count("Encoders of words, 65,536 bytes: *NVIDIA Y") == 2


def test_table_5_tells_encoders_from_random_weights_and_of_shorter_lengths_apart(paper, tmp_path):
    for name, start in (("authors-words", None), ("authors-words-chain", START)):
        write_runs(tmp_path / name, start=start)
        for path in tmp_path.glob(f"{name}/*/seed*/result.json"):
            run = json.loads(path.read_text())
            environment = FACTS | {"device": "NVIDIA X"}
            more = {"environment": environment} | ({"accumulate_grad_batches": 8} if start else {})
            write_json(path, run | more)
        gather(name, tmp_path / name, tmp_path / "long-documents-floors.json", tmp_path)
    floors = tmp_path / "long-documents-floors.json"
    known = json.loads(floors.read_text())
    known["floors"]["65536"] = known["floors"]["512"]
    write_json(floors, known)
    shown = paper.authors()
    lines = [line.split(" | ") for line in shown.splitlines() if line.startswith("| 65,536 |")]
    assert [line[2] for line in lines] == ["random weights", "512 bytes"]
    assert [line[5] for line in lines] == ["40 to 44", "320 to 352"]
    assert shown.count("Encoders of words: test accuracy is") == 1
    assert shown.count("Encoders of words that start from a shorter length: test accuracy") == 1
    assert "Encoders of words that start from a shorter length, 512 to 65,536 bytes: *" in shown


def test_table_5_by_the_paper_s_method(paper, tmp_path):
    assert paper.TABLES["tuned"]().startswith("*Not measured yet")
    runs = [{"attention": "local(8) | butterfly()", "environment": FACTS}] * 2
    lengths = {"1024": {"micro_f1": 0.743, "deviation": 0.01, "runs": runs}}
    record = {"name": "ecthr", "lengths": lengths}
    write_json(tmp_path / "long-documents-ecthr-nvidia-h200.json", record)
    shown = paper.TABLES["tuned"]().replace("\\|", "or")
    assert row(shown, "1,024") == ["74.3 ± 1.0", "2", "`local(8) or butterfly()`"]
    assert row(paper.overview(), "Table 5")[-1] == "1 of 4"


def test_milliseconds_have_three_digits_or_all_before_the_point(paper):
    milliseconds = sys.modules["records"].milliseconds
    shown = {0.0341: "0.0341", 6.0: "6.00", 271.4: "271", 999.4: "999", 999.7: "1,000"}
    assert {value: milliseconds(value) for value in shown} == shown


def test_a_page_without_marks_is_an_error(paper):
    with pytest.raises(ValueError, match="the page needs <!-- overview -->"):
        paper.written("no marks", paper.TABLES)
