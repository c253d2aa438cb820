"""Training on ranks against training in one process, and resumption."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from torch import Tensor
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from experiments.long_context import model, training
from experiments.long_context import train as program
from experiments.long_context.choices import Precision, Settings
from experiments.long_context.corpus import Task
from experiments.long_context.training import Training
from tests.helpers.context_training import SETTINGS, train


@pytest.fixture(scope="module")
def one_process(one_rank, tmp_path_factory):
    """The losses of every task."""
    folder, found = tmp_path_factory.mktemp("losses"), {}
    for task in (Task.COPY, Task.RETRIEVAL):
        (found[task],) = one_rank.run(train, replace(SETTINGS, task=task), folder / task)
    return found


def first_step(rank: int, settings: Settings, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss of the first step and the whole gradients."""
    folder.mkdir(exist_ok=True)
    training = Training(settings, folder, torch.device("cpu"))
    with mock.patch.object(training.optimizer, "zero_grad"):
        loss = training._train_step()
    grads = {}
    for name, parameter in training.model.named_parameters():
        grad = parameter.grad
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return loss, grads


@pytest.mark.parametrize("context", [2, 4])
def test_four_ranks_of_data_and_context_step_like_one_process(
    four_ranks, one_rank, tmp_path, context
):
    """Of a mesh of 2 x 2, and of one of 1 x 4; parameters are sharded over all four (FSDP2)."""
    ((expected, gradients),) = one_rank.run(first_step, SETTINGS, tmp_path / "one")
    settings = replace(SETTINGS, context=context)
    for loss, grads in four_ranks.run(first_step, settings, tmp_path / "four"):
        assert loss == pytest.approx(expected, abs=1e-12)
        assert grads.keys() == gradients.keys()
        for name, grad in gradients.items():
            assert grad.abs().max() > 0
            torch.testing.assert_close(grads[name], grad, atol=1e-12, rtol=1e-9)


def test_four_ranks_train_like_one_process(one_process, four_ranks, tmp_path):
    for losses in four_ranks.run(train, replace(SETTINGS, context=2), tmp_path / "run"):
        assert losses == pytest.approx(one_process[Task.COPY], abs=1e-10)


def test_four_ranks_go_on_from_a_checkpoint_of_two(one_process, two_ranks, four_ranks, tmp_path):
    settings = replace(SETTINGS, context=2)
    two_ranks.run(train, replace(settings, steps=2), tmp_path / "run")
    for losses in four_ranks.run(train, settings, tmp_path / "run"):
        assert losses == pytest.approx(one_process[Task.COPY][2:], abs=1e-10)


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
    settings = replace(SETTINGS, context=2, precision=Precision.SINGLE)
    for losses in two_ranks.run(train, settings, tmp_path / "run"):
        assert losses == pytest.approx(one_process[Task.COPY], rel=1e-3)


def angles(rank: int, settings: Settings, folder: Path) -> tuple[list[float], set[torch.dtype]]:
    """The losses, and the dtypes of the angles that layers have."""
    with mock.patch.object(model, "rotate", wraps=model.rotate) as rotate:
        losses = train(rank, settings, folder)
    return losses, {call.args[1].dtype for call in rotate.call_args_list}


@pytest.mark.parametrize("recompute", [True, False])
def test_mixed_precision_has_angles_of_single_precision(
    one_process, two_ranks, tmp_path, recompute
):
    """Those of far positions would be wrong in bfloat16, and must be the same if recomputed."""
    settings = replace(SETTINGS, context=2, precision=Precision.MIXED, recompute=recompute)
    for losses, dtypes in two_ranks.run(angles, settings, tmp_path / "run"):
        assert losses == pytest.approx(one_process[Task.COPY], rel=2e-2)
        assert dtypes == {torch.float32}


def test_a_run_that_goes_on_is_the_run_that_never_stopped(one_process, two_ranks, tmp_path):
    settings = replace(SETTINGS, context=2)
    whole = two_ranks.run(train, settings, tmp_path / "whole")
    two_ranks.run(train, replace(settings, steps=2), tmp_path / "parts")
    rest = two_ranks.run(train, settings, tmp_path / "parts")
    assert rest[0] == whole[0][2:]
    assert two_ranks.run(train, settings, tmp_path / "parts") == [[], []]


def resumed(rank: int, settings: Settings, folder: Path) -> str:
    """The error of a run that resumes with these settings."""
    try:
        Training(settings, folder, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_run_resumes_with_its_settings_alone(two_ranks, tmp_path):
    folder = tmp_path / "run"
    settings = replace(SETTINGS, steps=2, context=2)
    two_ranks.run(train, settings, folder)
    told = f"the run in {folder} has other settings: lr 0.001, not 0.5, seed 0, not 1"
    assert two_ranks.run(resumed, replace(settings, lr=0.5, seed=1), folder) == [told] * 2
    same = replace(settings, steps=9, context=1, recompute=False, save_every=5, strategy="zigzag")
    assert two_ranks.run(resumed, same, folder) == ["nothing"] * 2


def refusals(rank: int, calls: list[list[str]]) -> list[str]:
    """What the program prints on a rank of two for arguments that cannot be."""
    app, found = typer.Typer(), []
    app.command()(program.main)
    with mock.patch.object(training, "start", return_value=torch.device("cpu")):
        for arguments in calls:
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 2, done.output
            found.append(" ".join(done.output.replace("│", " ").split()))
    return found


def test_wrong_settings_are_errors_of_the_command_line(two_ranks, tmp_path):
    cases = {
        "--context 3": "context must divide the 2 ranks, got 3",
        "--context 1 --batch 3": "batch must be a multiple of the 2 rows of ranks, got 3",
        "--heads 3": "width must be a multiple of 6, an even number of dims for each of the 3",
        "--kv-heads 3": "kv_heads must divide the 4 heads, got 3",
        "--context 2 --strategy zig": "strategy must be auto or one of",
        "--context 2 --pattern zig": "pattern 'zig' cannot be read",
        "--context 2 --tokens 100": "ranks must be at most the 1 units of the mask, got 2",
        f"--task text --text {__file__} --tokens 20000": "text must have more than 20000",
    }
    calls = [[*each.split(), "--output", str(tmp_path / "run")] for each in cases]
    for found in two_ranks.run(refusals, calls):
        assert isinstance(found, list), found
        for text, message in zip(found, cases.values(), strict=True):
            assert message in text, text
