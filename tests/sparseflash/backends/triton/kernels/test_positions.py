"""The kernels on some blocks of a sequence, whose dropout, score functions and biases read the
positions of tokens in the whole sequence: against one call of the whole sequence.
"""

import pytest
import torch

import sparseflash
from masks import BlockMask
from sparseflash.backends import triton as triton_backend
from sparseflash.dispatch.call import Positions
from sparseflash.score import ScoreFunction
from sparseflash.testing import poisoned_empty
from tests.helpers.calls import call_on, mask_that_covers, spec_of
from tests.helpers.triton_calls import DEVICE, mixed_mask

LENGTH, DIMS, HEADS, KV_HEADS = 150, 16, 2, 1
ROWS, COLUMNS = (1, 3, 4), (0, 3, 4)  # of blocks of 32; the last ones are not full


def bent(score, batch, head, query, key):
    far = (key - 2 * query + head) % 5 == 0
    return torch.where(far, 0.3 * score, score + query / 100)


def reading(score, batch, head, query, key, table, document):
    near = score + table[head, key - query + 100]
    return torch.where(document[query] == document[key], near, near + 1)


BENT = ScoreFunction.from_torch("bent by positions", bent)
READING = ScoreFunction.from_torch("reads by positions", reading, (float, int))


def check_part(rows, columns, block=(32, 32), lengths=None, **options):
    """All that a call of some blocks computes, against a call of a mask of only these blocks."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    query, grad_out = normal(2, 1, HEADS, LENGTH, DIMS).unbind()
    key, value = normal(2, 1, KV_HEADS, LENGTH, DIMS).unbind()
    grad_lse = normal(1, HEADS, LENGTH)
    at, tokens = [], []
    for chosen, side in zip((rows, columns), block, strict=True):
        found = (torch.tensor(chosen).unsqueeze(1) * side + torch.arange(side)).flatten()
        tokens.append(found[found < LENGTH])
        at.append(torch.tensor(chosen) * side)
    dense, keep = mixed_mask(LENGTH, LENGTH, block, HEADS), torch.zeros(LENGTH, LENGTH).bool()
    keep[tokens[0].unsqueeze(1), tokens[1]] = True
    dense |= torch.arange(LENGTH) % 7 == 0
    mask = BlockMask.from_dense(dense & keep, block)

    shared = {}
    if options.pop("bias", False):
        shared["bias"] = normal(HEADS, 2 * LENGTH - 1)
    reads = []
    if options.get("score") is READING:
        reads = [normal(HEADS, 250), torch.arange(LENGTH) // 40]
    if lengths is not None:
        options["key_lengths"] = torch.tensor([lengths])

    whole = [x.clone().requires_grad_() for x in (query, key, value, *shared.values())]
    read = [x.clone().requires_grad_(x.is_floating_point()) for x in reads]
    bias = dict(zip(shared, whole[3:], strict=True))
    out, lse = sparseflash.attention(
        *whole[:3], mask, **bias, **options, score_tensors=read, return_lse=True, backend="cpu"
    )
    finite = lse.isfinite()
    torch.autograd.backward([out, lse], [grad_out, grad_lse * finite])

    def mine(x, of=0):
        chosen = x.index_select(2, tokens[of])
        return (chosen.float() if x.is_floating_point() else chosen).to(DEVICE).contiguous()

    if lengths is not None:
        options["key_lengths"] = (tokens[1] < lengths).sum().view(1).int().to(DEVICE)
    tensors = mine(query), mine(key, 1), mine(value, 1)
    part = mask.take_blocks(torch.tensor(rows), torch.tensor(columns)).to(DEVICE)
    call = call_on(
        *(triton_backend, tensors[0], tensors[1], part),
        **{name: x.float().to(DEVICE) for name, x in shared.items()},
        score_tensors=[(x.float() if x.is_floating_point() else x).to(DEVICE) for x in reads],
        differentiates_bias=bool(shared),
        differentiates_score_tensors=bool(reads),
        positions=True,
        **options,
    )
    call.positions = Positions(*at, LENGTH).to(DEVICE)
    assert triton_backend.why_not(call.spec, part) == []
    needs = (True, True, True, bool(shared), False, bool(reads))
    with poisoned_empty():
        own_out, own_lse = call.forward(*tensors)
        grads = call.backward(
            mine(grad_out), mine(grad_lse * finite), (*tensors, own_out, own_lse), needs
        )
    expected = [mine(out), mine(lse), mine(whole[0].grad), *(mine(x.grad, 1) for x in whole[1:3])]
    found = [own_out, own_lse, *grads[:3]]
    if shared:
        expected, found = [*expected, bias["bias"].grad], [*found, grads[3]]
    if reads:
        expected, found = [*expected, read[0].grad.flatten()], [*found, grads[5]]
    for one, other in zip(expected, found, strict=True):
        assert float(other.isfinite().float().mean()) > 0.5
        one = one.detach().float().to(DEVICE)
        torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5)


EXTRAS = {
    "dropout": {"dropout_p": 0.3, "seed": 2**40 + 5},
    "bias": {"bias": True, "softcap": 3.0},
    "score": {"score": BENT, "dropout_p": 0.2, "seed": 3},
    "score tensors": {"score": READING},
    "key lengths": {"dropout_p": 0.3, "seed": 4, "bias": True, "lengths": 140},
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_part_of_a_sequence(extra):
    check_part(ROWS, COLUMNS, **EXTRAS[extra])


@pytest.mark.parametrize("extra", ["dropout", "bias", "score"])
def test_few_queries_of_a_part(extra):
    check_part((3,), (0, 4, 5, 8), (16, 16), **EXTRAS[extra])


def test_blocks_of_a_part_are_not_merged():
    """Positions are those of the blocks of the mask."""
    query, mask = torch.zeros(1, 1, 256, 16), BlockMask.from_dense(torch.ones(256, 256) > 0, 16)
    for positions, side in ((False, 64), (True, 16)):
        spec = spec_of(query, query, mask, dropout_p=0.1, positions=positions)
        object.__setattr__(spec, "device", torch.device("cuda"))
        found = triton_backend.block_size_for(spec, mask_that_covers(1.0))
        assert found == (side, side)
