"""A section of docs/performance.md: predictions of the IO model, and why measurements differ."""

from collections.abc import Callable, Iterable
from textwrap import fill

from records import NAMES, Rows

from experiments.markdown import table

FITTED = {
    "l2_gb": "bytes through L2, predicted",
    "predicted_ms": "time, predicted",
    "measured_ms": "time, measured",
}
THEORY = """\
Figure 2 of the FlashAttention paper, and growth with N: bytes of device memory and the least
time by [`sparseflash.io_model`](api/io-model.md), with the rates of the device as measured
first, beside hardware counters (Nsight Compute) and times. [The theory,
executed](tutorials/theory.md) derives the model.

"Predicted" is what the model said before the measurement. "Fitted" are the bytes of the model
since: a simulation of L2 with CTAs that drift apart. How unequal their steps are is a number that
is fitted to these measurements, the share of L2 that holds operands to those before. It changes
nothing but bytes."""
OFF = {"bytes": 0.15, "time": 0.25}  # share of the prediction that is explained below
TILE = 128  # tokens of a row of a work tile, at 64 and 128 dims
FEW_WAVES = 8  # of work tiles
SHORT_ROW = 9.5  # blocks


def io_complexity(record: dict) -> str:
    """Predicted and measured bytes and times, exponents of growth, and pictures."""
    panels = {
        "left": "FlashAttention and standard attention",
        "middle": "Block size",
        "right": "Density",
        "scaling": "Growth with N",
    }
    since = "fitted_gb" in record["rows"][0]
    head = ["mask", "tokens", "blocks", "density s", "pass", "GB predicted", "measured", ""]
    head += [*["GB fitted", ""] * since, "ms predicted", "measured", "", "bound by"]
    parts = [misses(record)]
    for panel, title in panels.items():
        rows = [row for row in record["rows"] if row["panel"] == panel]
        name = "implementation" if panel == "left" else "name"
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
        heads = f"batch {rows[0]['batch']}, {rows[0]['heads']} heads of {rows[0]['head_dim']}"
        parts += [f"**{title}** ({heads})", table(head, lines)]
        if panel in ("right", "scaling"):
            picture = "figure-2" if panel == "right" else "scaling"
            file = f"../experiments/results/io-complexity-nvidia-h200-{picture}.png"
            parts.append(f"![{title}, predicted and measured]({file})")
    lines = [
        [
            *(fit["name"], fit["direction"], FITTED[fit["figure"]]),
            *(f"{fit['exponent']:.2f}", f"{fit['theory']:.2f}"),
        ]
        for fit in record["exponents"]
    ]
    parts.append(table(["mask", "pass", "what grows", "exponent", "N sqrt N, N log N"], lines))
    return "\n\n".join(parts)


def against(predicted: float, found: float | None) -> tuple[str, str, str]:
    """A prediction, what was measured, and its deviation."""
    if found is None:
        return f"{predicted:.3g}", "", ""
    return f"{predicted:.3g}", f"{found:.3g}", f"{found / predicted - 1:+.0%}"


def deviation(row: dict, figure: str) -> float:
    """Measured over modelled, less 1."""
    if figure == "time":
        return row["measured_ms"] / row["predicted_ms"] - 1
    return row["measured_gb"] / row.get("fitted_gb", row["memory_gb"]) - 1


def pairs(row: dict) -> float:
    """Of tokens that a pass computes, once for each kernel: two products forward, three and four
    backward."""
    products = 2 if row["direction"] == "forward" else 7
    return row["gflop"] * 1e9 / (2 * products * row["head_dim"])


def exponentials_ms(row: dict, model: dict) -> float:
    """Milliseconds of the exponentials alone, one for each pair and kernel, 16 a cycle."""
    kernels = 1 if row["direction"] == "forward" else 2
    return kernels * pairs(row) / (16 * model["multiprocessors"] * model["clock"]) * 1e3


def written_gb(row: dict) -> float:
    """Of outputs: O, or dQ, dK and dV."""
    tensors = 1 if row["direction"] == "forward" else 3
    numbers = row["batch"] * row["heads"] * row["seq_len"] * row["head_dim"]
    return 2 * tensors * numbers / 1e9


def waves(row: dict, model: dict) -> float:
    """Work tiles for each multiprocessor."""
    tiles = row["batch"] * row["heads"] * row["seq_len"] / TILE
    return tiles / model["multiprocessors"]


def row_blocks(row: dict) -> float:
    """Blocks a row, no smaller than tiles."""
    return row["density"] * row["seq_len"] / max(row["block_size"], TILE)


def rate(row: dict) -> float:
    """Terabytes of device memory a second, measured."""
    return row["measured_gb"] / row["measured_ms"]


def spread(values: Iterable[float], form: str) -> str:
    """The least and the largest, as one where they are the same."""
    low, high = (format(f(found), form) for found in [list(values)] for f in (min, max))
    return low if low == high else f"{low} to {high}"


def listed(values: Iterable[float]) -> str:
    """All of them."""
    return " and ".join(f"{value:.3g}" for value in values)


def extra_squares(row: dict) -> float:
    """Measured less predicted bytes, in N x N numbers of all heads."""
    square = 2 * row["batch"] * row["heads"] * row["seq_len"] ** 2
    return (row["measured_gb"] - row["memory_gb"]) * 1e9 / square


