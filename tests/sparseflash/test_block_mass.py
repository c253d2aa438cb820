"""The mass of blocks against the probabilities written down."""

import pytest
import torch
from einops import reduce

import masks
import sparseflash
from sparseflash.testing import make_inputs

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}
MASKS = {
    "causal": masks.causal(align="bottom-right"),
    "holes": masks.random(0.5) - masks.global_tokens(40),  # a row of blocks without a key
    "heads": masks.stack([masks.butterfly(), masks.full()]),
}


def written_down(query, key, mask, *, scale=None, softcap=torch.inf, bias=None, key_lengths=None):
    """The mean probability of each block, from all scores in float64."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.double() @ key.mT * (scale or query.shape[3] ** -0.5)
    if softcap < torch.inf:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
        scores += bias[:, distance + query.shape[2] - 1]
    allowed = mask.to_dense().expand(scores.shape)
    if key_lengths is not None:
        allowed = allowed & (torch.arange(key.shape[2]) < key_lengths.view(-1, 1, 1, 1))
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    (bq, bk), (q_len, k_len) = mask.block_size, mask.seq_len
    weights = torch.nn.functional.pad(weights, (0, -k_len % bk, 0, -q_len % bq))
    total = reduce(weights, "b h (i q) (j k) -> b h i j", "sum", q=bq, k=bk)
    has_key = torch.nn.functional.pad(allowed.any(-1).double(), (0, -q_len % bq))
    return total / reduce(has_key, "b h (i q) -> b h i 1", "sum", q=bq).clamp(min=1)


@pytest.mark.parametrize("head_dim", [8, 3])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mass_is_that_of_the_probabilities(backend, name, head_dim):
    if backend == "triton" and head_dim == 3:
        pytest.skip("triton takes head dims from 8 on")
    device = BACKENDS[backend]
    query, key, _, _ = make_inputs(2, 2, 50, 75, head_dim, kv_heads=1, scale=2.0)
    mask = MASKS[name]((50, 75), (32, 16))
    bias, lengths = torch.randn(2, 124), torch.tensor([75, 40])
    every = {"scale": 0.4, "softcap": 1.5, "bias": bias, "key_lengths": lengths}
    options = every if head_dim == 3 else {}
    mass = sparseflash.block_mass(
        query.to(device), key.to(device), mask.to(device), backend=backend, **options
    )
    expected = written_down(query, key, mask, **options)
    torch.testing.assert_close(mass.cpu(), expected.float())
    has_key = mass.sum(-1) > 0
    torch.testing.assert_close(mass.sum(-1)[has_key], torch.ones(int(has_key.sum())).to(device))
    assert (mass.cpu()[:, ~mask.to_blocks().view(-1, 2, 5).expand(2, 2, 5)] == 0).all()


def test_half_precision_is_computed_in_float32():
    query, key, _, _ = make_inputs(1, 1, 64, 64, 8, dtype=torch.float16)
    mask = masks.full()(64, 16)
    mass = sparseflash.block_mass(query.float(), key.float(), mask)
    assert torch.equal(sparseflash.block_mass(query, key, mask), mass)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(sparseflash.block_mass(query.float(), key.float(), mask), mass)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_lengths": torch.tensor([65])}, r"key_lengths must be 0 to 64, got \[65\]"),
        ({"bias": torch.zeros(1, 200)}, r"bias must have shape \(1, 127\)"),
    ],
)
def test_what_attention_refuses_is_refused_before_keys_are_split(options, message):
    query, key, _, _ = make_inputs(1, 1, 64, 64, 2)
    with pytest.raises(ValueError, match=message):
        sparseflash.block_mass(query, key, masks.full()(64, 16), **options)


def test_mass_has_no_gradient_and_a_backend_of_its_own():
    query, key, _, _ = (x.requires_grad_() for x in make_inputs(1, 1, 64, 64, 8))
    assert not sparseflash.block_mass(query, key).requires_grad
    with pytest.raises(ValueError, match="backend must be"):
        sparseflash.block_mass(query, key, backend="none")


@pytest.mark.parametrize(("head_dim", "heads"), [(3, 1), (3, 2), (8, 2)])
def test_of_a_dynamic_mask(head_dim, heads):
    """With 3 dims a part has 48 of the 75 keys."""
    query, key, _, _ = make_inputs(2, 2, 50, 75, head_dim, kv_heads=1, scale=2.0)
    support = masks.causal(align="bottom-right")((50, 75), (32, 16))
    mask = support.select_topk(torch.rand(2, heads, 2, 5), 2)
    expected = written_down(query, key, mask)
    torch.testing.assert_close(sparseflash.block_mass(query, key, mask), expected.float())
