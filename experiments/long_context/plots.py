"""The picture of a record of scaling: a column for each measured pattern, a row for each figure.

The patterns of a record without measurements are those that it predicts.
"Received" is the largest number of megabytes of a rank in a forward pass. Exposed milliseconds and
peak memory are those of both passes.

python -m experiments.long_context.plots results/long-context-weak-2-nvidia-h200.json
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.cli import RESULTS, Output, Overwrite, output_folder, usage_errors
from experiments.files import read_object
from experiments.instruments import command
from experiments.long_context.choices import Kind, Way
from experiments.pictures import ORIGIN, look, octaves, origin, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEYS = ("environment", "kind", "predicted", "rows")
PREDICTED = "plan, predicted"
LOOKS: dict[str, dict[str, Any]] = {
    name: look(i) | {"markersize": 5, "linewidth": 1.4} for i, name in enumerate(Way)
}
LOOKS[PREDICTED] = LOOKS[Way.PLAN] | {"linestyle": "--", "markerfacecolor": "white"}
LEGEND_WIDTH = 2.7  # inches of a column with the longest name
Figures = dict[str, float]  # of one implementation on one number of ranks


def main(
    record: Annotated[Path, typer.Argument(exists=True, help="A record of the command scaling.")],
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Draw the picture of a record."""
    with usage_errors():
        found = draw(record, output_folder(output, overwrite) / record.name)
    for path in found:
        print(f"wrote {path}")


def draw(record: Path, picture: Path) -> list[Path]:
    """Writes the picture of a record as PNG and SVG.

    Args:
        record: A record of the command scaling.
        picture: Path of the picture; its suffix is replaced.

    Raises:
        ValueError: The file is not such a record.
    """
    found = read_object(record, "a record of `experiments.long_context.scaling`", KEYS)
    lines = measured(found["rows"]) | modelled(found["predicted"])
    figure = _figure(Kind(found["kind"]), lines)
    figure.supxlabel(origin(found["environment"]), x=0.995, **ORIGIN)
    return save(figure, picture, (".png", ".svg"))


def measured(rows: list[dict]) -> dict[tuple[str, str, int], Figures]:
    """The figures of measured rows, by pattern, implementation and ranks."""
    return {
        (row["pattern"], row["implementation"], row["ranks"]): {
            "ms": row["total_ms"],
            "rate": row["tflops"],
            "moved": row["counted_mb"],
            "exposed": max(row["exposed_total_ms"], 0.0),
            "memory": row["peak_bytes"] / 1e6,
        }
        for row in rows
    }


def modelled(predicted: list[dict]) -> dict[tuple[str, str, int], Figures]:
    """The figures of predictions, by pattern, implementation and ranks."""
    lines = {}
    for each in predicted:
        found, demand = each["prediction"], each["demand"]
        flops = 3.5 * sum(demand["own"] + demand["fetched"]) * demand["block_flops"]
        lines[each["pattern"], PREDICTED, found["ranks"]] = {
            "ms": found["total_ms"],
            "rate": flops / found["ranks"] / (found["total_ms"] * 1e9),
            "moved": found["receive_mb"],
            "exposed": found["exposed_ms"],
        }
    return lines


def _figure(kind: Kind, lines: dict[tuple[str, str, int], Figures]) -> "Figure":
    from matplotlib.lines import Line2D

    seen = {pattern for pattern, name, _ in lines if name != PREDICTED}
    if seen:  # else all of the record is predicted
        lines = {key: found for key, found in lines.items() if key[0] in seen}
    patterns = list(dict.fromkeys(pattern for pattern, *_ in lines))
    ranks = sorted({count for *_, count in lines})

    def gain(pattern: str, name: str, count: int) -> float | None:
        # Relative to one rank with a plan; for predictions, to its prediction.
        alone = lines.get((pattern, name if name == PREDICTED else Way.PLAN, 1))
        here = lines[pattern, name, count]
        if alone is None:
            return None
        weak = kind is Kind.WEAK
        return here["rate"] / alone["rate"] if weak else alone["ms"] / here["ms"]

    def field(name: str) -> Callable[[str, str, int], float | None]:
        return lambda *key: lines[key].get(name)

    headings: dict[str, Callable[[str, str, int], float | None]] = {
        "weak efficiency" if kind is Kind.WEAK else "times one rank": gain,
        "received MB": field("moved"),
        "exposed ms": field("exposed"),
        "peak MB": field("memory"),
    }
    if not any("memory" in found for found in lines.values()):  # predictions have no memory
        del headings["peak MB"]
    shape = (len(headings), len(patterns))
    size = (1.2 + 2.3 * len(patterns), 0.8 + 1.9 * len(headings))
    figure, axes = panels(*shape, size=size, squeeze=False)
    for row, (heading, value) in zip(axes, headings.items(), strict=True):
        row[0].set_ylabel(heading)
        for ax, pattern in zip(row, patterns, strict=True):
            for name in LOOKS:
                points = {
                    count: found
                    for count in ranks
                    if (pattern, name, count) in lines
                    and (found := value(pattern, name, count)) is not None
                }
                ax.plot(list(points), list(points.values()), **LOOKS[name])
    for ax, pattern in zip(axes[0], patterns, strict=True):
        ax.set_title(pattern, fontsize=10)
        ideal = [1] * len(ranks) if kind is Kind.WEAK else ranks
        ax.plot(ranks, ideal, color="#BBBBBB", linewidth=1, zorder=0)
    for ax in axes.flat:
        _dress(ax, ranks)
    for ax in axes[-1]:
        ax.set_xlabel("ranks")
    drawn = [name for name in LOOKS if any(name == key[1] for key in lines)]
    handles = [Line2D([], [], label=name, **LOOKS[name]) for name in drawn]
    handles.append(Line2D([], [], color="#BBBBBB", linewidth=1, label="ideal"))
    columns = max(1, min(5, int(size[0] / LEGEND_WIDTH)))
    place = {"loc": "outside upper center", "ncols": columns}
    figure.legend(handles=handles, **place, frameon=False, fontsize=9)
    return figure


def _dress(ax: "Axes", ranks: list[int]) -> None:
    octaves(ax, ranks, "{:g}".format)
    most = ax.dataLim.y1  # not finite if nothing was measured
    ax.set_ylim(0, 1.08 * most if 0 < most < float("inf") else 1)
    ax.tick_params(labelsize=8)


if __name__ == "__main__":
    command(main)
