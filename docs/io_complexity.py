"""A section of docs/performance.md: predictions of the IO model, and causes of deviations."""

from collections.abc import Callable, Iterable
from textwrap import fill

from records import NAMES, Rows, picture

from experiments.markdown import table

FITTED = {
    "l2_gb": "bytes through L2, predicted",
    "predicted_ms": "time, predicted",
    "measured_ms": "time, measured",
}
THEORY = """\
This section compares [`sparseflash.io_model`](api/io-model.md) with measurements, for Figure 2 of
the FlashAttention paper and for growing N. The model predicts bytes of device memory and the least
time of a pass, from rates that were measured on the device. Hardware counters (Nsight Compute)
measure the bytes. [The theory, executed](tutorials/theory.md) derives the model.

- **Predicted** figures were computed before the measurement.
- **Fitted** bytes are those of the present model. It simulates L2 while CTAs drift apart. Two of
  its parameters were fitted: how unequal the steps of CTAs are, to the measurements below; the
  share of L2 that holds operands, to earlier ones. They change bytes only.
- **Deviation** is measured over predicted (or fitted), minus 1."""
OFF = {"bytes": 0.15, "time": 0.25}  # larger deviations need a cause
TILE = 128  # queries of a work tile, at 64 and 128 dims
FEW_TILES = 8  # work tiles for each multiprocessor
SHORT_ROW = 9.5  # blocks in a block row


def io_complexity(record: dict) -> str:
    """Causes of deviations, bytes and times, exponents of growth, and pictures."""
    panels = {
        "left": "FlashAttention and standard attention",
        "middle": "Block size",
        "right": "Density",
        "scaling": "Growth with N",
    }
    since = "fitted_gb" in record["rows"][0]
    head = ["tokens", "block size", "density s", "pass"]
    head += ["GB predicted", "GB measured", "deviation"]
    head += [*["GB fitted", "deviation"] * since]
    head += ["ms predicted", "ms measured", "deviation", "limited by"]
    parts = [misses(record)]
    for panel, title in panels.items():
        rows = [row for row in record["rows"] if row["panel"] == panel]
        name, first = ("implementation",) * 2 if panel == "left" else ("name", "mask")
        lines = [
            [
                NAMES.get(row[name], row[name]),
                *(f"{row['seq_len']:,}", f"{row['block_size']}", f"{row['density']:.3g}"),
                row["direction"],
                *against(row["memory_gb"], row["measured_gb"]),
                *(against(row["fitted_gb"], row["measured_gb"])[::2] if since else ()),
                *against(row["predicted_ms"], row["measured_ms"]),
                row["bound_by"],
            ]
            for row in rows
        ]
        heads = (
            f"batch {rows[0]['batch']}, {rows[0]['heads']} heads, head dim {rows[0]['head_dim']}"
        )
        parts += [f"**{title}** ({heads})", table([first, *head], lines)]
        if panel in ("right", "scaling"):
            name = "figure-2" if panel == "right" else "scaling"
            about = f"{title}, predicted and measured"
            parts.append(picture(f"{record['stem']}-{name}", about))
    lines = [
        [
            *(fit["name"], fit["direction"], FITTED[fit["figure"]]),
            *(f"{fit['exponent']:.2f}", f"{fit['theory']:.2f}"),
        ]
        for fit in record["exponents"]
    ]
    parts.append(
        "Exponents of growth: each line fits a power of N. The last column is the exponent of the "
        "theory, for N √N (strided) and N log N (butterfly) over the same lengths."
    )
    parts.append(table(["mask", "pass", "figure", "exponent", "exponent of the theory"], lines))
    return "\n\n".join(filter(None, parts))


def against(predicted: float, found: float | None) -> tuple[str, str, str]:
    """A prediction, the measurement, and its deviation."""
    if found is None:
        return f"{predicted:.3g}", "", ""
    return f"{predicted:.3g}", f"{found:.3g}", f"{found / predicted - 1:+.0%}"


def deviation(row: dict, figure: str) -> float:
    """Measured over modelled, minus 1."""
    if figure == "time":
        return row["measured_ms"] / row["predicted_ms"] - 1
    return row["measured_gb"] / row.get("fitted_gb", row["memory_gb"]) - 1


