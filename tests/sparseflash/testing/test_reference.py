import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sparseflash.dropout import keep_mask
from sparseflash.reference import dropout_mask, standard_attention
from sparseflash.testing import make_inputs


def float64_inputs(*shape, **options):
    query, key, value, _ = make_inputs(*shape, dtype=torch.float64, **options)
    return [x.requires_grad_() for x in (query, key, value)]


def ragged_mask(q_len: int, k_len: int) -> torch.Tensor:
    """Random pairs; query 2 has no key and key 3 no query."""
    mask = torch.rand(q_len, k_len) < 0.5
    mask[2] = False
    mask[:, 3] = False
    return mask


def test_equals_torch():
    inputs = float64_inputs(2, 4, 21, 19, 5)
    mask = torch.rand(2, 1, 21, 19) < 0.8
    mask[..., 0] = True
    out, lse = standard_attention(*inputs, mask, scale=0.3)
    expected = scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(out, expected)
    scores = (inputs[0] @ inputs[1].mT * 0.3).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_grouped_heads_read_their_key_head():
    query, key, value = float64_inputs(1, 6, 9, 9, 4, kv_heads=2)
    out, _ = standard_attention(query, key, value)
    wide = [x.repeat_interleave(3, dim=1) for x in (key, value)]
    torch.testing.assert_close(out, scaled_dot_product_attention(query, *wide))


def test_dropout_is_the_shared_mask():
    query, key, value = float64_inputs(2, 3, 17, 20, 4)
    kept = dropout_mask(5, 2, 3, 17, 20, 0.25)
    weights = (query @ key.mT / 2).softmax(-1) * kept / 0.75
    out, lse = standard_attention(query, key, value, dropout_p=0.25, seed=5)
    torch.testing.assert_close(out, weights @ value)
    torch.testing.assert_close(lse, (query @ key.mT / 2).logsumexp(-1))


@pytest.mark.parametrize("k_len", [1, 63, 64, 65, 200])
def test_dropout_keeps_the_pairs_that_its_definition_keeps(k_len):
    bh, q, k = torch.arange(6).view(2, 3, 1, 1), torch.arange(17).unsqueeze(1), torch.arange(k_len)
    assert torch.equal(dropout_mask(5, 2, 3, 17, k_len, 0.3), keep_mask(5, bh, q, k, 0.3))


def test_query_without_a_key():
    inputs = float64_inputs(1, 2, 9, 11, 4)
    out, lse = standard_attention(*inputs, ragged_mask(9, 11))
    assert (out[:, :, 2] == 0).all()
    assert (lse[:, :, 2] == -torch.inf).all()
    grad_query, grad_key, grad_value = torch.autograd.grad(
        out.sum() + lse[lse.isfinite()].sum(), inputs
    )
    assert (grad_query[:, :, 2] == 0).all()
    assert (grad_key[:, :, 3] == 0).all()
    assert (grad_value[:, :, 3] == 0).all()
    assert all(g.isfinite().all() for g in (grad_query, grad_key, grad_value))


def test_key_lengths_equal_a_mask():
    inputs = float64_inputs(3, 2, 9, 20, 4)
    lengths = torch.tensor([0, 7, 20])
    mask = torch.arange(20) < lengths.view(-1, 1, 1, 1)
    for padded, masked in zip(
        standard_attention(*inputs, key_lengths=lengths),
        standard_attention(*inputs, mask),
        strict=True,
    ):
        assert torch.equal(padded, masked)


def test_takes_what_has_a_dense_form():
    class Mask:
        def to_dense(self):
            return torch.eye(9, dtype=torch.bool)

    query, key, value = float64_inputs(1, 1, 9, 9, 4)
    torch.testing.assert_close(standard_attention(query, key, value, Mask())[0], value)


def test_dropout_needs_a_seed():
    with pytest.raises(ValueError, match="seed"):
        standard_attention(*float64_inputs(1, 1, 4, 4, 4), dropout_p=0.1)


def finite_results(**options):
    def results(query, key, value):
        out, lse = standard_attention(query, key, value, **options)
        return out, lse.nan_to_num(neginf=0)

    return results


def test_gradients():
    options = {"mask": ragged_mask(10, 9), "dropout_p": 0.2, "seed": 3}
    inputs = float64_inputs(1, 2, 10, 9, 3, kv_heads=1)
    assert torch.autograd.gradcheck(finite_results(**options), inputs)


def test_second_derivatives():
    attention = finite_results(mask=ragged_mask(6, 5))
    assert torch.autograd.gradgradcheck(attention, float64_inputs(1, 1, 6, 5, 2))