# What is off (bytes or time), in which calls, whether a row is one of them, and why. The first
# that holds for a row is its cause.
Cause = tuple[str, str, Callable[[dict, dict], bool], Callable[[Rows, dict], str]]
CAUSES: tuple[Cause, ...] = (
    (
        "bytes",
        "standard attention",
        lambda row, model: row["implementation"] == "standard",
        lambda rows, model: (
            f"torch moves {spread(map(extra_squares, rows), '.1f')} N² numbers more than "
            "Algorithm 3; in which of its kernels was not counted"
        ),
    ),
    (
        "bytes",
        "small calls",
        lambda row, model: (
            written_gb(row) * 1e9 <= model["l2_bytes"] and deviation(row, "bytes") < 0
        ),
        lambda rows, model: (
            f"outputs, {spread((written_gb(r) / r['memory_gb'] for r in rows), '.0%')} of the "
            "predicted bytes, fit into L2 and are not yet in device memory when the kernel ends"
        ),
    ),
    (
        "bytes",
        "heads whose keys and values exceed L2",
        lambda row, model: 4 * row["seq_len"] * row["head_dim"] > model["l2_bytes"],
        lambda rows, model: (
            "how far CTAs drift apart, and so how often they read a block again, is the same "
            "for all masks in the model"
        ),
    ),
    (
        "time",
        "standard attention",
        lambda row, model: row["implementation"] == "standard",
        lambda rows, model: (
            f"its kernels move {spread(map(rate, rows), '.1f')} TB/s, where a copy moves "
            f"{model['memory_bandwidth'] / 1e12:.1f}; backward they also move more"
        ),
    ),
    (
        "time",
        "heads of 64 dims",
        lambda row, model: row["head_dim"] < 128,
        lambda rows, model: (
            "a tile takes half the products and as many exponentials as at 128 dims, and both "
            f"overlap in part: products alone take {listed(r['predicted_ms'] for r in rows)} ms, "
            "products and exponentials one after the other "
            f"{listed(r['predicted_ms'] + exponentials_ms(r, model) for r in rows)}, measured are "
            f"{listed(r['measured_ms'] for r in rows)}"
        ),
    ),
    (
        "time",
        "few work tiles",
        lambda row, model: waves(row, model) < FEW_WAVES,
        lambda rows, model: (
            f"{spread((waves(r, model) for r in rows), '.1f')} for each multiprocessor do not "
            "fill the device to the end, and a launch takes time: "
            f"{spread((1e3 * (r['measured_ms'] - r['predicted_ms']) for r in rows), '.0f')} µs "
            "more than predicted"
        ),
    ),
    (
        "time",
        "short rows",
        lambda row, model: row_blocks(row) < SHORT_ROW,
        lambda rows, model: (
            f"of {spread(map(row_blocks, rows), '.0f')} blocks; the prologue and the epilogue of "
            "a row, which the model does not have, would take as long as "
            f"{spread((deviation(r, 'time') * row_blocks(r) for r in rows), '.1f')} blocks"
        ),
    ),
    (
        "time",
        "masks that stream from device memory",
        lambda row, model: rate(row) * 1e12 > model["memory_bandwidth"] / 3,
        lambda rows, model: (
            f"{spread(map(rate, rows), '.1f')} TB/s beside the products, where a copy without "
            f"any moves {model['memory_bandwidth'] / 1e12:.1f}: loads come late, and products wait"
        ),
    ),
)


def misses(record: dict) -> str:
    """How many predictions are off, and why, by the rows of the record."""
    rows = [row for row in record["rows"] if row["measured_gb"] and row["measured_ms"]]
    model = record["model"]
    first = sum(abs(r["measured_gb"] / r["memory_gb"] - 1) > OFF["bytes"] for r in rows)
    off = {f: [r for r in rows if abs(deviation(r, f)) > least] for f, least in OFF.items()}
    lines = [
        f"Of {len(rows)} passes, bytes were off by more than {OFF['bytes']:.0%} in {first}, and "
        f"are in {len(off['bytes'])} by the model since; the time is by more than "
        f"{OFF['time']:.0%} in {len(off['time'])}. Why:",
        "",
    ]
    for figure, calls, holds, why in CAUSES:
        own = [row for row in off[figure] if holds(row, model)]
        off[figure] = [row for row in off[figure] if row not in own]
        if own:
            lines.append(f"- {figure} of *{calls}* ({described(own, figure)}): {why(own, model)}.")
    lines += [
        f"- {figure} without a known cause: {row['name']}, {row['seq_len']:,} tokens, "
        f"{row['direction']}, {deviation(row, figure):+.0%}."
        for figure, left in off.items()
        for row in left
    ]
    return "\n".join(
        fill(line, 110, subsequent_indent="  " * line.startswith("- ")) for line in lines
    )


def described(rows: Rows, figure: str) -> str:
    """How many rows of a record, their lengths, and by how much they are off."""
    passes = f"{len(rows)} passes" if len(rows) > 1 else f"{rows[0]['direction']} pass"
    return (
        f"{passes}, {spread((r['seq_len'] for r in rows), ',')} tokens, "
        f"{spread((deviation(r, figure) for r in rows), '+.0%')}"
    )
