from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import masks
from sparseflash import io_model
from sparseflash.io_model import DEVICES, attention, l2_reuse, standard_attention

D, E = 128, 2  # head dim, bytes of a number


def test_standard_attention_counts_every_step():
    n, heads = 512, 6
    forward, backward = (
        standard_attention(n, 64, batch=2, heads=3, direction=each) for each in io_model.DIRECTIONS
    )
    assert forward.memory_bytes == heads * E * (4 * n * 64 + 4 * n**2)
    assert backward.memory_bytes == heads * E * (8 * n * 64 + 7 * n**2)
    assert forward.flops == heads * 4 * n**2 * 64
    assert backward.flops == 2 * forward.flops
    assert forward.bound_by == backward.bound_by == "memory"
    wide = standard_attention(n, 64, batch=2, heads=3, itemsize=4)
    assert (wide.memory_bytes, wide.flops) == (2 * forward.memory_bytes, forward.flops)


@pytest.mark.parametrize(
    ("backend", "block", "rows"), [("hopper", 128, 128), ("hopper", 64, 64), ("triton", 64, 64)]
)
def test_l2_bytes_are_those_of_the_theorem(backend, block, rows):
    """Q and O once, K and V once for each tile of queries that lists them; 4 bytes each of LSE and
    of an entry of the table."""
    n, heads = 4096, 3
    mask = masks.random(1 / 4, seed=1)(n, block_size=block)
    cost = attention(mask, D, heads=heads, backend=backend)
    streamed = mask.nnz_blocks * block // rows * block * 2 * D * E
    resident = n * (2 * D * E + 4)
    entries = 4 * mask.nnz_blocks * block // rows
    assert cost.l2_bytes == heads * (streamed + resident + entries)
    assert cost.flops == heads * 4 * D * mask.nnz_blocks * block**2


def test_shared_memory_is_written_by_loads_and_read_by_products():
    """Forward, a block: K and V are written once and read by both warpgroups of 64 queries.
    Backward: as much is written. dQ has three products, dK and dV four, in two warpgroups each;
    for two of them the left operand is read from shared memory, too."""
    mask = masks.random(1 / 4, seed=1)(4096)
    tile, heads = 128 * D * E, 3
    blocks = heads * mask.nnz_blocks
    forward, backward = (
        attention(mask, D, heads=heads, direction=each, backend="hopper")
        for each in io_model.DIRECTIONS
    )
    assert forward.shared_bytes == blocks * tile * (2 + 2 * 2)
    assert [kernel.shared_bytes for kernel in backward.kernels] == [
        blocks * tile * (2 + 3 * 2 + 2),
        blocks * tile * (2 + 4 * 2 + 2),
    ]


