"""Functions of tokens and of blocks: how they are read, and what they are told."""

import io
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import masks
from masks import BlockMask, predicates, progress


def test_predicates_are_read_by_threads_strip_by_strip(monkeypatch):
    monkeypatch.setattr(predicates, "PAIRS_FOR_THREADS", 0)
    monkeypatch.setattr("masks._core.convert.STRIP", 16 * 300)
    threads, pools = torch.get_num_threads(), []

    def pool(*arguments, **options):
        pools.append(arguments)
        return ThreadPoolExecutor(*arguments, **options)

    monkeypatch.setattr(predicates, "ThreadPoolExecutor", pool)
    mask = masks.pattern(lambda q, k: (q * k) % 7 < 3)(300, 16)
    assert pools == [(threads,)]
    q, k = torch.arange(300)[:, None], torch.arange(300)
    assert mask == BlockMask.from_dense((q * k) % 7 < 3, 16)
    assert torch.get_num_threads() == threads


def test_long_readings_show_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr("masks._core.convert.STRIP", 16 * 300)
    mine = masks.pattern(lambda q, k: q >= k)
    mine(300, 16)
    assert shown.getvalue() == ""
    monkeypatch.setattr(progress, "SECONDS_UNTIL_BAR", 0)
    mine(300, 16)
    assert "reading" in shown.getvalue()


@pytest.mark.parametrize("attends", [lambda q, k: q >= k.add_(1), lambda q, k: q.mul_(2) > k])
def test_predicates_that_change_their_arguments_are_refused(attends):
    with pytest.raises(ValueError, match="must not change its arguments in place"):
        masks.pattern(attends)(100, 16)


@pytest.mark.parametrize("of_query", [False, True])
def test_tensors_that_are_too_short_for_a_length_are_told(of_query):
    document = torch.arange(40)

    @masks.pattern
    def mine(q, k):
        return document[q] > 3 if of_query else document[k] > 3

    assert mine(40, 16).nnz_blocks == 9
    with pytest.raises(
        IndexError, match=r"pattern mine must index .* at the lengths \(50, 50\): "
    ):
        mine(50, 16)


@pytest.mark.parametrize("of", [masks.pattern, masks.block_pattern])
def test_predicates_with_python_logic_are_told_what_to_use(of):
    def mine(q, k):
        return q > k and q < k + 3

    with pytest.raises(ValueError, match=r"pattern mine must use & . ~ and torch[.]where"):
        of(mine)(100, 16)


def test_predicates_work_in_inference_mode():
    with torch.inference_mode():
        assert masks.pattern(lambda q, k: q >= k)(100, 16) == masks.causal()(100, 16)


@pytest.mark.parametrize("pairs_for_threads", [0, 1 << 40])
@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_a_mask_is_the_same_in_every_mode_and_thread(mode, pairs_for_threads, monkeypatch):
    monkeypatch.setattr(predicates, "PAIRS_FOR_THREADS", pairs_for_threads)
    monkeypatch.setattr("masks._core.convert.STRIP", 16 * 100)
    weight = torch.nn.Parameter(torch.randn(100, 8))
    attends = masks.pattern(lambda q, k: weight[q[:, 0]] @ weight[k[0]].T > 0)
    expected = BlockMask.from_dense(weight @ weight.T > 0, 16)
    assert attends(100, 16) == expected
    with mode():
        assert attends(100, 16) == expected


def test_functions_of_blocks_are_called_without_autocast():
    weight = torch.randn(100, 8)
    attends = masks.block_pattern(lambda i, j: weight[i[:, 0]] @ weight[j[0]].T > 0)
    expected = attends(1600, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attends(1600, 16) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "attends",
    [
        lambda q, k: (q - k).abs() % 1000 < 10,
        lambda q, k: ((q - k).abs() < 64) | (k % 1000 < 10),
        lambda q, k: (q // 777 == k // 777) & (k <= q),
        lambda q, k: (7 * q + 3 * k) % 1000 < 10,
    ],
    ids=["distance", "distance or key", "causal documents", "sum"],
)
def test_what_depends_on_no_pair_is_computed_for_no_pair(attends):
    def once() -> float:
        began = time.process_time()
        masks.pattern(attends)(1 << 15)
        return time.process_time() - began

    assert min(once() for _ in range(3)) < 1.8e-9 * 2**30


def test_compilations_at_the_same_time_leave_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        first, second = (predicates._in_threads(lambda strip: strip, [1, 2]) for _ in range(2))
        for strips in (first, second):
            next(strips)
        assert torch.get_num_threads() == 1
        assert [*first, *second] == [2, 2]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
