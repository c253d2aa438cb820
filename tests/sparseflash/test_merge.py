"""Merging attention over disjoint keys against attention over all of them."""

import math

import pytest
import torch
from torch.profiler import profile

import masks
import sparseflash
from masks import BlockMask
from sparseflash import merge_attention
from sparseflash.merge import add_in_place, add_sinks, copy_in_place, merge_in_place
from sparseflash.reference import standard_attention
from sparseflash.testing import check_attention, make_inputs


def parts_of_keys(parts=3, empty_queries=5):
    """Disjoint masks (q_len, k_len) and their union; the first queries have no key in any."""
    owner = torch.randint(-1, parts, (40, 70))
    owner[:empty_queries] = -1
    owner[empty_queries : 2 * empty_queries] = 0
    return [owner == part for part in range(parts)], owner >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merged_parts_equal_the_whole(dtype):
    query, key, value, _ = make_inputs(2, 2, 40, 70, 16, dtype=dtype)
    parts, whole = parts_of_keys()

    def attend(q, k, v):
        outs, lses = zip(
            *(
                sparseflash.attention(q, k, v, BlockMask.from_dense(part, 16), return_lse=True)
                for part in parts
            ),
            strict=True,
        )
        return merge_attention(outs, lses)

    results = check_attention(attend, query, key, value, whole)
    assert (results["out"][:, :, :5] == 0).all()
    assert (results["dq"][:, :, :5] == 0).all()


def test_any_grouping_gives_the_same():
    query, key, value, _ = make_inputs(1, 2, 40, 70, 8, dtype=torch.float64)
    parts, whole = parts_of_keys()
    a, b, c = (standard_attention(query, key, value, part) for part in parts)
    merge = lambda *some: merge_attention(*zip(*some, strict=True))  # noqa: E731
    expected = standard_attention(query, key, value, whole)
    for merged in (merge(a, b, c), merge(merge(a, b), c), merge(c, merge(b, a))):
        for x, y in zip(merged, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_gradients_to_the_second_order():
    outs = torch.randn(3, 2, 4, 3, dtype=torch.float64)
    lses = torch.randn(3, 2, 4, dtype=torch.float64)
    lses[0, 0, 0] = -torch.inf
    finite = lses[:, :, 1:].clone()
    merge = lambda o, lse: merge_attention(o.unbind(), lse.unbind())  # noqa: E731
    inputs = (outs[:, :, 1:].clone().requires_grad_(), finite.requires_grad_())
    assert torch.autograd.gradcheck(merge, inputs)
    assert torch.autograd.gradgradcheck(merge, inputs)
    (grad,) = torch.autograd.grad(merge(outs, lses.requires_grad_())[0].sum(), lses)
    assert grad[0, 0, 0] == 0


def test_what_queries_without_a_key_hold_does_not_count():
    outs = torch.randn(2, 3, 4, requires_grad=True)
    lses = torch.zeros(2, 3).masked_fill(torch.tensor([True, False, False]), -torch.inf)
    lses = lses.requires_grad_()
    out, lse = merge_attention(outs.unbind(), lses.unbind())
    assert not out[0].any()
    assert lse[0] == -torch.inf
    grads = torch.autograd.grad((out.sum() + lse[1:].sum()), (outs, lses))
    assert not any(grad[:, 0].any() for grad in grads)
    assert all(grad[:, 1:].all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_sinks_of_another_dtype_change_none(dtype):
    out, lse = add_sinks(
        torch.ones(1, 2, 3, 4, dtype=torch.float16), torch.zeros(1, 2, 3), torch.zeros(2).to(dtype)
    )
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert (out == 0.5).all()


def test_huge_and_equal_logits():
    outs, lses = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[1e4], [1e4]])
    out, lse = merge_attention(outs.unbind(), lses.unbind())
    assert out.item() == 2
    torch.testing.assert_close(lse.item(), 1e4 + torch.log(torch.tensor(2.0)).item())


OTHER_SHAPE = (
    r"outs\[1\] must be \(2, 3\) torch.float32 on cpu like outs\[0\], got \(1, 3\) torch.float32"
)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "at least 1"),
        ([torch.zeros(2, 3)], [], "one length of at least 1"),
        ([torch.zeros(2, 3)], [torch.zeros(3)], "lses must be"),
        ([torch.zeros(2, 3)], [torch.zeros(2, device="meta")], r"lses must be \(2,\) on cpu"),
        ([torch.zeros(2, 3), torch.zeros(1, 3)], 2 * [torch.zeros(2)], OTHER_SHAPE),
        (None, [torch.zeros(2)], "outs must be a list of tensors, got NoneType"),
        ([torch.zeros(2, 3)], None, "lses must be a list of tensors, got NoneType"),
        ([torch.zeros(2, 3)], [torch.zeros(2).half()], "lses must be float32"),
        ([torch.zeros(2, 3).int()], [torch.zeros(2)], r"outs\[0\] must be a floating-point"),
    ],
)
def test_bad_input_names_the_argument(outs, lses, message):
    with pytest.raises((TypeError, ValueError), match=message):
        merge_attention(outs, lses)


