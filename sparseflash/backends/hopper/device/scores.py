"""S of a tile with a soft cap, a score function or a bias.

triton_common.score_mods implements them. Its result is S log2(e), that is S in base 2, so exp2
needs no further scale.
"""

from sparseflash.backends.hopper.device.gluon_compat import gl, gluon
from sparseflash.backends.hopper.device.layouts import WARPGROUP_M
from sparseflash.backends.triton_common import score_mods
from sparseflash.backends.triton_common.score_mods import ScoreMods, bias_of_head, tanh


@gluon.jit
def softmax_scale_log2(params):
    """The factor of S in arguments of exp2: scale * log2(e), or 1 if S is in base 2."""
    scale = params.scale_log2
    if params.has_score_mod:
        scale = 1.0
    return scale


@gluon.jit
def apply_score_mod(products, params, bh, query_start, key_start, LAYOUT: gl.constexpr,
                    TRANSPOSED: gl.constexpr):  # fmt: skip
    """(S in base 2, its derivative) from a tile of products Q K^T.

    products:               [queries, keys], or if TRANSPOSED [keys, queries]
    query_start, key_start: first query and first key of the tile
    """
    batch, head = bh // params.sizes.heads, bh % params.sizes.heads
    rows = gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, products.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    queries, keys = query_start + rows, key_start + columns
    if TRANSPOSED:
        queries, keys = query_start + columns, key_start + rows
    return score_mods.apply_score_mod(
        products, queries, keys,
        ScoreMods(params.scale_log2, params.score_params.softcap,
                  bias_of_head(params.score_params.bias, params.score_params.bias_stride, head),
                  batch, head, params.sizes.q_len, params.sizes.k_len,
                  params.score_params.pointers,
                  params.score_params.softcap is not None, params.score_function),
        TRANSPOSED, tanh_by_element,
    )  # fmt: skip


@gluon.jit
def tanh_by_element(x):
    """score_mods.tanh of one element at a time: registers cannot hold intermediates of a tile."""
    return gl.map_elementwise(tanh, x)
