import json
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console

from experiments.instruments import tuning
from experiments.instruments.tuning import Problem, candidates, check_close, fastest, save
from sparseflash.backends.triton import configs
from sparseflash.backends.triton.configs import Config
from tests.helpers.tuned import H200, configuration_in_use

PROBLEM = Problem("bf16", head_dim=128, block_size=128, batch=1, heads=2, seq_len=256)
PROBLEMS = [(which, 0) for which in configs.PASSES] + [("decode", n) for n in tuning.PACKED]


def row(density, median_ms, **changes):
    config = replace(Config(64, 64, 4, 2), **changes)
    return asdict(config) | {"density": density, "median_ms": median_ms}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(configs, "limits", lambda device: H200)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("which", "packed"), PROBLEMS)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_the_configuration_in_use_is_one_of_those_measured(which, packed, head_dim):
    problem = replace(PROBLEM, head_dim=head_dim, packed=packed)
    in_use = configuration_in_use(which, problem)
    found = list(candidates(which, problem))
    assert in_use in found
    assert len(found) == len(set(found))
    assert all(configs.shared_memory(c, which, torch.bfloat16, head_dim) <= H200[1] for c in found)


def test_configurations_are_ranked_by_the_product_of_their_times(capsys):
    rows = [row("1", 4.0), row("1/16", 1.0), row("1", 5.0, warps=8), row("1/16", 0.5, warps=8)]
    Console(width=120).print(fastest(rows, "dq"))
    printed = capsys.readouterr().out
    assert printed.index("warps=8") < printed.index("warps=4")
    assert "dq: 2 configurations" in printed


def test_a_later_run_replaces_its_own_rows_only(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "environment", lambda device: {})
    path = tmp_path / "tune.json"
    save(path, "dq", PROBLEM, [row("1", 4.0)])
    save(path, "forward", PROBLEM, [row("1", 2.0)])
    save(path, "dq", PROBLEM, [row("1", 3.0)])
    runs = json.loads(path.read_text())
    assert [(run["pass"], run["rows"][0]["median_ms"]) for run in runs] == [
        ("forward", 2.0),
        ("dq", 3.0),
    ]
    save(path, "decode", replace(PROBLEM, packed=4), [row("1", 4.0)])
    save(path, "dq", replace(PROBLEM, head_dim=64), [row("1", 5.0)])
    runs = [(run["pass"], run["problem"]["head_dim"]) for run in json.loads(path.read_text())]
    assert runs == [("forward", 128), ("dq", 128), ("decode", 128), ("dq", 64)]


def test_a_step_of_decoding_is_measured_with_few_and_with_many_heads():
    assert tuning.problems("dq", PROBLEM) == [PROBLEM]
    steps = tuning.problems("decode", PROBLEM)
    assert [(step.packed, step.q_len, step.seq_len) for step in steps] == [
        (packed, 1, tuning.CACHED) for packed in tuning.PACKED
    ]
    assert PROBLEM.q_len == PROBLEM.seq_len


def test_older_architectures_have_no_tensor_memory_accelerator(monkeypatch):
    for architecture, some in ((80, False), (90, True)):
        monkeypatch.setattr(configs, "limits", lambda device, a=architecture: (a, H200[1]))
        assert any(config.tma for config in candidates("forward", PROBLEM)) == some


def test_a_wrong_result_is_not_timed():
    right = torch.randn(64)
    check_close([right, None], [right.clone(), None], "dq")
    with pytest.raises(AssertionError, match="dq with this: differs"):
        check_close([right + 0.1], [right], "dq with this")


@pytest.mark.gpu
@pytest.mark.parametrize(("which", "packed"), PROBLEMS)
def test_every_pass_is_measured_on_both_masks(which, packed):
    problem = replace(PROBLEM, packed=packed)
    config = Config(16 if packed == 4 else 64, 64, 4, 2)
    rows = list(tuning.measure(which, problem, config, Console()))
    assert [r["density"] for r in rows] == ["1", "1/16"]
    assert all(r["median_ms"] > 0 for r in rows)
