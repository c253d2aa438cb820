"""The arguments of the public functions, checked before anything is computed."""

from collections.abc import Hashable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from masks import DynamicMask, Pattern, full
from masks._core.grid import is_captured
from masks.arguments import check_dtype, check_floating, check_integer
from masks.mask_batch import CompiledMask

AnyMask = Pattern | CompiledMask
FULL = full()
# By the tensor that owns the memory, and then by what a view of it shows: the least and the
# largest of lengths on a GPU, and how often they had been changed in place.
_RANGES: MutableMapping[Tensor, dict[Hashable, tuple[int, int, int]]] = WeakIdKeyDictionary()
MAX_VIEWS = 64  # of one tensor, whose ranges are cached
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The function that makes a mask from an object of another type. This BlockMask is FlexAttention's.
_MAKERS = {
    "Tensor": "masks.BlockMask.from_dense",
    "ndarray": "masks.BlockMask.from_dense (of torch.from_numpy)",
    "str": "masks.parse",
    "function": "masks.pattern (or, of a built-in pattern, its call)",
    "list": "masks.stack (of one for each head)",
    "BlockMask": "masks.interop.from_flex",
}


def checked_tensors(
    query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the tensors of a call, which may not be empty, and casts them under autocast."""
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.numel() == 0:
            raise ValueError(f"{name} must not be empty, got {tuple(tensor.shape)}")
    if key_lengths is not None:
        check_key_lengths(key_lengths, query)
    return query, key, value


def checked_bias(bias: Tensor | None, query: Tensor, q_len: int, k_len: int) -> Tensor | None:
    """The bias as backends read it: float32 (float64 for float64 inputs), contiguous, or None."""
    if bias is None:
        return None
    _check_of_heads("bias", bias, query, (q_len + k_len - 1,))
    return bias.to(torch.promote_types(query.dtype, torch.float32)).contiguous()


def check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    """Raises TypeError or ValueError unless sinks are None or floating-point (1 or heads,)."""
    if sinks is not None:
        _check_of_heads("sinks", sinks, query, ())


def _check_of_heads(name: str, tensor: Tensor, query: Tensor, sizes: tuple[int, ...]) -> None:
    """Raises unless a tensor is floating-point (1 or heads, *sizes) on the device of query."""
    check_floating(name, tensor)
    shapes = [(heads, *sizes) for heads in (1, query.shape[1])]
    if tuple(tensor.shape) not in shapes or tensor.device != query.device:
        raise ValueError(
            f"{name} must have shape {shapes[0]} or {shapes[1]} on {query.device}, got "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, as torch's own attention casts them."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    _check_types(tensors)
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def _check_types(tensors: tuple[Tensor, ...]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"query, key and value must be tensors, got {type(tensor).__name__}")


def are_plain(*tensors: Tensor) -> bool:
    """Whether kernels may read the memory of tensors: of no subclass, and no negated views."""
    for x in tensors:  # quicker than all()
        if not (type(x) is Tensor or type(x) is torch.nn.Parameter) or x.is_neg():
            return False
    return True


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices match."""
    _check_types((query, key, value))
    if query.is_meta:
        raise ValueError("query, key and value must have data, got tensors on meta")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor (torch.strided), got {tensor.layout}; for "
                "sequences of several lengths see attention_varlen"
            )
        if tensor.dim() != 4 or 0 in (tensor.shape[1], tensor.shape[3]):
            raise ValueError(
                f"{name} must be (batch, heads, seq, head_dim) with a head and a dim, got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must be {query.dtype} on {query.device} like query, got {tensor.dtype} "
                f"on {tensor.device}"
            )
    if query.dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise TypeError(f"query must have one of the dtypes {names}, got {query.dtype}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"value must share batch, heads and tokens with key {tuple(key.shape)}, got "
            f"{tuple(value.shape)}"
        )
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key must share batch and head_dim with query {tuple(query.shape)}, got "
            f"{tuple(key.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"key heads must divide the {query.shape[1]} query heads, got {key.shape[1]}"
        )


