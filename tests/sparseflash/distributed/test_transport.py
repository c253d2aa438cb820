from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from sparseflash.distributed.transport import HEAD_START, Exchange


@pytest.mark.parametrize(("device", "pauses"), [("cuda:1", [(1, HEAD_START)]), ("cpu", [])])
def test_an_exchange_gets_a_head_start_on_the_device_of_its_tensors(device, pauses, monkeypatch):
    """Also where another device is the current one. On a CPU nothing pauses."""
    current, found = [0], []

    @contextmanager
    def switch(to):
        current.append(to.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", switch)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.append((current[-1], cycles)))
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: None)
    with FakeTensorMode():
        Exchange(None, torch.empty(4, 2, device=device), [2, 2], [1, 3], "keys and values")
    assert found == pauses
