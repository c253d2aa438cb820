"""The scaling script: what it measures, and a run over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import masks
from experiments.long_context.baselines import ring_plan
from experiments.long_context.scaling import BLOCK, patterns

ROOT = Path(__file__).parents[3]


def test_a_ring_brings_every_shard_once():
    plan = ring_plan(masks.local((100, 0))(1024, 64), 4)
    for rank in range(4):
        rounds = plan.part(rank).rounds
        senders = [each.receive_splits for each in rounds]
        assert senders == [[256 * (i == (rank + n) % 4) for i in range(4)] for n in (1, 2, 3)]
    assert [each.mask is None for each in plan.part(0).rounds] == [True] * 3
    assert [each.mask is None for each in plan.part(3).rounds] == [True, True, False]


def test_patterns_have_the_same_blocks_in_a_row_at_every_length():
    for name in ("window", "local+global"):
        short, long = (patterns(512)[name](n, BLOCK).blocks_per_row() for n in (4096, 8192))
        assert torch.equal(short[0, 8:16], long[0, 8:16])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_a_run_on_two_processes(tmp_path, kind):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "experiments.long_context.scaling", kind]
    command += ["--tokens", "512", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
    command += ["--window", "256", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob(f"long-context-{kind}-2-*.json")
    record = json.loads(path.read_text())
    rows = record["rows"]
    assert record["complete"]
    assert len(rows) == 5 * (2 + 3)
    assert {row["seq_len"] for row in rows} == ({512, 1024} if kind == "weak" else {512})
    for row in rows:
        assert row["difference"] < 1e-4
        assert row["receive_mb"] <= row["gathered_mb"]
        assert row["total_ms"] > 0