def predicted_bytes_deviation(row: dict) -> float:
    """Measured bytes over those that were predicted before the measurement, minus 1."""
    return row["measured_gb"] / row["memory_gb"] - 1


def pairs(row: dict) -> float:
    """Pairs that the kernels of a pass compute; the backward pass has two kernels.

    The forward pass has two products for each pair; the kernels of the backward pass have three
    and four.
    """
    products = 2 if row["direction"] == "forward" else 7
    return row["gflop"] * 1e9 / (2 * products * row["head_dim"])


def exponentials_ms(row: dict, model: dict) -> float:
    """Milliseconds of the exponentials alone: one for each pair and kernel, 16 in each cycle."""
    kernels = 1 if row["direction"] == "forward" else 2
    return kernels * pairs(row) / (16 * model["multiprocessors"] * model["clock"]) * 1e3


def written_gb(row: dict) -> float:
    """Gigabytes of outputs: O, or dQ, dK and dV."""
    tensors = 1 if row["direction"] == "forward" else 3
    numbers = row["batch"] * row["heads"] * row["seq_len"] * row["head_dim"]
    return 2 * tensors * numbers / 1e9


def tiles_per_multiprocessor(row: dict, model: dict) -> float:
    """Work tiles for each multiprocessor."""
    tiles = row["batch"] * row["heads"] * row["seq_len"] / TILE
    return tiles / model["multiprocessors"]


def row_blocks(row: dict) -> float:
    """Mean number of blocks in a block row; a block smaller than a tile counts as a tile."""
    return row["density"] * row["seq_len"] / max(row["block_size"], TILE)


def rate(row: dict) -> float:
    """Measured TB/s of device memory."""
    return row["measured_gb"] / row["measured_ms"]


def spread(values: Iterable[float], form: str) -> str:
    """The least and the largest value, or one value if both look the same."""
    low, high = (format(f(found), form) for found in [list(values)] for f in (min, max))
    return low if low == high else f"{low} to {high}"


def listed(values: Iterable[float]) -> str:
    """All values."""
    return " and ".join(f"{value:.3g}" for value in values)


def extra_squares(row: dict) -> float:
    """Measured minus predicted bytes, in units of one N x N matrix for each head."""
    square = 2 * row["batch"] * row["heads"] * row["seq_len"] ** 2
    return (row["measured_gb"] - row["memory_gb"]) * 1e9 / square


# The figure (bytes or time), the calls, whether a row is one of them, and the cause. A row belongs
# to the first entry that matches it.
Cause = tuple[str, str, Callable[[dict, dict], bool], Callable[[Rows, dict], str]]
CAUSES: tuple[Cause, ...] = (
    (
        "bytes",
        "standard attention",
        lambda row, model: row["implementation"] == "standard",
        lambda rows, model: (
            f"torch moves {spread(map(extra_squares, rows), '.1f')} N² numbers more than "
            "Algorithm 3; which of its kernels moves them was not measured"
        ),
    ),
    (
        "bytes",
        "small calls",
        lambda row, model: (
            written_gb(row) * 1e9 <= model["l2_bytes"] and deviation(row, "bytes") < 0
        ),
        lambda rows, model: (
            "the outputs fit into L2 and are not yet in device memory when the kernel ends; they "
            f"are {spread((written_gb(r) / r['memory_gb'] for r in rows), '.0%')} of the bytes "
            "that the model predicts"
        ),
    ),
    (
        "bytes",
        "heads whose keys and values exceed L2",
        lambda row, model: 4 * row["seq_len"] * row["head_dim"] > model["l2_bytes"],
        lambda rows, model: (
            "CTAs that drift apart read a block again; the model has the same drift for all masks"
        ),
    ),
    (
        "time",
        "standard attention",
        lambda row, model: row["implementation"] == "standard",
        lambda rows, model: (
            f"its kernels move {spread(map(rate, rows), '.1f')} TB/s, and a copy moves "
            f"{model['memory_bandwidth'] / 1e12:.1f}; in the backward pass they also move more "
            "bytes"
        ),
    ),
    (
        "time",
        "head dim 64",
        lambda row, model: row["head_dim"] < 128,
        lambda rows, model: (
            "a tile has half the products and as many exponentials as with head dim 128, and the "
            "two overlap only in part. The products alone take "
            f"{listed(r['predicted_ms'] for r in rows)} ms, products and then exponentials "
            f"{listed(r['predicted_ms'] + exponentials_ms(r, model) for r in rows)} ms; measured "
            f"are {listed(r['measured_ms'] for r in rows)} ms"
        ),
    ),
    (
        "time",
        "few work tiles",
        lambda row, model: tiles_per_multiprocessor(row, model) < FEW_TILES,
        lambda rows, model: (
            f"{spread((tiles_per_multiprocessor(r, model) for r in rows), '.1f')} work tiles for "
            "each multiprocessor leave parts of the device idle at the end; launches add time: "
            f"{spread((1e3 * (r['measured_ms'] - r['predicted_ms']) for r in rows), '.0f')} µs "
            "more than predicted"
        ),
    ),
    (
        "time",
        "short block rows",
        lambda row, model: row_blocks(row) < SHORT_ROW,
        lambda rows, model: (
            f"a block row has {spread(map(row_blocks, rows), '.0f')} blocks. The model has no "
            "prologue and epilogue of a row; to explain the deviation they would take as long as "
            f"{spread((deviation(r, 'time') * row_blocks(r) for r in rows), '.1f')} blocks"
        ),
    ),
    (
        "time",
        "masks that stream from device memory",
        lambda row, model: rate(row) * 1e12 > model["memory_bandwidth"] / 3,
        lambda rows, model: (
            f"they load {spread(map(rate, rows), '.1f')} TB/s during the products, and a copy "
            f"alone moves {model['memory_bandwidth'] / 1e12:.1f}: loads arrive late, and products "
            "wait"
        ),
    ),
)


