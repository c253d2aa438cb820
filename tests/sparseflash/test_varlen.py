"""Packed sequences against attention within each document."""

import pytest
import torch

import masks
import sparseflash
from sparseflash.testing import check_attention, make_inputs

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}

PATTERNS = {
    "all": None,
    "causal": masks.causal(align="bottom-right"),
    "butterfly": masks.butterfly(),
    "custom": masks.pattern(lambda q, k: (q * k) % 5 < 2),
}


def cumulative(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_have_the_pattern_at_their_own_length(backend, name):
    q_lengths, k_lengths = [5, 60, 33], [9, 40, 55]
    device = BACKENDS[backend]
    query, key, value, _ = make_inputs(1, 4, 98, 104, 16, kv_heads=2, device=device)
    dense = torch.zeros(98, 104, dtype=torch.bool)
    start_q = start_k = 0
    for q_len, k_len in zip(q_lengths, k_lengths, strict=True):
        pattern = masks.full() if PATTERNS[name] is None else PATTERNS[name]
        mask = pattern((q_len, k_len))
        dense[start_q : start_q + q_len, start_k : start_k + k_len] = mask.to_dense()
        start_q, start_k = start_q + q_len, start_k + k_len

    def attend(q, k, v):
        out, lse = sparseflash.attention_varlen(
            *(x[0].transpose(0, 1) for x in (q, k, v)),
            cumulative(q_lengths, device),
            cumulative(k_lengths, device, torch.int64),
            PATTERNS[name],
            return_lse=True,
            backend=backend,
        )
        return out.transpose(0, 1)[None], lse[None]

    check_attention(attend, query, key, value, dense)


def within(mask, q_lengths, k_lengths):
    """bool (batch, heads, q_len, k_len): the pairs of a mask within documents."""
    documents = masks.documents(q_lengths, k_lengths)(mask.seq_len).to_dense()
    return mask.to_dense() & documents.to(mask.device)


CHOICES = [("cpu", None), ("cpu", 1), ("cpu", 2), ("cpu", 4), ("triton", 2)]


@pytest.mark.parametrize(("backend", "heads"), [c for c in CHOICES if c[0] in BACKENDS])
def test_masks_of_the_packed_lengths(backend, heads):
    """heads: those of a dynamic mask; None for a static one."""
    q_lengths, k_lengths = [5, 20, 7], [9, 20, 11]
    device = BACKENDS[backend]
    query, key, value, grad_out = make_inputs(1, 4, 32, 40, 16, kv_heads=2, device=device)
    bounds = cumulative(q_lengths, device), cumulative(k_lengths, device)
    mask = masks.local(20, align="top-left")((32, 40), 16, device)
    if heads is not None:
        scores = torch.rand(heads, 2, 3, device=device, requires_grad=True)
        mask = mask.select_topk(scores, 2)

    def attend(q, k, v):
        tensors = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse = sparseflash.attention_varlen(
            *tensors, *bounds, mask, return_lse=True, backend=backend
        )
        return out.transpose(0, 1)[None], lse[None]

    check_attention(attend, query, key, value, within(mask, q_lengths, k_lengths))
    if heads is not None and backend == "cpu":
        (grad,) = torch.autograd.grad(attend(query, key, value)[0], scores, grad_out)
        assert grad.shape == scores.shape
        assert grad.count_nonzero() > 0


def test_a_bias_is_by_the_distance_within_documents_that_begin_together():
    lengths = [5, 20, 7]
    tensors = [x.requires_grad_() for x in torch.randn(3, 32, 2, 8).double().unbind()]
    bias = torch.randn(2, 63).double().requires_grad_()
    bounds = cumulative(lengths)
    out = sparseflash.attention_varlen(*tensors, bounds, bounds, masks.causal(), bias=bias)
    parts = []
    for document in zip(*(x.split(lengths) for x in tensors), strict=True):
        n = len(document[0])
        own = (x.transpose(0, 1)[None] for x in document)
        alone = sparseflash.attention(*own, masks.causal(), bias=bias[:, 32 - n : 31 + n])
        parts.append(alone[0].transpose(0, 1))
    torch.testing.assert_close(out, torch.cat(parts))
    grads = [
        torch.autograd.grad(x.square().sum(), [*tensors, bias]) for x in (out, torch.cat(parts))
    ]
    torch.testing.assert_close(*grads)


def test_documents_are_cut_out_of_a_mask_once():
    mask, bounds = masks.causal()(8, 16), torch.tensor([0, 3, 8])
    tensors = torch.randn(3, 8, 2, 4).unbind()
    for _ in range(2):
        out = sparseflash.attention_varlen(*tensors, bounds, bounds, mask)
    assert sum("documents" in key for key in mask.cache if isinstance(key, tuple)) == 1
    assert torch.equal(out, sparseflash.attention_varlen(*tensors, bounds, bounds, "causal()"))


def test_a_pattern_by_its_text():
    tensors, bounds = torch.randn(3, 8, 2, 4).unbind(), torch.tensor([0, 3, 8])
    out = sparseflash.attention_varlen(*tensors, bounds, bounds, "causal()")
    assert torch.equal(out, sparseflash.attention_varlen(*tensors, bounds, bounds, masks.causal()))


def test_a_pattern_keeps_its_block_size():
    x = torch.randn(90, 2, 8)
    bounds = torch.tensor([0, 90])
    mask = masks.butterfly().with_block_size(16)
    found = sparseflash.attention_varlen(x, x, x, bounds, bounds, mask)
    whole = x.transpose(0, 1)[None]
    expected = sparseflash.attention(whole, whole, whole, mask)[0].transpose(0, 1)
    torch.testing.assert_close(found, expected)
    dense = sparseflash.attention(whole, whole, whole)[0].transpose(0, 1)
    assert not torch.allclose(found, dense)


def test_a_document_without_keys_and_one_without_queries():
    query, key, value = torch.randn(10, 2, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    out, lse = sparseflash.attention_varlen(
        query, key, value, cumulative([4, 0, 6]), cumulative([0, 3, 4]), return_lse=True
    )
    assert out.shape == (10, 2, 8)
    assert lse.shape == (2, 10)
    assert (out[:4] == 0).all()
    assert (lse[:, :4] == -torch.inf).all()
    alone = sparseflash.attention(
        *(x.transpose(0, 1)[None] for x in (query[4:], key[3:], value[3:]))
    )
    torch.testing.assert_close(out[4:], alone[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 2, 8, 4)}, "query must be a tensor"),
        ({"mask": masks.causal()(9)}, r"mask must have seq_len \(8, 8\), got \(9, 9\)"),
        ({"mask": ["causal()"]}, "mask must be a Pattern, its text, .* or None, got list"),
        ({"mask": "causl()"}, "pattern 'causl\\(\\)' cannot be read"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 9])}, "cu_seqlens_q must ascend from 0 to 8"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 7])}, "cu_seqlens_q must ascend from 0 to 8"),
        ({"cu_seqlens_q": torch.tensor([1, 3, 8])}, "cu_seqlens_q must ascend from 0 to 8"),
        ({"cu_seqlens_k": torch.tensor([0, 6, 3, 8])}, "cu_seqlens_k must ascend"),
        ({"cu_seqlens_k": torch.tensor([0, 8])}, "cu_seqlens_k must have 2 documents"),
        ({"cu_seqlens_k": torch.tensor([0.0, 8.0])}, "cu_seqlens_k must be an int32"),
        ({"key_lengths": torch.tensor([4])}, "key_lengths must not be given"),
        ({"bias": torch.zeros(2, 8)}, r"bias must have shape \(1, 15\) or \(2, 15\)"),
        ({"cu_seqlens_k": torch.tensor([0])}, r"cu_seqlens_k must ascend from 0 to 8, got \[0\]"),
    ],
)
def test_bad_input_names_the_argument(change, message):
    arguments = dict(zip(("query", "key", "value"), torch.zeros(3, 8, 2, 4), strict=True))
    arguments |= {"cu_seqlens_q": torch.tensor([0, 3, 8]), "cu_seqlens_k": torch.tensor([0, 4, 8])}
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.attention_varlen(**(arguments | change))


