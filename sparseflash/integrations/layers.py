"""Parses the patterns of the layers and heads of a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import masks
from masks import Pattern
from masks._parse import as_pattern, names_file, shortened
from masks.serialize import read_json

Heads = Pattern | str | None
Layers = Heads | Sequence[Heads | Sequence[Heads]] | Mapping | Path


def layer_patterns(
    pattern: Layers,
    num_layers: int,
    num_heads: int,
    kv_heads: int,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> tuple[Pattern, ...]:
    """The pattern of each layer.

    Args:
        pattern, layers, heads: As in huggingface.sparsify.
        num_layers: Number of layers of the model.
        num_heads, kv_heads: Number of query heads, and of key heads.

    Raises:
        TypeError, ValueError: As in huggingface.sparsify.
    """
    if isinstance(pattern, Path) or (isinstance(pattern, str) and pattern.endswith(".json")):
        pattern = _read_profile(Path(pattern))
    if isinstance(pattern, Mapping):
        pattern = _patterns_of_profile(pattern)
    allowed = sorted({num_heads, kv_heads})
    if pattern is None or isinstance(pattern, Pattern | str):
        of_layers = [_layer_pattern(pattern, allowed)] * num_layers
    elif isinstance(pattern, Sequence) and len(pattern) == num_layers:
        of_layers = [_layer_pattern(own, allowed) for own in pattern]
    else:
        got = len(pattern) if isinstance(pattern, Sequence) else type(pattern).__name__
        raise ValueError(
            f"pattern must be one for all layers or a list of {num_layers}, got {got}"
        )
    if heads is not None:
        chosen = _check_indices("heads", heads, num_heads)
        of_layers = [_restricted_to_heads(own, chosen, num_heads) for own in of_layers]
    chosen = _check_indices("layers", layers, num_layers)
    return tuple(own if i in chosen else masks.full() for i, own in enumerate(of_layers))


def _read_profile(path: Path) -> Layers:
    try:
        read = read_json(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"pattern cannot be read from {path}: {error}") from error
    if names_file(json.dumps(read)):
        raise ValueError(
            f"pattern of {path} must not name a Python file, which would be run: if you trust the "
            "file, pass its contents as a dict"
        )
    return read


def _patterns_of_profile(profile: Mapping) -> list:
    """The patterns of {"layers": [{"heads": [...]}, ...]}, as sparseflash.lab writes them."""
    try:
        return [list(layer["heads"]) for layer in profile["layers"]]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f'pattern must be {{"layers": [{{"heads": [...]}}, ...]}}, got {shortened(profile)}'
        ) from error


def _layer_pattern(pattern: Heads | Sequence[Heads], allowed: list[int]) -> Pattern:
    """The pattern of a layer from one pattern, or from a list with one for each head."""
    if pattern is None or isinstance(pattern, Pattern | str):
        return masks.full() if pattern is None else as_pattern(pattern)
    if not isinstance(pattern, Sequence) or len(pattern) not in allowed:
        got = len(pattern) if isinstance(pattern, Sequence) else type(pattern).__name__
        names = " or ".join(map(str, allowed))
        raise ValueError(
            f"pattern of a layer must be one for all heads or a list of {names}, got {got}"
        )
    of_heads = [_layer_pattern(own, []) for own in pattern]
    return of_heads[0] if len(set(of_heads)) == 1 else masks.stack(of_heads)


def _restricted_to_heads(pattern: Pattern, chosen: set[int], num_heads: int) -> Pattern:
    """The pattern in the chosen heads, and all pairs in the others."""
    if pattern.recipe is not None and pattern.recipe.maker == "stack":
        raise ValueError("heads must be None if the pattern has one for each head")
    return _layer_pattern(
        [pattern if h in chosen else None for h in range(num_heads)], [num_heads]
    )


def _check_indices(name: str, numbers: Sequence[int] | None, count: int) -> set[int]:
    """The indices as a set from 0; negative ones count from the end, and None means all."""
    if numbers is None:
        return set(range(count))
    if not isinstance(numbers, Sequence) or not all(
        isinstance(n, int) and not isinstance(n, bool) and -count <= n < count for n in numbers
    ):
        raise ValueError(f"{name} must be a list of {-count} to {count - 1}, got {numbers!r}")
    return {n % count for n in numbers}
