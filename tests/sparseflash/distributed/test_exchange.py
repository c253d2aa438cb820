import weakref
from types import SimpleNamespace

import torch
import torch.distributed as dist

from sparseflash.distributed.exchange import exchanged


def test_what_was_exchanged_is_freed_when_the_caller_is_done_with_it(monkeypatch):
    """Also if the exchange lives on, and although the work of NCCL refers to what it received."""

    class Work(SimpleNamespace):
        def wait(self):
            pass

    works = []

    def all_to_all_single(received, source, *_, async_op):
        work = Work(outputs=[received])
        works.append(weakref.ref(work))
        return work

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    source = torch.empty(4, 2)
    exchange = exchanged(None, source, [2, 2], [1, 3], "keys and values")
    sent, received = weakref.ref(source), exchange.wait()
    assert received.shape == (4, 2)
    assert works[0]() is None
    of_caller = weakref.ref(received)
    del source, received
    assert (sent(), of_caller()) == (None, None)
