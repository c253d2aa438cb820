"""How fast information mixes: the spectral gap of a mask."""

import numpy as np

from masks.analysis.graph import is_causal, token_graph
from masks.block_mask import BlockMask
from masks.mask_batch import check_block_mask

TOLERANCE = 1e-6


def spectral_gap(mask: BlockMask) -> float | None:
    """1 - |lambda_2| of the Markov chain that steps from a query to any of its keys.

    lambda_2 is the eigenvalue of second largest modulus of D^-1 A, A the pairs that any head
    attends and D the keys of each query. Tokens of one class have equal rows and columns, so the
    chain of classes has all eigenvalues but zeros. Products take time in proportion to ranges of
    classes; no matrix is stored. A chain of gap g forgets where it began in about 1 / g steps.

    Args:
        mask: Square.

    Returns:
        The gap, from 0 to 1. None for a causal mask, whose chain only goes back: its eigenvalues
        are 1 / (keys of a query) and say nothing about mixing. None too where ARPACK does not
        converge.

    Raises:
        TypeError: `mask` is no BlockMask.
        ValueError: It is not square.

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