def check_key_lengths(lengths: Tensor, query: Tensor) -> None:
    """Raises unless key lengths are integers (batch,) on the device of query or the CPU."""
    check_dtype("key_lengths", lengths, torch.int32, torch.int64)
    devices = (query.device, torch.device("cpu"))
    if lengths.shape != query.shape[:1] or lengths.device not in devices:
        names = " or ".join(dict.fromkeys(map(str, devices)))
        raise ValueError(
            f"key_lengths must be ({query.shape[0]},) on {names}, got {tuple(lengths.shape)} on "
            f"{lengths.device}"
        )


def lengths_in_range(lengths: Tensor | None, k_len: int, device: torch.device) -> Tensor | None:
    """Key lengths as backends read them: int32, contiguous, on the device of the keys.

    Raises:
        ValueError: A length is not in [0, k_len]. While a CUDA graph is captured, lengths are
            clamped instead, and those of a CUDA device must be there already.
    """
    if lengths is None:
        return None
    capturing = is_captured(lengths.device if lengths.is_cuda else device)
    if lengths.is_cuda and capturing:
        read_now = False  # nothing can be read
    else:
        least, largest, read_now = _range_of(lengths)
        if not 0 <= least <= largest <= k_len:
            raise ValueError(f"key_lengths must be 0 to {k_len}, got {lengths.tolist()}")
    if not read_now:  # something that torch does not count may have written other lengths since
        lengths = lengths.clamp(0, k_len)
    lengths = lengths.to(torch.int32)
    if device.type == "cuda" and not lengths.is_cuda:
        if capturing:
            raise ValueError(
                "key_lengths must be on the CUDA device while a CUDA graph is captured, got "
                "lengths on the CPU"
            )
        lengths = lengths.pin_memory()  # so that the host need not wait for the copy
    return lengths.to(device, non_blocking=True).contiguous()


def _range_of(lengths: Tensor) -> tuple[int, int, bool]:
    """The least and the largest of some lengths, and whether they were read by this call.

    To read lengths on a GPU, the host waits for it. So they are read once, by the first of the
    layers that share them, and again after a change in place that torch counts. Equal views of one
    tensor are the same lengths.
    """
    if not lengths.is_cuda or lengths.is_inference():
        numbers = lengths.tolist()
        return min(numbers, default=0), max(numbers, default=0), True
    owner = lengths if lengths._base is None else lengths._base
    view = lengths.dtype, lengths.storage_offset(), lengths.shape, lengths.stride()
    ranges, version = _RANGES.setdefault(owner, {}), lengths._version
    if view in ranges:
        least, largest, version_then = ranges[view]
        if version_then == version:
            return least, largest, False
    if len(ranges) == MAX_VIEWS:
        ranges.clear()
    numbers = lengths.tolist()
    ranges[view] = min(numbers, default=0), max(numbers, default=0), version
    return *ranges[view][:2], True


def checked_mask(mask: AnyMask | None) -> AnyMask:
    """The mask of a call; all pairs for None. Raises TypeError for other types."""
    if mask is None:
        return FULL
    if not isinstance(mask, AnyMask):
        name = type(mask).__name__
        made = f", of which {_MAKERS[name]} makes one" if name in _MAKERS else ""
        raise TypeError(
            "mask must be a Pattern, a BlockMask, a MaskBatch, a DynamicMask or None, got "
            f"{name}{made}"
        )
    return mask


def checked_block_scores(mask: AnyMask) -> Tensor | None:
    """The block scores of a DynamicMask, if they require a gradient, else None."""
    if not isinstance(mask, DynamicMask):
        return None
    if mask.scores is None or not mask.scores.requires_grad:
        return None
    return mask.scores


def requires_gradient(tensor: Tensor | None) -> bool:
    """Whether a tensor requires a gradient. Objects of other types are refused elsewhere."""
    return getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()


def checked_seed(seed: int | None, dropout_p: float) -> Tensor | None:
    """The seed of a call: None without dropout, random if `seed` is None."""
    if seed is not None:
        seed = check_integer("seed", seed, least=-(2**63))
    if dropout_p == 0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), device="cpu")
    return torch.tensor(seed, device="cpu")
