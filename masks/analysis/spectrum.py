"""The spectral gap of a mask: how fast information mixes over layers."""

import numpy as np

from masks.analysis.graph import is_causal, token_graph
from masks.block_mask import BlockMask
from masks.mask_batch import check_block_mask

TOLERANCE = 1e-6


def spectral_gap(mask: BlockMask) -> float | None:
    """1 - |lambda_2| of the Markov chain that steps from a query to any of its keys.

    lambda_2 is the eigenvalue of second largest modulus of D^-1 A. A has a 1 for each pair that
    any head attends, and D is the diagonal matrix of the number of keys of each query. A chain
    with gap g forgets its first token in about 1 / g steps.

    The chain of classes is used instead of that of tokens. It has the same eigenvalues except
    zeros, because tokens of one class have equal rows and columns. No matrix is stored: a product
    takes time in proportion to the number of ranges of classes.

    Args:
        mask: A mask with as many keys as queries.

    Returns:
        The gap, from 0 to 1. None for a causal mask: its eigenvalues are 1 / (keys of a query),
        which does not describe mixing. Also None if ARPACK does not converge.

    Raises:
        TypeError: `mask` is not a BlockMask.
        ValueError: `mask` is not square.

    Reference:
        Levin, Peres, Wilmer 2009, Markov Chains and Mixing Times, chapter 12.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs

    check_block_mask(mask)
    graph = token_graph([mask])
    if is_causal([mask]):
        return None
    layer, weight = graph.layers[0], graph.weight.astype(np.float64)
    keys = np.maximum(layer.attended_sums(weight), 1)

    def step(values: np.ndarray) -> np.ndarray:
        return layer.attended_sums(weight * values.ravel()) / keys

    if graph.classes <= 3:  # ARPACK needs more rows than eigenvalues
        eigenvalues = np.linalg.eigvals(np.stack([step(e) for e in np.eye(graph.classes)], axis=1))
    else:
        shape = (graph.classes, graph.classes)
        operator = LinearOperator(shape, matvec=step, dtype=np.float64)  # type: ignore
        start = np.random.default_rng(0).random(graph.classes)
        try:
            eigenvalues = eigs(operator, 2, v0=start, tol=TOLERANCE, return_eigenvectors=False)  # type: ignore
        except ArpackNoConvergence:
            return None
    moduli = np.sort(np.abs(eigenvalues))[::-1]
    return float(np.clip(1 - moduli[1], 0, 1)) if len(moduli) > 1 else 1.0
