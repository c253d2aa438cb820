import io
import pickle
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import sparseflash
from sparseflash import __main__, backends
from sparseflash.testing import selfcheck as conformance


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(conformance, "DTYPES", (torch.float32,))
    monkeypatch.setattr(conformance, "HEAD_DIMS", (32, 64, 80))
    monkeypatch.setattr(conformance, "CHECKS", conformance.CHECKS[4:])
    monkeypatch.setattr(conformance, "BACKENDS", backends.BACKENDS[:1])
    monkeypatch.setattr(conformance, "_devices", lambda: ["cpu"])


def run() -> tuple[int, str]:
    """What selfcheck returns, and what it prints."""
    output = io.StringIO()
    return sparseflash.selfcheck(Console(file=output, width=200)), output.getvalue()


def test_a_right_backend_passes():
    failures, output = run()
    assert failures == 0
    assert "all within the error budget" in output


def test_processes_share_the_cases(monkeypatch):
    shared = []

    class Pool:
        def __init__(self, processes, context, begin, arguments):
            shared.append((processes, context.get_start_method(), begin, arguments))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def map(self, check, *parts):
            return [check(*pickle.loads(pickle.dumps(part))) for part in zip(*parts, strict=True)]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(conformance, "ProcessPoolExecutor", Pool)
    output = io.StringIO()
    assert sparseflash.selfcheck(Console(file=output, width=200), processes=3) == 0
    assert shared == [(3, "spawn", torch.set_num_threads, (2,))]
    assert output.getvalue() == run()[1]


def test_every_check_is_made_once(monkeypatch):
    checked = []
    monkeypatch.setattr(
        conformance.Case, "run", lambda case, *check: checked.append((case, *check))
    )
    assert run()[0] == 0
    expected = {(case, *check) for case in conformance.cases() for check in conformance.CHECKS}
    assert len(checked) == len(expected) == 6
    assert set(checked) == expected


def test_a_wrong_backend_fails(monkeypatch):
    wrong = replace(backends.BACKENDS[0], forward=lambda *a: [1.01 * x for x in cpu.forward(*a)])
    cpu = backends.BACKENDS[0]
    monkeypatch.setattr("sparseflash.dispatch.call.select", lambda name, spec: wrong)
    result = CliRunner().invoke(__main__.app, ["selfcheck"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "error" in result.output
    assert "6 failures" in result.output


def test_nothing_checked_is_a_failure(monkeypatch):
    nothing = replace(backends.BACKENDS[0], name="nothing", why_not=lambda spec: ["it is a stub"])
    monkeypatch.setattr(conformance, "BACKENDS", (nothing,))
    failures, output = run()
    assert failures == 1
    assert "nothing is not checked: it is a stub" in output
