"""Processors of diffusers, on a small stand-in with the interface of its models."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import masks
from sparseflash import diffusers

PATTERN = masks.local(5)


class Processor:
    """As diffusers' own: projections and torch's attention; `turn` is an argument of its own."""

    name = "of the model"

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, turn=0.0):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            layer(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for layer, x in zip(attn.layers, (hidden_states, context, context), strict=True)
        )
        out = sdpa(query + turn, key, value, attn.mask)
        return out.transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """Gives its processor the arguments that its signature names, as that of diffusers does."""

    mask = None

    def __init__(self, heads=2, dim=16):
        super().__init__()
        self.heads, self.processor = heads, Processor()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def get_processor(self):
        return self.processor

    def set_processor(self, processor):
        self.processor = processor

    def forward(self, x, context=None, **options):
        known = inspect.signature(self.processor.__call__).parameters
        options = {name: value for name, value in options.items() if name in known}
        return self.processor(self, x, encoder_hidden_states=context, **options)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = Attention(), Attention()

    def forward(self, x, context, **options):
        x = self.attn1(x, **options)
        return self.attn2(x, **options) + self.attn2(x, context, **options)


def expected(model, x, context, sparse, turn=0.0):
    """The model with the mask given to torch where self-attention is sparse."""
    dense = PATTERN(x.shape[1]).to_dense()
    results = []
    for name, own, inputs in (("attn1", x, None), ("attn2", None, None), ("attn2", None, context)):
        attn = getattr(model, name)
        own = results[0] if own is None else own
        attn.mask = dense if name in sparse and inputs is None else None
        results.append(Processor()(attn, own, inputs, turn))
        attn.mask = None
    return results[1] + results[2]


@pytest.mark.parametrize("sparse", [("attn1", "attn2"), ("attn1",)])
def test_self_attention_is_by_the_pattern(sparse):
    model, x, context = Model(), torch.randn(2, 30, 16), torch.randn(2, 7, 16)
    wanted = expected(model, x, context, sparse, turn=0.5)
    chosen = lambda name: name.removesuffix(".processor") in sparse  # noqa: E731
    assert diffusers.sparsify(model, "local(5)", processors=chosen) is model
    result = model(x, context, turn=0.5, unknown=1)
    torch.testing.assert_close(result, wanted)
    result.sum().backward()
    assert model.attn1.layers[0].weight.grad.abs().sum() > 0


def test_a_second_pattern_takes_the_place_of_the_first():
    model = diffusers.sparsify(diffusers.sparsify(Model(), "local(3)"), PATTERN)
    copied = copy.deepcopy(model)
    processor = copied.attn1.processor
    assert isinstance(processor.processor, Processor)
    assert (processor.pattern, processor.name) == (PATTERN, "of the model")
    processor.processor = WithoutTorchsAttention()  # of the copy alone
    x, context = torch.randn(2, 30, 16), torch.randn(2, 7, 16)
    model(x, context)
    with pytest.raises(ValueError, match="WithoutTorchsAttention did not"):
        copied(x, context)
    with pytest.raises(AttributeError, match="nothing"):
        _ = processor.nothing


def test_what_cannot_be_sparse_is_refused():
    with pytest.raises(ValueError, match=r"must select at least one of \['attn1.processor', "):
        diffusers.sparsify(Model(), PATTERN, processors=lambda name: name == "attn1")
    with pytest.raises(TypeError, match="pattern must be a Pattern or its text, got int"):
        diffusers.sparsify(Model(), 3)
    with pytest.raises(ValueError, match="must have no weights of its own, got Identity"):
        diffusers.SparseProcessor(nn.Identity(), PATTERN)
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*, got 'cuda'"):
        diffusers.sparsify(Model(), PATTERN, backend="cuda")
    with pytest.raises(TypeError, match="processor must be callable, got str"):
        diffusers.SparseProcessor("attn1", PATTERN)
    with pytest.raises(TypeError, match=r"model must be .* such as pipe.transformer .* got dict"):
        diffusers.sparsify({}, PATTERN)
    with pytest.raises(ValueError, match="layers of diffusers, got none in Linear"):
        diffusers.sparsify(nn.Linear(2, 2), PATTERN)
    with pytest.raises(TypeError, match="must be a function of the name of a processor, got list"):
        diffusers.sparsify(Model(), PATTERN, processors=["attn1.processor"])


def test_a_model_of_which_one_processor_is_refused_is_unchanged():
    model = Model()
    model.attn2.processor = nn.Identity()
    with pytest.raises(ValueError, match="must have no weights"):
        diffusers.sparsify(model, PATTERN)
    assert isinstance(model.attn1.processor, Processor)


class WithoutTorchsAttention(Processor):
    """Like AttnProcessor of diffusers, or any processor with another attention backend."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None):
        return hidden_states.softmax(-1)


def test_a_processor_without_torchs_attention_is_refused_in_its_first_call():
    model = Model()
    model.attn2.processor = WithoutTorchsAttention()
    model = diffusers.sparsify(model, PATTERN)
    with pytest.raises(ValueError, match="attention, which WithoutTorchsAttention did not"):
        model(torch.randn(2, 30, 16), torch.randn(2, 7, 16))


def test_a_compiled_model_is_one_graph_and_refuses_the_same():
    torch._dynamo.reset()
    model, x = diffusers.sparsify(Attention(), PATTERN), torch.randn(2, 30, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    model.processor.processor = WithoutTorchsAttention()
    with pytest.raises(Exception, match="WithoutTorchsAttention did not"):
        torch.compile(model, backend="eager")(x)
    torch._dynamo.reset()
