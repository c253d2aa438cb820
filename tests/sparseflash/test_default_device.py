"""Nothing is made on torch's default device, whatever a script has set it to."""

import pytest
import torch

import masks
import sparseflash
from masks import BlockMask, DynamicMask, interop, plot
from sparseflash.nn import KeyValueCache, Rotary, SparseAttention, SparseEncoderLayer

LENGTH = 50
QUERY, KEY, VALUE = torch.randn(3, 1, 4, LENGTH, 16).unbind()
TOKENS = torch.randn(1, 30, 64)
LENGTHS, BOUNDS = torch.tensor([20]), torch.tensor([0, 20, LENGTH])
CAUSAL = masks.causal()
PATTERNS = {
    "full": masks.full(),
    "causal": CAUSAL,
    "strided": masks.strided(2),
    "butterfly": masks.butterfly(),
    "dilated": masks.dilated(2, 3),
    "bigbird": masks.bigbird(),
    "documents": masks.documents([20, 30], pattern=CAUSAL),
    "tokens": masks.pattern(lambda q, k: (q * k) % 3 == 0),
    "blocks": masks.block_pattern(lambda i, j: (i + j) % 2 == 0),
}


def operations(mask):
    union = ~mask | mask.T
    return (
        union.slice_queries(17, 40).crop(5, 20).reblock(32).table(),
        union.to_dense(),
        plot.text(mask),
    )


def round_trips(mask):
    return (
        BlockMask.from_scipy(mask.to_scipy(), 16),
        BlockMask.from_dense(mask.to_dense(), 16),
        interop.from_flex(interop.to_flex(mask)),
        interop.from_block_lists(interop.to_block_lists(mask), LENGTH, CAUSAL),
    )


def attend(mask=None, **options):
    leaves = [x.clone().requires_grad_() for x in (QUERY, KEY, VALUE)]
    sparseflash.attention(*leaves, mask, **options).sum().backward()


def decode(module):
    cache = KeyValueCache(1, 4, 64, 16, device="cpu")
    return module(TOKENS, cache=cache), module(TOKENS[:, :1], cache=cache)


def packed():
    tensors = (x[0].transpose(0, 1) for x in (QUERY, KEY, VALUE))
    return sparseflash.attention_varlen(*tensors, BOUNDS, BOUNDS, CAUSAL)


MODULE = SparseAttention(64, 4, "local(7) & causal()", rotary=Rotary(16))
LAYER = SparseEncoderLayer(64, 4, pattern="causal()")
SCORES, BIAS, PADDING = torch.rand(4, 4, 4), torch.zeros(4, 2 * LENGTH - 1), torch.zeros(1, 30) > 0
CALLS = {
    **{name: lambda p=p: operations(p(LENGTH, 16, "cpu")) for name, p in PATTERNS.items()},
    "tree": lambda: masks.tree([-1, 0, 0, 1], 10)((4, 14), 16, "cpu"),
    "interop": lambda: round_trips(CAUSAL(LENGTH, 16, "cpu")),
    "attention": lambda: attend(),
    "padded": lambda: attend(CAUSAL, key_lengths=LENGTHS),
    "dropout": lambda: attend(CAUSAL, dropout_p=0.3),
    "bias": lambda: attend(CAUSAL, bias=BIAS.requires_grad_(), sinks=BIAS[:, 0], softcap=2.0),
    "chosen": lambda: attend(DynamicMask.from_topk(SCORES.requires_grad_(), 2, 16, LENGTH)),
    "mass": lambda: sparseflash.block_mass(QUERY, KEY, CAUSAL),
    "packed": packed,
    "module": lambda: MODULE(TOKENS, key_lengths=LENGTHS),
    "decoding": lambda: decode(MODULE),
    "layer": lambda: LAYER(TOKENS, src_key_padding_mask=PADDING),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_tensors_are_made_where_the_others_are(call):
    with torch.device("meta"):  # what is made there cannot be read
        call()
