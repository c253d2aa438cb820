import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import sparseflash
from sparseflash import __main__, backends
from sparseflash.backends import cpu
from sparseflash.testing import selfcheck


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(selfcheck, "DTYPES", (torch.float32,))
    monkeypatch.setattr(selfcheck, "HEAD_DIMS", (32, 64, 80))
    monkeypatch.setattr(selfcheck, "CHECKS", selfcheck.CHECKS[4:])
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS[:1])
    monkeypatch.setattr(selfcheck, "_devices", lambda: ["cpu"])


def run() -> tuple[int, str]:
    """What selfcheck returns, and what it prints."""
    output = io.StringIO()
    return sparseflash.selfcheck(Console(file=output, width=200)), output.getvalue()


def test_a_right_backend_passes():
    failures, output = run()
    assert failures == 0
    assert "all within the error budget" in output


def test_a_number_of_processes_below_one_is_refused():
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        selfcheck.selfcheck(processes=0)


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
    monkeypatch.setattr(selfcheck, "ProcessPoolExecutor", Pool)
    output = io.StringIO()
    assert sparseflash.selfcheck(Console(file=output, width=200), processes=3) == 0
    assert shared == [(3, "spawn", torch.set_num_threads, (2,))]
    assert output.getvalue() == run()[1]


def test_every_check_is_made_once(monkeypatch):
    checked = []
    monkeypatch.setattr(selfcheck.Case, "run", lambda case, *check: checked.append((case, *check)))
    assert run()[0] == 0
    expected = {(case, *check) for case in selfcheck.cases() for check in selfcheck.CHECKS}
    assert len(checked) == len(expected) == 6
    assert set(checked) == expected


def test_a_wrong_backend_fails(monkeypatch):
    wrong = vars(cpu) | {"forward": lambda *call: [1.01 * x for x in cpu.forward(*call)]}
    monkeypatch.setattr(backends, "BACKENDS", (SimpleNamespace(**wrong),))
    result = CliRunner().invoke(__main__.app, ["selfcheck"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "error" in result.output
    assert "6 failures" in result.output


def test_nothing_checked_is_a_failure(monkeypatch):
    nothing = vars(cpu) | {"name": "nothing", "why_not": lambda spec, mask: ["it is a stub"]}
    monkeypatch.setattr(backends, "BACKENDS", (SimpleNamespace(**nothing),))
    failures, output = run()
    assert failures == 1
    assert "nothing is not checked: it is a stub" in output