def misses(record: dict) -> str:
    """How many predictions deviate by more than OFF, and the causes."""
    rows = [row for row in record["rows"] if row["measured_gb"] and row["measured_ms"]]
    model = record["model"]
    first = sum(abs(predicted_bytes_deviation(r)) > OFF["bytes"] for r in rows)
    off = {f: [r for r in rows if abs(deviation(r, f)) > least] for f, least in OFF.items()}
    lines = [
        f"Of {len(rows)} passes, the predicted bytes deviate by more than {OFF['bytes']:.0%} in "
        f"{first}, the fitted bytes in {len(off['bytes'])}; the predicted time deviates by more "
        f"than {OFF['time']:.0%} in {len(off['time'])}. The causes:",
        "",
    ]
    refitted = [
        r
        for r in rows
        if abs(predicted_bytes_deviation(r)) > OFF["bytes"] and r not in off["bytes"]
    ]
    if refitted:
        names = " and ".join(dict.fromkeys(row["name"] for row in refitted))
        found = described(refitted, predicted_bytes_deviation)
        lines.append(
            f"- **Bytes as predicted, but not as fitted, {names}** ({found}): CTAs drift apart "
            "and read a block again. The model that predicted had no drift; with it these rows "
            f"deviate by {spread((deviation(r, 'bytes') for r in refitted), '+.0%')}."
        )
    for figure, calls, holds, why in CAUSES:
        own = [row for row in off[figure] if holds(row, model)]
        off[figure] = [row for row in off[figure] if row not in own]
        if own:
            title = f"**{figure.capitalize()}, {calls}**"
            found = described(own, lambda row, figure=figure: deviation(row, figure))
            lines.append(f"- {title} ({found}): {why(own, model)}.")
    lines += [
        f"- **{figure.capitalize()}, cause unknown**: {row['name']}, {row['seq_len']:,} tokens, "
        f"{row['direction']}, {deviation(row, figure):+.0%}."
        for figure, left in off.items()
        for row in left
    ]
    return "\n".join(
        fill(line, 110, subsequent_indent="  " * line.startswith("- ")) for line in lines
    )


def described(rows: Rows, deviation_of: Callable[[dict], float]) -> str:
    """The number of rows, their lengths and their deviations."""
    passes = f"{len(rows)} passes" if len(rows) > 1 else f"{rows[0]['direction']} pass"
    return (
        f"{passes}, {spread((r['seq_len'] for r in rows), ',')} tokens, "
        f"{spread(map(deviation_of, rows), '+.0%')}"
    )
