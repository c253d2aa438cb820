"""`python -m sparseflash explain`: how a call is computed, and the causes of its time."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from masks.commands import Json, PatternText, progress_bar, usage_errors

if TYPE_CHECKING:
    from sparseflash._explain import Explanation
    from sparseflash.gap import Gap

COLOURS = ("#0072b2", "#d55e00")


def explain_command(
    pattern: PatternText,
    seq_len: Annotated[int, typer.Option(min=1, help="Length in tokens.")] = 4096,
    head_dim: Annotated[int, typer.Option(min=1, help="Dims of a head.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Batch elements.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    block_size: Annotated[
        int | None,
        typer.Option(help="Side of a block in tokens (16, 32, ... 512). Default: of the pattern."),
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16"] | None,
        typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU."),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Default: a GPU if there is one.")
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Also measure the call, and explain its gap to the ideal time.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Picture of the gap to write (PNG, SVG or PDF)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a call: backend, configuration and reasons; with --measure, also its time."""
    import torch

    from masks._parse import parse
    from masks.plot import check_picture
    from sparseflash._explain import explain

    if plot is not None and not measure:
        raise typer.BadParameter("--plot needs --measure")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with usage_errors():
        check_picture("--plot", plot)
        if where == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a CUDA device, and there is none")
        kind = getattr(torch, dtype or ("bfloat16" if where == "cuda" else "float32"))
        sizes = () if block_size is None else (block_size,)
        with progress_bar("measuring" if measure else "building masks") as progress:
            mask = parse(pattern)(seq_len, *sizes, device=torch.device(where))
            shape = (batch, heads, seq_len, head_dim)
            query, key, value = (torch.randn(shape, dtype=kind, device=where) for _ in range(3))
            found = explain(query, key, value, mask, measure=measure, progress=progress)
    gaps = {"forward": found.forward_gap, "backward": found.backward_gap}
    split = {name: gap for name, gap in gaps.items() if gap is not None}
    if plot is not None and split:
        size = f"{seq_len:,} tokens, {heads} heads, head dim {head_dim}"
        draw(split, plot, f"{pattern}: {size}, {where}")
    print(json.dumps(to_dict(found)) if as_json else found)
    if plot is not None and not as_json:
        print(f"wrote {plot}")


def to_dict(explanation: "Explanation") -> dict[str, Any]:
    """All fields and properties of an explanation as values of JSON."""
    derived = {"spec": str(explanation.spec), "dense_is_faster": explanation.dense_is_faster}
    values: dict[str, Any] = asdict(explanation) | derived
    for name in ("forward_gap", "backward_gap"):
        gap = getattr(explanation, name)
        if gap is not None:
            values[name] |= {"largest": gap.largest}
    return values


def draw(gaps: "Mapping[str, Gap]", path: Path, title: str) -> None:
    """Writes a picture (PNG, SVG or PDF): the parts of gaps with their noise."""
    from matplotlib.figure import Figure  # it takes long to import

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    for axes, (name, gap), colour in zip(
        figure.subplots(1, len(gaps), sharey=True, squeeze=False)[0],
        gaps.items(),
        COLOURS,
        strict=False,
    ):
        bars = {"xerr": list(gap.noise.values()), "color": colour, "ecolor": "#404040"}
        axes.barh(list(gap.parts), list(gap.parts.values()), capsize=2, **bars)
        axes.axvline(0, color="#404040", linewidth=0.8)
        axes.set_title(f"{name}: {gap.measured:.3g} ms, ideal {gap.ideal:.3g}", size=9)
        axes.set_xlabel("part of the gap (ms), 95 % confidence")
        axes.tick_params(labelsize=8)
    figure.axes[0].invert_yaxis()
    figure.suptitle(title, size=9, parse_math=False)
    figure.savefig(path, dpi=150)