@pytest.mark.parametrize("documents", [0, 2])
def test_documents_without_a_token(documents):
    bounds = torch.zeros(documents + 1, dtype=torch.int32)
    empty = torch.randn(0, 2, 8, requires_grad=True)
    out, lse = sparseflash.attention_varlen(empty, empty, empty, bounds, bounds, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 2, 8), (2, 0))
    assert torch.autograd.grad(out.sum(), empty)[0].shape == (0, 2, 8)


def test_padding_is_left_out_and_put_back():
    keep = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    tokens, bounds = sparseflash.unpad(x, keep)
    assert (tokens.shape, bounds.tolist()) == ((7, 2, 4), [0, 3, 3, 7])
    assert bounds.dtype == torch.int32
    out = sparseflash.attention_varlen(tokens, tokens, tokens, bounds, bounds, "causal()")
    padded = sparseflash.pad(out, keep)
    assert (padded[~keep] == 0).all()
    alone = x[0, keep[0]].transpose(0, 1)[None]
    expected = sparseflash.attention(alone, alone, alone, masks.causal())
    torch.testing.assert_close(padded[0, keep[0]], expected[0].transpose(0, 1))
    assert torch.autograd.gradcheck(
        lambda x: sparseflash.pad(sparseflash.unpad(x, keep)[0] ** 2, keep), x
    )


BOUNDS = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: sparseflash.unpad(x, torch.ones(2, 3)), TypeError, "keep must be a bool"),
        (
            lambda x: sparseflash.unpad(x, torch.ones(2, 4).bool()),
            ValueError,
            r"keep must be \(2, 3\) like x, got \(2, 4\)",
        ),
        (
            lambda x: sparseflash.pad(x[0], torch.ones(2, 2).bool()),
            ValueError,
            "keep must be true at 3 positions, got 4",
        ),
        (lambda x: sparseflash.pad(x, None), TypeError, "keep must be a bool tensor, got None"),
        (
            lambda x: sparseflash.pad(x, torch.ones(6).bool()),
            ValueError,
            r"keep must be \(batch, seq\), got \(6,\)",
        ),
        (
            lambda x: sparseflash.attention_varlen(x[None], x, x, BOUNDS, BOUNDS),
            ValueError,
            r"query must be a tensor \(total, heads, head_dim\), got \(1, 2, 3, 4\)",
        ),
        (
            lambda x: sparseflash.unpad([1], torch.ones(1, 1).bool()),
            ValueError,
            r"x must be a tensor \(batch, seq, ...\), got list",
        ),
        (
            lambda x: sparseflash.unpad(x[0, 0], torch.ones(4, 1).bool()),
            ValueError,
            r"x must be .*, got \(4,\)",
        ),
        (
            lambda x: sparseflash.pad([1], torch.ones(1, 1).bool()),
            ValueError,
            r"x must be a tensor \(total, ...\), got list",
        ),
    ],
)
def test_padding_of_other_shapes_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(2, 3, 4))
