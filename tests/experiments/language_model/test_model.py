from dataclasses import replace
from itertools import islice

import pytest
import torch

from experiments.language_model.model import LanguageModel, attention_of, generate
from experiments.language_model.presets import PRESETS
from experiments.language_model.settings import ModelConfig

TINY = ModelConfig(layers=2, dim=32, heads=2, context=64, block_size=16)
SPARSE = ("local(8); butterfly()", "local(16) | global_tokens(4)")


def model_of(**options):
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, **options))
    for parameter in model.parameters():  # large enough that every key matters
        parameter.data.mul_(4.0)
    return model.eval()


def tokens_of(seq_len=64):
    tokens = torch.randint(1, 256, (2, seq_len), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 0
    return tokens


@pytest.mark.parametrize("attention", [("flash",), ("sdpa",), SPARSE])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_no_byte_sees_a_later_one(attention, positions):
    model, tokens = model_of(attention=attention, positions=positions), tokens_of()
    changed = tokens.clone()
    changed[:, 40] += 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40], after[:, 40])


def test_torch_and_ours_agree_and_patterns_differ():
    ours, torchs, sparse = (
        model_of(attention=a)(tokens_of()) for a in (("flash",), ("sdpa",), SPARSE)
    )
    torch.testing.assert_close(ours, torchs, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours, sparse, atol=1e-2)


def test_heads_and_layers_take_patterns_in_turn():
    config = replace(TINY, attention=("local(8); butterfly()", "flash"), heads=4, layers=3)
    patterns = [attention_of(config, layer).pattern for layer in range(3)]
    masks = [pattern(64).to_dense() for pattern in patterns]
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0][1], masks[1][0])
    assert torch.equal(masks[0][0], masks[0][2])
    assert not torch.equal(masks[0][0], masks[0][1])


@pytest.mark.parametrize("attention", [("flash",), ("sdpa",), SPARSE])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_cache_changes_nothing(attention, positions):
    model, tokens = model_of(attention=attention, positions=positions), tokens_of()
    caches = model.caches(2)
    with torch.inference_mode():
        parts = [model(part, caches) for part in tokens.split([33, *[1] * 31], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-4, rtol=1e-4)


def test_samples_follow_the_seed_and_end_with_the_context():
    model = model_of()
    one, same, other = (list(generate(model, b"Once", seed=seed)) for seed in (0, 0, 1))
    assert one == same != other
    assert len(one) == 64 - 4
    likeliest = list(islice(generate(model, b"Once", temperature=0), 3))
    with torch.inference_mode():
        logits = model(torch.tensor([[0, *b"Once", *likeliest[:2]]]))
    assert logits[0, -3:].argmax(-1).tolist() == likeliest


def test_wrong_input():
    with pytest.raises(ValueError, match="prompt must be shorter than the context of 64"):
        next(generate(model_of(), b"x" * 64))
    with pytest.raises(ValueError, match="patterns for 3 heads of 2"):
        model_of(attention=("local(8); local(4); local(2)",))
    with pytest.raises(ValueError, match="nothing"):
        model_of(attention=("nothing",))
    with pytest.raises(ValueError, match="block_size the context"):
        model_of(context=72)


@pytest.mark.parametrize(("name", "millions"), [("25m", 25), ("124m", 124)])
def test_presets_have_the_size_of_their_name(name, millions):
    for thousands in (1, 4, 16, 64):
        chosen = PRESETS[f"{name}-{thousands}k"]
        sizes = (chosen.layers, chosen.dim, chosen.heads, chosen.context)
        assert chosen.context == 1024 * thousands
        with torch.device("meta"):
            model = LanguageModel(ModelConfig(*sizes))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(
            millions * 1e6, rel=0.03
        )
