"""Figures in sentences of the pages about the paper and about Long Range Arena."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, geometric_mean

import pytest

from experiments import long_documents
from experiments.cli import SHIPPED, Baseline
from experiments.language_model.model import causal_pattern
from experiments.language_model.results import bits_at, common_seconds, mean_bits, repeated
from experiments.long_documents.results import RANDOM, span, start_of
from experiments.lra import page
from experiments.pretraining import exact_pairs, largest_difference
from experiments.record import Line, Record, crossing_length, is_ours, lines, read_rows

pytestmark = pytest.mark.records
H100 = "nvidia-h100-80gb-hbm3"
APPROXIMATIONS = {name.value for name in Baseline if name.approximate}
PAPER = Path(__file__).parents[2] / "docs/paper.md"


def words(path: Path) -> str:
    return " ".join(path.read_text().split())


def read(name: str, device: str = "nvidia-h200") -> dict:
    return json.loads((SHIPPED / f"{name}-{device}.json").read_text())


def between(values: Iterable[float], digits: int) -> str:
    found = list(values)
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def test_training_steps_of_standard_models():
    every = [read("pretraining", device)["rows"] for device in ("nvidia-h200", H100)]
    rows = [row for rows in every for row in rows if "reason" not in row]
    rows = [row for row in rows if bool(row["padding"]) == (row["model"] == "bert-large")]
    of = {
        (row["model"], row["seq_len"], row["dropout"], row["attention"]): row
        for row in reversed(rows)  # of the first device that has it
    }
    pattern = next(name for *_, name in of if "local" in name)

    def gain(model: str, length: int, attention: str, dropout: float = 0.1) -> float:
        """Percent by which it is faster than SDPA."""
        mine, sdpa = (of[model, length, dropout, each] for each in (attention, "sdpa"))
        return 100 * (mine["tokens_per_second"] / sdpa["tokens_per_second"] - 1)

    def apart(model: str, dropout: float = 0.1) -> float:
        """The largest difference of two losses at the same size on one device."""
        losses: dict[tuple, list[float]] = {}
        for row in rows:
            if row["model"].startswith(model) and row["dropout"] == dropout:
                size = (row["model"], row["seq_len"], row["environment"]["device"])
                losses.setdefault(size, []).append(row["loss"])
        return max(max(v) - min(v) for v in losses.values())

    text = words(PAPER)
    full = [gain(m, n, a, p) for m, n, p, a in of if a == "ours" and m.startswith("gpt2")]
    assert {n for m, n, _, a in of if a == "ours" and m == "gpt2"} == {512, 1024, 2048, 4096}
    assert f"sparseflash is {between(full, 0)} % faster than SDPA on GPT-2" in text
    short, middle, long = (gain("bert-large", n, "ours") for n in (512, 1024, 2048))
    told = f"{-short:.0f} % slower at 512 tokens, {middle:.0f} % faster at 1,024 and {long:.0f} %"
    assert told in text
    models = (("gpt2", 4096), ("gpt2-medium", 4096), ("bert-large", 1024), ("bert-large", 2048))
    gains = [gain(*model, pattern) for model in models]
    assert f"The pattern is {between(gains, 0)} % faster than SDPA" in text
    longest = [round(gain("bert-large", 4096, each)) for each in ("ours", pattern)]
    told = "{} % faster than SDPA with a full mask, and {} % with the pattern".format(*longest)
    assert told in text
    assert apart("bert") < 0.002
    assert "losses of BERT-large differ by less than 0.002" in text
    assert f"differences of GPT-2 at the end, up to {apart('gpt2'):.2f}," in text
    assert apart("gpt2", 0.0) < apart("gpt2")


def test_training_steps_of_gpt2_with_padding():
    rows = read("pretraining-padding")["rows"]
    speed = {
        (row["model"], row["seq_len"], row["attention"]): row.get("tokens_per_second")
        for row in rows
    }
    text = words(PAPER)
    lengths = (512, 1024, 2048, 4096)
    gains = [100 * (speed["gpt2", n, "ours"] / speed["gpt2", n, "sdpa"] - 1) for n in lengths]
    assert gains == sorted(gains)
    told = f"{between(gains, 0)} % faster than SDPA on GPT-2 small, the more the longer"
    assert told in text
    over_eager = [speed["gpt2", n, "ours"] / speed["gpt2", n, "eager"] for n in lengths]
    assert f"{between(over_eager, 1)} times as fast as `eager`" in text
    medium = [
        f"{100 * (speed['gpt2-medium', n, each] / speed['gpt2-medium', n, 'sdpa'] - 1):.0f}"
        for each in ("ours", pattern_of(rows))
        for n in lengths
    ]
    told = (
        "on GPT-2 medium it is {}, {}, {} and {} % faster at 512 to 4,096 tokens, and the pattern "
        "{}, {}, {} and {} %"
    )
    assert told.format(*medium) in text
    assert speed["gpt2-medium", 4096, "eager"] is None
    peak = {
        row["attention"]: f"{row['peak_bytes'] / 2**30:.0f}"
        for row in rows
        if (row["model"], row["seq_len"]) == ("gpt2-medium", 2048)
    }
    told = "`eager` takes {eager} GiB at 2,048 tokens, where sparseflash takes {ours}"
    assert told.format(**peak) in text
    over_eager = speed["bert-large", 1024, "ours"] / speed["bert-large", 1024, "eager"]
    told = (
        f"On BERT-large at 1,024 tokens sparseflash is {over_eager:.1f} times as fast as `eager`"
    )
    assert told in text
    gains = [
        100 * (speed["bert-large", n, each] / speed["bert-large", n, "sdpa"] - 1)
        for n, each in ((1024, "ours"), (4096, "ours"), (1024, pattern_of(rows)))
    ]
    told = "it is {:.0f} % faster at 1,024 tokens and {:.0f} % at 4,096, and the pattern {:.0f} %"
    assert f"In the later runs on other books {told.format(*gains)} at 1,024" in text


def pattern_of(rows: list[dict]) -> str:
    return next(row["attention"] for row in rows if "local" in row["attention"])


def test_exact_attentions_without_dropout_agree_until_training_amplifies_rounding():
    rows = read("pretraining", H100)["rows"] + read("pretraining")["rows"]
    of = {0.0: [], 0.1: []}
    for one, two in exact_pairs(rows):
        if (one["model"], one["seq_len"], one["padding"]) == ("gpt2", 1024, 0):
            of[one["dropout"]].append((one, two))
    exact, dropped = of.values()
    text = words(PAPER)
    assert len(dropped) == 3
    ours, others = [], []
    for pair in exact:
        of_sdpa = {row["attention"] for row in pair} == {"sdpa", "ours"}
        (ours if of_sdpa else others).append(pair)
    assert [sorted(pair[0]["steps"] for pair in pairs) for pairs in (ours, others)] == [
        [100, 300],
        [100, 100],
    ]
    first = [largest_difference(*pair, 5) for pair in exact]
    first += [largest_difference(*pair, 10) for pair in ours]
    assert round(max(first), 4) == 1e-4
    assert "losses on GPT-2 agree to 0.0001 in the first five steps, those of SDPA and" in text
    assert min(largest_difference(*pair, 10) for pair in others) > 1e-3
    most = {
        f"{max(largest_difference(*pair) for pair in exact if pair[0]['steps'] == steps):.2f}"
        for steps in (100, 300)
    }
    (only,) = most
    told = f"within 100 and within 300 steps the losses of GPT-2 are up to {only} apart in a step"
    assert told in text
    (bert,) = (pair for pair in exact_pairs(rows) if is_long_bert(pair[0]))
    assert f"on BERT-large to {largest_difference(*bert, 5):.4f} in the first five" in text
    (gpt2,) = (pair for pair in ours if pair[0]["steps"] == 300)
    (a, b), (c, d) = (losses_of(pair) for pair in (gpt2, bert))
    told = f"losses of {a:.3f} and {b:.3f} on GPT-2, of {c:.4f} and {d:.4f} on BERT-large"
    assert f"After 300 steps SDPA and sparseflash have {told}" in text
    with_dropout = [largest_difference(*pair, 5) for pair in dropped]
    told = f"without padding, are {between(with_dropout, 3)} apart within five steps"
    assert told in text
    most = max(largest_difference(*pair) for pair in dropped)
    assert f"the loss of SDPA rises and falls again, they are {most:.1f} apart" in text


def is_long_bert(row: dict) -> bool:
    return (row["model"], row["dropout"], row["steps"]) == ("bert-large", 0, 300)


def losses_of(pair: tuple[dict, dict]) -> tuple[float, float]:
    """The losses of SDPA and of sparseflash."""
    found = {row["attention"]: row["loss"] for row in pair}
    return found["sdpa"], found["ours"]


def test_time_and_memory_over_lengths():
    text, settings = words(PAPER), ("", "-dropout", "-padding", "-dropout-padding")
    found = {
        kind: lines(Record.load(SHIPPED / f"bench-landscape{kind}-nvidia-h200.json").rows)
        for kind in settings
    }
    full = {kind: each["sparseflash", "full"] for kind, each in found.items()}
    others = [
        (kind, name, line)
        for kind, each in found.items()
        for (name, _), line in each.items()
        if not is_ours(name)
    ]
    sparse = {
        (kind, family): line
        for kind, each in found.items()
        for (name, family), line in each.items()
        if is_ours(name) and family != "full"
    }
    assert len(sparse) == 3 * len(settings)
    slower = {
        n
        for kind, _, other in others
        for (own_kind, _), line in sparse.items()
        for n in other
        if own_kind == kind and line[n][0] >= other[n][0]
    }
    assert max(slower) == 512
    told = "at 1,024 tokens and more, each of the block-sparse patterns is faster than every other"
    assert f"{told} implementation, in all four settings" in text
    flash4 = {kind: line for kind, name, line in others if name == "flash4"}
    assert flash4.keys() == {"", "-padding"}
    plain, padded = (crossing_length(flash4[kind], full[kind]) or 0 for kind in flash4)
    told = f"from {plain:,.0f} tokens on without padding and from {padded:,.0f} on with padding"
    assert f"slower than FlashAttention-4, {told}; FlashAttention-4 has no dropout" in text

    first, kind, name = min(
        (length, kind, name)
        for kind, name, line in others
        if name in APPROXIMATIONS and (length := crossing_length(line, full[kind])) is not None
    )
    assert (kind, name) == ("-dropout", "sinkhorn")
    told = f"faster than the full mask from {first:,.0f} tokens on (Sinkhorn with dropout)"
    assert told in text

    def memory(own: Line, line: Line) -> list[float]:
        """Peak bytes over those of sparseflash with the full mask."""
        return [line[n][1] / own[n][1] for n in line]

    times = {(kind, name): memory(full[kind], line) for kind, name, line in others}
    assert max(max(of) for of in times.values()) == max(times["-dropout", "standard"])
    most = max(times["-dropout", "standard"])
    assert f"up to {most:.0f} times less memory than standard attention" in text
    less = {name for (_, name), of in times.items() if min(of) < 1}
    assert less == {"flex"}
    flex = [100 * (1 - of) for (_, name), each in times.items() if name == "flex" for of in each]
    assert {round(each) for each in flex} == {1}
    least = min(min(of) for (_, name), of in times.items() if name in APPROXIMATIONS)
    told = (
        f"needs 1 % less than sparseflash, approximations need at least {least:.1f} times as much"
    )
    assert told in text
    # The memory of patterns is that of the full mask.
    same = [line[n][1] / full[kind][n][1] for (kind, _), line in sparse.items() for n in line]
    assert max(same) < 1.001


def test_backward_passes_that_add_rows_by_index_have_no_times_of_long_sequences():
    for record in ("", "-padding", "-dropout", "-dropout-padding"):
        lengths = {"reformer": 0, "routing": 0, "smyrf": 0}
        for row in read_rows(read(f"bench-landscape{record}")):
            if row["implementation"] in lengths and row["direction"] == "backward":
                lengths[row["implementation"]] = max(
                    row["seq_len"], lengths[row["implementation"]]
                )
        assert {*lengths.values()} - {0} == {4096}
    told = "Reformer, routing attention and SMYRF have no times from 8,192 tokens on"
    assert told in words(PAPER)


def test_backward_passes_with_padding_take_about_the_time_of_those_without():
    ratios = []
    for padded in ("-padding", "-dropout-padding"):
        without, with_padding = (
            {
                (row["pattern"], row["seq_len"]): row["median_ms"]
                for row in read_rows(read(f"bench-landscape{record}"))
                if is_ours(row["implementation"])
                and row["direction"] == "backward"
                and row["seq_len"] >= 1024
            }
            for record in (padded.removesuffix("-padding"), padded)
        )
        ratios += [with_padding[each] / without[each] for each in without.keys() & with_padding]
    assert len(ratios) > 40
    told = f"takes at least {min(ratios):.2f} times the time of the one without"
    assert told in words(PAPER)


def test_language_models_with_longer_contexts():
    text = words(PAPER)
    before = read("language-model-25m-contexts")["runs"]
    records = {each: read("language-model-25m-warm-up", each) for each in ("nvidia-h200", H100)}
    runs = {
        (name, device): run
        for device, record in records.items()
        for name, run in record["runs"].items()
        if run["ended"]
    }
    groups = repeated({f"{name}, {device}": run for (name, device), run in runs.items()})
    of = {name.partition(",")[0]: group for name, group in groups.items()}
    bits = {name: mean_bits(group) for name, group in of.items()}
    longer = {name: group for name, group in of.items() if name.endswith("-16k")}

    def megabytes(found: Iterable[dict]) -> set[int]:
        return {round(run["trained"] * run["step_bytes"] / 1e6) for run in found}

    assert (megabytes(before.values()), megabytes(runs.values())) == ({197}, {498})
    assert all(
        run["bits_per_byte"] > before["dense-1k"]["bits_per_byte"]
        for name, run in before.items()
        if name != "dense-1k"
    )
    assert "without warm-up and after 197 MB, 16K bytes of context are worse than 1K" in text
    best = [f"{name}-16k" for name in ("dense", "wide", "mid", "narrow")]
    assert all(bits[name] < bits["dense-1k"] for name in best)
    for record in records.values():
        own = {name: run for name, run in record["runs"].items() if run["ended"]}
        last = common_seconds(own.values())
        assert last is not None
        timed = {name: bits_at(own[name], last) for name in ("dense-1k", *best) if name in own}
        assert None not in timed.values()
        if "dense-1k" in timed:
            assert max(timed, key=lambda name: timed[name] or 0) == "dense-1k"
    told = "With warm-up and after 498 MB they are better, with dense attention and with the wide,"
    assert told in text
    assert "after equal times too, on the GPU with a run of 1K" in text
    assert all(at_1k(of["dense-1k"][0]) <= fmean(map(at_1k, group)) for group in longer.values())
    told = "at positions 512 to 1,024 no attention with 16K is better than 1K, as a mean"
    assert told in text
    by_width = [bits[f"{name}-16k"] for name in ("wide", "mid", "narrow")]
    assert by_width == sorted(by_width)

    def speed_up(name: str) -> float:
        """Times the throughput of dense attention on the same GPU."""
        for device, record in records.items():
            if name in record["runs"]:
                dense = runs["dense-16k", device]["bytes_per_second"]
                return runs[name, device]["bytes_per_second"] / dense
        raise AssertionError(name)

    speeds = [speed_up(f"{name}-16k") for name in ("wide", "mid", "narrow")]
    assert speeds == sorted(speeds)
    assert "Wider windows are closer to dense attention, and slower" in text
    assert bits["mid-16k"] / bits["dense-16k"] < 1.01
    assert speed_up("mid-16k") > 2
    told = "The middle pattern is within 1 % of dense attention at twice its throughput"
    assert told in text
    assert 1 < bits["dense-4k"] / bits["dense-16k"] < 1.01
    assert "with dense attention 16K is less than 1 % better than 4K" in text
    assert abs(bits["dense-4k"] / bits["mid-16k"] - 1) < 0.005
    own = records["nvidia-h200"]["runs"]
    assert own["mid-16k"]["bytes_per_second"] > own["dense-4k"]["bytes_per_second"]
    assert "it is as good as dense attention with 4K, to 0.5 %, and faster" in text
    assert bits["narrow-16k"] < bits["narrow-64k"] < bits["dense-1k"]
    assert "better than 1K, but not better than itself with 16K" in text
    assert 0.99 * bits["dense-1k"] < bits["hybrid-16k"] < bits["dense-1k"]
    assert "It is hardly better than 1K bytes of context" in text
    assert {run["short_steps"] / run["steps"] for run in of["dense-16k"]} == {0.6}
    assert "in the first 60 % of its steps" in text
    equal = [of["dense-1k"][0], runs["dense-16k", H100], runs["wide-16k", H100]]
    assert {run["short_steps"] for run in equal[1:]} == {2280}
    assert {run["short_context"] for run in equal[1:]} == {equal[0]["model"]["context"]} == {1024}
    assert equal[2]["model"]["attention"][0].startswith("local(2048)")
    at = [p["bits_per_byte"] for run in equal for p in run["curve"] if p["step"] == 2000]
    apart = 100 * (max(at) / min(at) - 1)
    assert f"bits per byte at step 2,000 that are {apart:.1f} % apart" in text
    two = [runs["dense-16k", device]["bits_per_byte"] for device in records]
    ended = 100 * (max(two) / min(two) - 1)
    assert f"to two dense runs with 16K that are {ended:.1f} % apart at the end" in text


def test_language_models_of_tokens():
    runs = read("language-model-25m-warm-up-tokens")["runs"]
    short, long = (runs[name] for name in ("dense-1k", "dense-16k"))
    last = common_seconds((short, long))
    assert last is not None
    after_equal_times = [bits_at(run, last) or 0 for run in (short, long)]
    assert short["bits_per_byte"] < long["bits_per_byte"]
    assert after_equal_times[0] < after_equal_times[1]
    size = long["step_bytes"] / long["step_tokens"] * long["model"]["context"]
    told = f"16K tokens of context, some {size / 1e3:.0f} KB, are worse than 1K tokens with dense"
    assert told in words(PAPER)
    steps = long["steps"] - long["short_steps"]
    assert f"Only {steps} of {long['steps']:,} steps read 16K tokens" in words(PAPER)
    mid = runs["mid-16k"]
    less = [100 * (1 - mid["bits_per_byte"] / run["bits_per_byte"]) for run in (short, long)]
    told = "better than both: {:.1f} % better than 1K, and {:.1f} % better than dense attention"
    assert told.format(*less) in words(PAPER)
    last = common_seconds((short, long, mid))
    assert last is not None
    timed = {name: bits_at(run, last) or 0 for name, run in runs.items()}
    assert min(timed, key=lambda name: timed[name]) == "mid-16k"
    assert "after equal times too (one run of each)" in words(PAPER)


def test_a_larger_language_model():
    runs, text = read("language-model-124m-warm-up")["runs"], words(PAPER)
    short, dense, mid = (runs[name] for name in ("dense-1k", "dense-16k", "mid-16k"))
    assert all(run["ended"] for run in runs.values())
    (size,) = {round(run["trained"] * run["step_bytes"] / 1e6) for run in runs.values()}
    told = f"of {short['parameters'] / 1e6:.0f}M parameters, after {size} MB: 16K bytes of context"
    assert f"{told} are worse than 1K" in text
    bits = [run["bits_per_byte"] for run in (short, mid, dense)]
    last = common_seconds((short, dense, mid))
    assert last is not None
    timed = [bits_at(run, last) or 0 for run in (short, mid, dense)]
    assert bits == sorted(bits)
    assert timed == sorted(timed)
    long = mid["steps"] - mid["short_steps"]
    assert f"Only {long} of {mid['steps']} steps read 16K bytes" in text
    less = 100 * (1 - mid["bits_per_byte"] / dense["bits_per_byte"])
    speed = mid["bytes_per_second"] / dense["bytes_per_second"]
    told = f"{less:.2f} % fewer bits per byte than dense attention with 16K, at {speed:.2f} times"
    assert told in text
    pay = read("language-model-25m-warm-up-tokens")["runs"]["mid-16k"]["parameters"]
    assert f"have 25M, or {pay / 1e6:.0f}M with BPE" in text


def test_densities_of_the_patterns_of_language_models():
    records = (read("language-model-25m-warm-up", device) for device in ("nvidia-h200", H100))
    runs = {name: run for record in records for name, run in record["runs"].items()}
    models = [runs[f"{name}-16k"]["model"] for name in ("wide", "mid", "narrow")]
    of = [
        causal_pattern(*model["attention"], model["heads"], model["block_size"])(16_384).density
        for model in models
    ]
    told = "s = 1/{}, 1/{} and 1/{}".format(*(round(1 / density) for density in of))
    assert f"the wide, the middle and the narrow pattern have {told}" in words(PAPER)


def at_1k(run: dict) -> float:
    """Bits per byte at positions 512 to 1,024."""
    return run["curve"][-1]["by_position"][run["positions"][1:].index(1024)]


def learns_books(groups: dict, floors: dict) -> bool:
    """Whether encoders exceed the floor of words at the shortest lengths only, and are right more
    often on validation passages, by 25 points."""
    exceeds = [each["accuracy"] > floors[n]["words"]["accuracy"] for n, each in groups.items()]
    return (
        any(exceeds)
        and not all(exceeds)
        and exceeds == sorted(exceeds, reverse=True)
        and all(
            fmean(max(point[1] for point in run["curve"]) for run in group["runs"])
            > group["accuracy"] + 0.25
            for group in groups.values()
        )
    )


def test_authors_of_passages():
    record, text = read("long-documents-authors-words", f"nvidia-h200-{H100}"), words(PAPER)
    groups = record["lengths"]
    runs = {int(length): group["runs"] for length, group in groups.items()}
    assert all(n * run["batch_size"] == 2**18 for n, group in runs.items() for run in group)
    assert "every step reads 256 KiB" in text
    *shorter, longest = (group["accuracy"] for group in groups.values())
    assert shorter == sorted(shorter)
    assert longest < shorter[-1]
    assert list(runs)[-2:] == [2**15, 2**16]
    assert "from random weights the accuracy on passages of test books rises" in text
    assert "rises with the length up to 32K. At 64K it is lower after 2,000 steps" in text
    assert {run["steps"] * run["batch_size"] for run in runs[2**16]} == {8000}
    assert "in which an encoder reads 8,000 passages" in text
    assert learns_books(groups, record["floors"])
    ended = {n for n, group in runs.items() if any(run["steps"] < 2000 for run in group)}
    assert ended == {8192, 16_384}
    assert "runs of 8,192 and 16,384 bytes ended at a time limit" in text


def test_authors_of_passages_from_a_shorter_length():
    chain, text = read("long-documents-authors-words-chain", H100), words(PAPER)
    groups = chain["lengths"]
    before = read("long-documents-authors-words", f"nvidia-h200-{H100}")["lengths"]
    lengths = ["512", "2048", "8192", "32768", "65536"]
    assert list(groups) == lengths
    starts = [{start_of(run) for run in group["runs"]} for group in groups.values()]
    assert starts == [{RANDOM}, *({span([n])} for n in lengths[:-1])]
    first, *later = (group["runs"] for group in groups.values())
    assert {run["steps"] for run in first} == {2000}
    assert {run["steps"] for runs in later for run in runs} == {600}
    told = "600 steps at each of 2,048, 8,192, 32,768 and 65,536 bytes from the weights of the"
    assert f"2,000 steps at 512 bytes from random weights, then {told} length before" in text
    for option in (
        *("model.optimizer.learning_rate=2e-4", "model.optimizer.warmup_steps=50"),
        *("trainer.max_steps=600", "trainer.val_check_interval=150"),
    ):
        given = f"--{option}"
        assert given in text
        assert not any(given in run["environment"]["command"] for run in first)
        assert all(given in run["environment"]["command"] for runs in later for run in runs)
    own = Path(long_documents.__file__).with_name("authors.yaml").read_text()
    assert "learning_rate: 5.0e-4" in own
    assert "warmup_steps: 200" in own
    assert "val_check_interval: 500" in own
    assert "There is one every 150 steps, from random weights every 500" in text
    tested = [run["tested_step"] for runs in later[1:] for run in runs]
    told = f"8,192 bytes and more the best one was after {min(tested)} to {max(tested)} steps"
    assert told in text
    told = "learning rate of 2e-4 instead of 5e-4 and a warm-up of 50 steps instead of 200"
    assert told in text
    gains = [100 * (groups[n]["accuracy"] - before[n]["accuracy"]) for n in lengths[1:]]
    best = f"{min(gains):.1f} to {max(gains):.1f} points higher"
    assert f"At 2,048 bytes and more their accuracy is {best}" in text
    mean = [group["accuracy"] for group in groups.values()]
    assert mean[:4] == sorted(mean[:4])
    assert mean[3] == pytest.approx(mean[4], abs=5e-4)
    assert "It rises with the length up to 32K, too, and has the same mean at 64K" in text
    seeds = between((100 * run["test/accuracy"] for run in groups["65536"]["runs"]), 0)
    assert f"There it is {seeds} % for the three seeds" in text
    assert learns_books(groups, chain["floors"])
    told = "What holds for both**: encoders exceed the floor of word counts at short lengths only"
    assert told in text


def test_speed_on_real_batches_and_of_compiled_steps():
    text = words(page.README)
    for device, clock, digits in (
        ("nvidia-h200", "graph", 1),
        ("nvidia-h200", "events", None),
        ("nvidia-h100-80gb-hbm3", "events", 1),
    ):
        means = read("lra-real", device)["geometric_mean_speedup"][clock]
        sparse = [speed for name, speed in means.items() if " of " in name]
        if digits is not None:
            assert f"{between(sparse, digits)} times as fast as standard ones" in text
        dense = between((speed / means["flash"] for speed in sparse), 1 if "h100" in device else 2)
        assert f"{dense} times as fast as" in text
    smyrf = read("lra-real")["geometric_mean_speedup"]["graph"]["smyrf"]
    assert f"as CUDA graphs {smyrf:.2f} times that of standard attention" in text
    times = {
        (name, step["attention"], step["block_size"], step["task"]): step["median_ms"]
        for name in ("lra-arena", "lra-compiled")
        for step in read(name)["steps"]
        if step["clock"] == "graph"
    }
    tasks = ("image", "listops", "text")
    gains = {
        attention: [
            times["lra-arena", attention, 128, task] / times["lra-compiled", attention, 128, task]
            for task in tasks
        ]
        for attention in ("butterfly(2)", "flash")
    }
    assert f"are another {between(gains['butterfly(2)'], 1)} times faster" in text
    assert geometric_mean(gains["flash"]) < geometric_mean(gains["butterfly(2)"])
    over = [
        times["lra-compiled", "flash", 128, task]
        / times["lra-compiled", "butterfly(2)", 128, task]
        for task in tasks
    ]
    one, two, three = (f"{ratio:.1f}" for ratio in over)
    assert f"block-sparse steps are then {one}, {two} and {three} times as fast" in text


def test_path_x_dense_beside_sparse():
    groups = read("lra-path-x-dense")["groups"]
    dense, sparse = (groups[f"path-x-{name}"]["runs"][0] for name in ("dense", "curriculum"))
    text = words(page.README)

    def hard(run: dict) -> dict[int, float]:
        """Validation accuracy at the steps of the last stage."""
        begin = run["stages"][0]["trained"]
        return {step - begin: 100 * a for step, a, *_ in run["curve"] if step > begin}

    own, other = hard(dense), hard(sparse)
    points = [own[step] - other[step] for step in own.keys() & other.keys()]
    assert len(points) > 10
    told = f"{-min(points):.0f} points below to {max(points):.0f} above the block-sparse one"
    assert told in text
    assert (
        f"after {3 * sparse['seconds']} seconds of GPU time ({sparse['seconds']} on three" in text
    )
    assert f"after {dense['seconds']} seconds of one H200 ({dense['steps']:,} steps" in text


def test_what_the_curriculum_of_pathfinder_needs():
    text = words(page.README)

    def last_stage(run: dict) -> dict[int, float]:
        """Validation accuracy in % at the steps of the last stage."""
        begin = sum(stage["trained"] for stage in run["stages"][:-1])
        if run["curve"][-1][0] == run["stages"][-1]["trained"]:
            begin = 0  # the curve is that of the last stage alone
        return {point[0] - begin: 100 * point[1] for point in run["curve"]}

    seeds = read("lra-pathfinder32-labels")["groups"]["pathfinder32-curriculum"]["runs"]
    at = sorted(last_stage(run)[1750] for run in seeds)
    assert f"{at[0]:.1f} to {at[-1]:.1f}% after 1,750 steps" in text
    groups = read("lra-pathfinder32-ablations")["groups"]
    mean, raster, at_once = (
        groups[f"pathfinder32-{name}"]["runs"][0] for name in ("mean", "raster", "at-once")
    )
    assert f"it is {last_stage(mean)[1750]:.1f}% after as many" in text
    end = raster["stages"][-1]["trained"]
    assert f"it is {last_stage(raster)[end]:.1f}% after {end:,}, where a time limit" in text
    assert at_once["stuck"]
    assert "Without shorter contours the model is stuck at chance" in text
    group = read("lra-pathfinder32-labels-easier")["groups"]["pathfinder32-easier"]
    (easier,) = group["runs"]
    told = f"{100 * easier['test/accuracy']:.2f}% after {easier['stages'][-1]['trained']:,} steps"
    assert told in text
    assert easier["test/accuracy"] < min(run["test/accuracy"] for run in seeds)


def test_other_attentions_on_listops():
    text = words(page.README)
    record = read("lra-listops-attentions")
    runs = {
        name.removeprefix("listops-"): group["runs"][0] for name, group in record["groups"].items()
    }
    stopped = {name: run["steps"] for name, run in runs.items() if run["steps"] < 5000}
    assert stopped.keys() == {"nystromformer", "smyrf", "performer"}
    assert f"(stopped after {stopped['nystromformer']:,} of 5,000 steps)" in text
    assert f"SMYRF (after {stopped['smyrf']:,})" in text
    assert f"Performer (stopped after {stopped['performer']:,} steps)" in text
    root = record["floors"]["root operator only"]
    reached = {n for n, run in runs.items() if abs(run["test/accuracy"] - root) < 0.03}
    assert reached == {"longformer", "bigbird", "linformer", "nystromformer", "smyrf"}
    for name, last in (("linear", 5000), ("performer", 5000), ("local", 4000)):
        curve = {step: accuracy for step, accuracy, *_ in runs[name]["curve"]}
        assert all(accuracy < 0.18 for step, accuracy in curve.items() if step <= last)
        assert name != "local" or max(curve.values()) > 0.2
    assert "stay at the most frequent class, and windows of 64 tokens do until step 4,000" in text


def test_image_and_pathfinder_of_the_published_protocol():
    text, ends, tested = words(page.README), [], []
    for group in read("lra-image")["groups"].values():
        ends += [run["steps"] for run in group["runs"]]
        tested += [run["tested_step"] for run in group["runs"] if run["steps"] == 35_000]
    assert sorted(ends)[2:] == [35_000] * 4
    assert fmean(sorted(ends)[:2]) / 35_000 == pytest.approx(0.4, abs=0.01)
    assert f"at steps {min(tested):,} to {max(tested):,} and falls afterwards" in text
    device = "nvidia-h100-80gb-hbm3"
    groups = read("lra-pathfinder32-published", device)["groups"].values()
    short = sorted(min(run["steps"] for run in group["runs"]) for group in groups)
    assert "after {:,} and {:,} (`runs/pathfinder32-published.sh`".format(*short) in text
