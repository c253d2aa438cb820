"""Register layouts: accumulators and left operands of wgmma; one element per thread and row."""

from sparseflash.backends.hopper.device.gluon_compat import gl, gluon

WARPGROUP_M = gl.constexpr(64)  # rows of the accumulator of one warpgroup
THREADS_PER_ROW = gl.constexpr(4)  # threads that share a row of an accumulator


@gluon.constexpr_function
def accumulator_layout(columns):
    """The layout of an accumulator [WARPGROUP_M, columns] of one warpgroup."""
    # wgmma of version 3.0: four warps of 16 rows each.
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def thread_row_layout():
    """The layout of [WARPGROUP_M, THREADS_PER_ROW]: one element per thread and row of S."""
    # As in an accumulator: a row has four lanes, a warp eight rows twice, a thread rows r, r + 8.
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.constexpr_function
def thread_word_layout(groups):
    """The layout of words [64 queries, 2 * groups], each in one thread."""
    words = [[0, 2]] if groups == 2 else [[8, 0]]
    lanes = [*words, [0, 1], [1, 0], [2, 0], [4, 0]]
    rows = [[8, 0]] if groups == 2 else []
    return gl.DistributedLinearLayout(rows, lanes, [[16, 0], [32, 0]], [], [64, 2 * groups])


@gluon.constexpr_function
def groups_layout(groups):
    """accumulator_layout of [64, 64 * groups] as [64, groups, 8, 2, 4]."""
    eights = [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    registers = [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], *eights]
    if groups == 2:
        registers = [*registers, [0, 1, 0, 0, 0]]
    rows = [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    lanes = [[0, 0, 0, 0, 2], [0, 0, 0, 1, 0], *rows]
    warps = [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, groups, 8, 2, 4])


@gluon.constexpr_function
def transposed_groups_layout():
    """accumulator_layout of [64, 64] as [8, 2, 4, 64]."""
    columns = [[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 0, 32]]
    registers = [[0, 0, 0, 1], [1, 0, 0, 0], *columns]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[2, 0, 0, 0], [4, 0, 0, 0]], [], [8, 2, 4, 64]
    )


@gluon.constexpr_function
def operand_a_layout(accumulator):
    """The layout of the left operand of a product, of 16 bits in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)


@gluon.jit
def as_operand_a(matrix, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """An accumulator as the left operand of a product with accumulator layout LAYOUT."""
    # A thread holds the same elements in both layouts: no exchange between threads.
    return gl.convert_layout(matrix.to(DTYPE), operand_a_layout(LAYOUT), assert_trivial=True)


@gluon.jit
def rescale_rows(acc, factor, LAYOUT: gl.constexpr):
    """Multiplies each row of `acc` [M, N] by its factor [M]."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return acc * gl.expand_dims(factor, 1)
