"""The cost of standard attention, which writes S and P."""

from sparseflash.io_model.cost import Cost, KernelCost, check_case
from sparseflash.io_model.device import Device, device_named


def standard_attention(
    seq_len: int,
    head_dim: int,
    *,
    batch: int = 1,
    heads: int = 1,
    direction: str = "forward",
    itemsize: int = 2,
    device: str | Device = "H200",
) -> Cost:
    """The cost of attention that materialises its scores.

    Forward (Algorithm 0):  S = Q K^T;  P = softmax(S);  O = P V
        accesses  2Nd + N^2,  2 N^2,  N^2 + 2Nd          = 4Nd + 4 N^2
    Backward (Algorithm 3):  dV = P^T dO;  dP = dO V^T;  dS;  dQ = dS K;  dK = dS^T Q
        accesses  N^2 + 2Nd,  N^2 + 2Nd,  3 N^2,  N^2 + 2Nd,  N^2 + 2Nd  = 8Nd + 7 N^2

    Args:
        seq_len: N, in tokens.
        head_dim: d.
        batch, heads: Number of batch elements and of heads.
        direction: "forward" or "backward".
        itemsize: Bytes of an element.
        device: Name of one of DEVICES, or a Device.

    Returns:
        A Cost with a kernel for each step. Reuse in L2 is not counted: S and P do not fit in it.

    Raises:
        TypeError, ValueError: A size is not a positive integer, or the direction or the device is
            unknown.

    Reference:
        Dao et al. 2022, Algorithms 0 and 3, Theorem 2.
    """
    sizes = {"batch": batch, "heads": heads, "itemsize": itemsize}
    check_case(direction, seq_len=seq_len, head_dim=head_dim, **sizes)
    square, tall = batch * heads * seq_len**2, batch * heads * seq_len * head_dim
    product = 2 * square * head_dim

    def multiply(name: str) -> KernelCost:
        accesses = (square + 2 * tall) * itemsize
        return KernelCost(name, product, 0, accesses, accesses, 0)

    def elementwise(name: str, squares: int, exponentials: float) -> KernelCost:
        accesses = squares * square * itemsize
        return KernelCost(name, 0, exponentials, accesses, accesses, 0)

    if direction == "forward":
        kernels = (multiply("scores"), elementwise("softmax", 2, square), multiply("values"))
    else:
        kernels = (
            *(multiply("dV"), multiply("dP"), elementwise("dS", 3, 0)),
            *(multiply("dQ"), multiply("dK")),
        )
    return Cost(device_named(device), kernels)