def test_sinks_of_minus_infinity_are_none():
    query, key, value, _ = make_inputs(1, 2, 40, 40, 8)
    tensors = [x.requires_grad_() for x in (query, key, value)]
    attends = masks.pattern(lambda q, k: q - k >= 8)  # the first queries have no key
    sinks = torch.full((2,), -torch.inf, requires_grad=True)
    results = [
        sparseflash.attention(*tensors, attends, sinks=s, return_lse=True) for s in (None, sinks)
    ]
    grads = [
        torch.autograd.grad(out.square().sum() + lse.exp().sum(), tensors) for out, lse in results
    ]
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(grads[1], grads[0])
    again = sparseflash.attention(*tensors, attends, sinks=sinks)
    (grad_sinks,) = torch.autograd.grad(again.sum(), sinks)
    assert torch.equal(grad_sinks, torch.zeros(2))


def test_merging_in_place_is_merging():
    outs, lses = torch.randn(2, 1, 3, 50, 8), torch.randn(2, 1, 3, 50) * 30
    lses[0, :, :, :10], lses[1, :, :, 5:20] = -math.inf, -math.inf
    outs = outs.masked_fill((lses == -math.inf).unsqueeze(-1), 0)
    for dtype, within in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        parts = outs.to(dtype)
        expected = merge_attention(list(parts), list(lses))
        out, lse = parts[0].clone(), lses[0].clone()
        merge_in_place(out, lse, parts[1], lses[1])
        torch.testing.assert_close(out, expected[0], atol=within, rtol=within)
        torch.testing.assert_close(lse, expected[1])
        for rows in (slice(7, 57), torch.randperm(60)[:50]):
            whole, whole_lse = parts.new_full((1, 3, 60, 8), 7.0), lses.new_full((1, 3, 60), 7.0)
            whole[:, :, rows], whole_lse[:, :, rows] = parts[0], lses[0]
            merge_in_place(whole, whole_lse, parts[1], lses[1], rows)
            torch.testing.assert_close(whole[:, :, rows], expected[0], atol=within, rtol=within)
            torch.testing.assert_close(whole_lse[:, :, rows], expected[1])
            assert int((whole_lse == 7).sum()) == 3 * 10


@pytest.mark.parametrize("rows", [slice(3, 13), torch.arange(20).flip(0)[::2]])
@pytest.mark.parametrize("part_rows", [slice(5, 15), torch.randperm(30)[:10]])
def test_a_sum_in_16_bits_is_rounded_once(rows, part_rows):
    """If 2^-8 + 2^-20 were rounded before it is added to 1, the sum would be rounded to 1."""
    total = torch.ones(1, 2, 20, 4, dtype=torch.bfloat16)
    part = torch.full((1, 2, 30, 4), 2**-8 + 2**-20)
    add_in_place(total, part, rows, part_rows)
    assert (total[:, :, rows] == 1 + 2**-7).all()
    copied = torch.zeros_like(total)
    copy_in_place(copied, part, rows, part_rows)
    assert (copied[:, :, rows] == 2**-8).all()
    assert int((copied == 0).sum()) == copied[:, :, rows].numel()


@pytest.mark.parametrize("part_rows", [slice(5, 15), torch.randperm(30)[:10]])
def test_copied_tokens_are_copied_once(part_rows):
    """To tokens in order, of any strides: no copy of the part is made before."""
    total = torch.zeros(20, 1, 2, 4).permute(1, 2, 0, 3)
    part = torch.randn(1, 2, 30, 4)
    with profile() as profiled:
        copy_in_place(total, part, slice(3, 13), part_rows)
    events = profiled.events()
    assert events is not None
    assert not any(event.name.startswith("aten::empty") for event in events)
    assert torch.equal(total[:, :, 3:13], part[:, :, part_rows])


@pytest.mark.parametrize("rows", [slice(3, 13), torch.arange(20).flip(0)[::2]])
@pytest.mark.parametrize("part_rows", [slice(5, 15), torch.randperm(30)[:10]])
def test_tokens_of_a_part_are_merged_added_and_copied(rows, part_rows):
    out, part = torch.randn(1, 2, 20, 4), torch.randn(1, 2, 30, 4)
    lse, part_lse = torch.randn(1, 2, 20), torch.randn(1, 2, 30)
    chosen, chosen_lse = part[:, :, part_rows], part_lse[:, :, part_rows]
    merged, added, copied = (out.clone() for _ in range(3))
    merged[:, :, rows], _ = merge_attention(
        [out[:, :, rows], chosen], [lse[:, :, rows], chosen_lse]
    )
    added[:, :, rows] += chosen
    copied[:, :, rows] = chosen
    found = [out.clone() for _ in range(3)]
    merge_in_place(found[0], lse, part, part_lse, rows, part_rows)
    add_in_place(found[1], part, rows, part_rows)
    copy_in_place(found[2], part, rows, part_rows)
    for x, expected in zip(found, (merged, added, copied), strict=True):
        torch.testing.assert_close(x, expected)