def test_l2_holds_keys_and_values_until_they_are_too_many():
    cost = attention(masks.full()(8192), D, heads=2)
    assert cost.memory_bytes == pytest.approx(2 * 8192 * (4 * D * E + 4), rel=0.05)
    n, waves = 131_072, -(-1024 // 132)  # 1024 rows of 128 queries on 132 multiprocessors
    long = attention(masks.full()(n), D)
    once = n * 2 * D * E  # the queries and the output, and as much the keys and values
    # CTAs that drift apart read keys and values up to twice in a wave.
    assert 4 * once < long.memory_bytes < (1 + 2 * waves) * once
    windows = attention(masks.local(512)(n), D)
    assert windows.memory_bytes == pytest.approx(2 * once, rel=0.2)
    less = attention(masks.full()(65_536), D, device="A100", backend="hopper")
    more = attention(masks.full()(65_536), D, backend="hopper")
    assert less.memory_bytes > 1.3 * more.memory_bytes
    assert less.l2_bytes == more.l2_bytes


def test_keys_that_no_row_lists_are_not_read():
    blocks = torch.zeros(8, 8, dtype=torch.bool)
    blocks[:, :2] = True
    mask = masks.BlockMask.from_blocks(blocks, 128)
    cost = attention(mask, D)
    n = 1024
    assert cost.memory_bytes == pytest.approx(n * (2 * D * E + 4) + 256 * 2 * D * E, rel=1e-2)


@pytest.mark.parametrize(
    ("head_dim", "heads", "rows", "reads"),
    # Registers hold Q in tiles of 128 up to 128 dims. A block of 256 dims has two tiles of keys.
    [(64, 5, 128, 0), (64, 32, 192, 1), (128, 32, 128, 0), (256, 4, 128, 2)],
)
def test_products_read_queries_from_shared_memory_where_registers_do_not_hold_them(
    head_dim, heads, rows, reads
):
    n = 3072
    cost = attention(masks.full()(n), head_dim, heads=heads, batch=4, backend="hopper")
    tiles = 4 * heads * n**2 // (rows * 128)
    keys_and_values = 2 * 128 * (1 + rows // 64)  # written, and read by each warpgroup
    assert cost.shared_bytes == tiles * (keys_and_values + reads * rows) * head_dim * E


def test_what_lies_past_the_end_is_not_read():
    whole, clipped = (attention(masks.full()(n), D) for n in (1024, 1000))
    assert clipped.flops == whole.flops
    saved = 24 * (2 * D * E + 4) + 8 * 24 * 2 * D * E
    assert whole.l2_bytes - clipped.l2_bytes == pytest.approx(saved, rel=0.3)
    assert clipped.l2_bytes < whole.l2_bytes


def test_backward_pass_recomputes_scores_in_both_kernels():
    mask = masks.strided(4)(4096)
    forward, backward = (
        attention(mask, D, heads=4, direction=each) for each in io_model.DIRECTIONS
    )
    assert [kernel.name for kernel in backward.kernels] == ["dq", "dkdv"]
    assert backward.flops == pytest.approx(3.5 * forward.flops)
    # Q, O, dO, dQ and K, V; then K, V, dK, dV and Q, dO
    assert backward.memory_bytes == pytest.approx(4 * 4096 * 12 * D * E, rel=0.03)


def test_heads_of_a_group_share_keys():
    mask = masks.full()(4096)
    own, shared = (attention(mask, D, heads=8, kv_heads=kv) for kv in (8, 2))
    assert own.l2_bytes == shared.l2_bytes
    saved = own.memory_bytes - shared.memory_bytes
    assert saved == pytest.approx(6 * 4096 * 2 * D * E, rel=0.1)
    per_key_head = masks.stack([masks.full(), masks.local(128)])(4096)
    assert attention(per_key_head, D, heads=8, kv_heads=2).flops < own.flops


def test_packed_heads_load_keys_once_for_both():
    """In blocks of 64. As many products read them from shared memory as without packing."""
    mask, sizes = masks.random(0.2)(4096, 64), {"batch": 2, "heads": 8, "backend": "hopper"}
    packed, alone = (
        attention(mask, 128, kv_heads=kv_heads, **sizes).kernels[0] for kv_heads in (4, 8)
    )
    streamed = 2 * 8 * mask.nnz_blocks * 64 * 2 * 128 * E
    assert alone.l2_bytes - packed.l2_bytes == streamed / 2
    assert alone.shared_bytes - packed.shared_bytes == streamed / 2
    assert packed.waves == alone.waves == 2 * 8 * 64 / (2 * 132)


def test_packed_heads_are_scheduled_together():
    """A work tile is the same row of both, also where heads follow one another."""
    mask, sizes = masks.butterfly()(4096, 64), {"batch": 2, "heads": 8, "backend": "hopper"}
    for kv_heads, together in ((4, 2), (8, 1)):
        with patch.object(l2_reuse, "tiles_of", wraps=l2_reuse.tiles_of) as simulated:
            attention(mask, 128, kv_heads=kv_heads, **sizes)
        assert simulated.call_args.args[3] == together


def test_least_time_is_that_of_the_busiest_part():
    full = attention(masks.full()(8192), D, heads=16)
    h200 = DEVICES["H200"]
    assert full.seconds == full.flops / h200.matrix_flops
    assert full.bound_by == "products"
    assert full.arithmetic_intensity == full.flops / full.memory_bytes
    diagonal = attention(masks.local(0)(8192), D, heads=16)
    assert diagonal.bound_by == "memory"
    assert diagonal.seconds == diagonal.memory_bytes / h200.memory_bandwidth
    slow = replace(h200, matrix_flops=1e14, memory_bandwidth=1e12)
    assert attention(masks.full()(8192), D, heads=16, device=slow).seconds == full.flops / 1e14
    assert "bound by products" in str(full)
    assert "forward, ms: products" in str(full)


def test_auto_is_the_backend_that_serves_such_calls():
    mask = masks.causal()(2048)
    assert attention(mask, D) == attention(mask, D, backend="hopper")
    assert attention(mask, D, dtype=torch.float32) == attention(
        mask, D, dtype=torch.float32, backend="triton"
    )
    assert attention(mask, D, device="A100").device.name == "A100"


def test_bad_input_is_named():
    mask = masks.full()(256)
    with pytest.raises(ValueError, match="A100, H100, H200, got 'V100'"):
        attention(mask, D, device="V100")
    with pytest.raises(ValueError, match="device must be"):
        standard_attention(256, D, device="B9")
    with pytest.raises(ValueError, match="forward, backward, got 'both'"):
        attention(mask, D, direction="both")
    with pytest.raises(ValueError, match="hopper, triton, got 'cpu'"):
        attention(mask, D, backend="cpu")
    with pytest.raises(TypeError, match="mask must be a BlockMask, got Pattern"):
        attention(masks.full(), D)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"torch\.dtype, got 'half'"):
        attention(mask, D, dtype="half")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no forward kernel for head_dim 512 in tiles of 128"):
        attention(mask, 512, backend="hopper")
    with pytest.raises(ValueError, match="heads must be at least 1"):
        attention(mask, D, heads=0)
    with pytest.raises(ValueError, match="itemsize must be at least 1, got 0"):
        standard_attention(256, D, itemsize=0)
    with pytest.raises(TypeError, match="seq_len"):
        standard_attention(2.5, D)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="multiple of kv_heads, got 8 and 3"):
        attention(mask, D, heads=8, kv_heads=3)
    with pytest.raises(ValueError, match=r"mask must have 1 or 4 or 8 heads"):
        attention(masks.stack([masks.full(), masks.causal()])(256), D, heads=8, kv_heads=4)
    with pytest.raises(ValueError, match="more than 1 queries"):
        attention(masks.full()((1, 4096)), D)


@pytest.mark.parametrize("direction", io_model.DIRECTIONS)
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("lengths", [(600, 600), (100, 1000), (1000, 100)])
def test_every_shape_has_a_cost(direction, backend, block, lengths):
    mask = masks.random(0.4, seed=2)(lengths, block_size=block)
    for head_dim, heads, kv_heads in ((64, 4, 2), (128, 3, 1), (40, 1, 1)):
        sizes = {"heads": heads, "kv_heads": kv_heads, "batch": 2}
        cost = attention(mask, head_dim, direction=direction, backend=backend, **sizes)
        assert 0 < cost.memory_bytes <= cost.l2_bytes
        assert cost.flops > 0
        assert 0 < cost.filled_waves <= 1


def test_an_empty_mask_costs_what_is_written():
    empty = masks.BlockMask.from_blocks(torch.zeros(4, 4, dtype=torch.bool), 128)
    cost = attention(empty, D)
    assert cost.flops == 0
    assert cost.memory_bytes == pytest.approx(512 * (2 * D * E + 4), rel=0.01)
