import pytest
import torch

import masks
from masks import BlockMask
from masks.lint import RULES, lint


def rules(found) -> list[str]:
    return [finding.rule for finding in found]


def clean() -> BlockMask:
    return masks.butterfly()(1024, 64)


def test_a_butterfly_is_clean():
    assert lint(clean(), within=masks.full(), layers=4) == []


def test_layers_that_are_followed_for_long_show_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("masks.progress.SECONDS_UNTIL_BAR", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if the standard error were a terminal
    lint(clean(), layers=4)
    shown = capsys.readouterr()
    assert "following tokens" in shown.err
    assert not shown.out


def test_queries_and_keys_without_a_partner_are_counted():
    dense = torch.ones(64, 64, dtype=torch.bool)
    dense[5:8] = dense[:, 60] = False
    empty, unseen = lint(BlockMask.from_dense(dense, 16))
    assert (empty.rule, unseen.rule) == ("empty-queries", "unreachable-keys")
    assert "3 of 64 queries have no key: 5-7" in empty.what
    assert "1 of 64 keys" in unseen.what
    assert unseen.what.endswith(": 60")
    assert "local(0)" in str(empty)


def test_a_key_is_reachable_if_any_head_attends_it():
    heads = [torch.zeros(32, 32, dtype=torch.bool) for _ in range(2)]
    heads[0][:, :16] = heads[1][:, 16:] = True
    assert lint(BlockMask.from_dense(torch.stack(heads), 16)) == []


def test_leaks_name_the_first_pair_and_the_heads():
    dense = torch.ones(2, 128, 128, dtype=torch.bool).tril()
    dense[1, 40, 90] = dense[1, 41, 42] = True
    (found,) = lint(BlockMask.from_dense(dense, 16), within=masks.causal())
    assert found.rule == "leaks"
    assert found.heads == (1,)
    assert found.what.startswith("2 pairs are outside of causal()")
    assert found.what.endswith("query 40 and key 90")
    assert lint(BlockMask.from_dense(dense, 16)) == []


def test_long_rows_are_found_in_both_directions():
    mask = masks.longformer(64, 64)(4096, 64)
    found = [f for f in lint(mask) if f.rule == "long-rows"]
    assert ["rows of query" in f.what for f in found] == [True, False]
    assert "longest 64" in found[0].what
    total = mask.nnz_blocks
    assert f"{64 * 132 / total:.1f} (batch, head)" in found[0].cost


def test_useless_pairs_name_the_block_size_that_helps():
    (found,) = lint(masks.local(8)(1024, 128))
    assert found.rule == "useless-pairs"
    assert "blocks of 16" in found.change
    pairs = sum(min(i + 8, 1023) - max(i - 8, 0) + 1 for i in range(1024))
    computed = 22 * 128 * 128
    assert f"{pairs / computed:.1%}" in found.what
    assert f"{computed / pairs:.1f} times" in found.cost


def test_many_bit_tiles_are_counted_in_bytes(monkeypatch):
    mask = BlockMask.from_dense(torch.rand(2048, 2048) < 0.7, 256)
    assert lint(mask) == []
    monkeypatch.setattr("masks.lint.LARGE_BIT_TILES", 64 * 256 * 256 // 8 - 1)
    (found,) = lint(mask)
    assert found.rule == "many-bit-tiles"
    assert "64 distinct bit tiles of 64 partial blocks take 0.5 MiB" in found.what
    monkeypatch.setattr("masks.lint.LARGE_BIT_TILES", 64 * 256 * 256 // 8)
    assert lint(mask) == []


def test_equal_heads_are_named_together():
    patterns = [masks.local(64), masks.butterfly(), masks.local(64)]
    (found,) = lint(masks.stack(patterns)(512, 16))
    assert (found.rule, found.heads) == ("equal-heads", (0, 2))
    assert lint(masks.stack(patterns[:2])(512, 16)) == []


def test_layers_without_reach_are_named():
    near = masks.documents([64, 64])(128, 16)
    (found,) = lint([near, near, masks.full()(128, 16), near])
    assert (found.rule, found.layers) == ("dead-layers", (1,))
    (alone,) = lint(near, layers=3)
    assert alone.layers == (1, 2)
    assert "50.00% of the pairs" in alone.what


def test_layers_after_full_connectivity_are_no_finding():
    assert lint(clean(), layers=9) == []


def test_rules_can_be_left_out_and_unknown_ones_are_refused():
    mask = masks.local(8)(1024, 128)
    assert lint(mask, ignore=["useless-pairs"]) == []
    with pytest.raises(ValueError, match="ignore must be a list of rules in"):
        lint(mask, ignore=["nothing"])
    with pytest.raises(TypeError, match="ignore must be a list of rules, got 3"):
        lint(mask, ignore=3)
    with pytest.raises(ValueError, match="masks must have at least 1 entry"):
        lint([])
    with pytest.raises(TypeError, match="within must be a Pattern or None, got 'causal'"):
        lint(mask, within="causal")
    with pytest.raises(TypeError, match="masks must be a BlockMask or a list"):
        lint(masks.full())
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        lint([mask, mask], layers=0)
    with pytest.raises(TypeError, match="layers must be an integer, got '2'"):
        lint(mask, layers="2", ignore=["dead-layers"])


def test_findings_come_in_the_order_of_the_rules():
    found = rules(lint(masks.dilated(2, 64)(1024, 128), within=masks.causal()))
    assert found == ["leaks", "useless-pairs"]
    assert [r for r in RULES if r in found] == found
