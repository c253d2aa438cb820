"""Training on ranks against training in one process, and resumption."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.long_context.corpus import Task
from experiments.long_context.train import Settings, Training
from tests.helpers.ranks import Ranks

SETTINGS = Settings(
    tokens=200,
    pattern="(local(30) | global_tokens(2) | strided(4)) & causal()",
    block_size=16,
    width=32,
    batch=2,
    steps=4,
    warm_up=2,
    double=True,
    save_every=2,
)


def train(rank: int, settings: Settings, folder: Path) -> list[float]:
    folder.mkdir(exist_ok=True)
    return Training(settings, folder, torch.device("cpu")).run()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    started = Ranks(1, folder / "meeting")
    found = {}
    for task in (Task.COPY, Task.RETRIEVAL):
        (found[task],) = started.run(train, replace(SETTINGS, task=task), folder / task)
    yield found
    started.close()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    started = Ranks(2, tmp_path_factory.mktemp("two") / "meeting")
    yield started
    started.close()


@pytest.mark.parametrize("task", [Task.COPY, Task.RETRIEVAL])
@pytest.mark.parametrize(("context", "recompute"), [(2, True), (2, False), (1, True)])
def test_losses_are_those_of_one_process(
    one_process, two_ranks, tmp_path, task, context, recompute
):
    """Each loss but the first also depends on all gradients before it."""
    settings = replace(SETTINGS, task=task, context=context, recompute=recompute)
    for losses in two_ranks.run(train, settings, tmp_path / "run"):
        assert losses == pytest.approx(one_process[task], abs=1e-10)
    assert one_process[task][0] > one_process[task][-1]


def test_single_precision_trains_too(one_process, two_ranks, tmp_path):
    settings = replace(SETTINGS, context=2, double=False)
    for losses in two_ranks.run(train, settings, tmp_path / "run"):
        assert losses == pytest.approx(one_process[Task.COPY], rel=1e-3)


def test_a_run_that_goes_on_is_the_run_that_never_stopped(one_process, two_ranks, tmp_path):
    settings = replace(SETTINGS, context=2)
    whole = two_ranks.run(train, settings, tmp_path / "whole")
    two_ranks.run(train, replace(settings, steps=2), tmp_path / "parts")
    rest = two_ranks.run(train, settings, tmp_path / "parts")
    assert rest[0] == whole[0][2:]
    assert two_ranks.run(train, settings, tmp_path / "parts") == [[], []]
