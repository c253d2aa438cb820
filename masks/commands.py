"""The commands of `python -m masks` that analyse patterns.

What needs torch is imported by a command that runs: `--help` takes no seconds.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bar
from rich.table import Table
from typer.core import TyperGroup

if TYPE_CHECKING:
    from masks.analysis import PixelReach, ReceptiveField
    from masks.block_mask import BlockMask
    from masks.progress import Progress

DEFAULT = "draw"  # the command of a line that begins with a pattern

PatternText = Annotated[
    str,
    typer.Argument(
        help='Such as "butterfly", "local(256) & causal()" or "my_patterns.py:name".',
    ),
]
SeqLen = Annotated[str, typer.Option(help="Length in tokens, or QUERIES,KEYS.")]
BlockSize = Annotated[
    str, typer.Option(help="Side of a block in tokens (16, 32, ... 512), or QUERIES,KEYS.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class DrawByDefault(TyperGroup):
    """Commands, of which `draw` may be left out: python -m masks "local(256)"."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        known = {*self.commands, *ctx.help_option_names}
        args = args or ["--help"]
        for arg in args:
            if _surrogates(arg):
                raise typer.BadParameter(f"names must be UTF-8, got {arg!r}")
        return super().parse_args(ctx, args if args[0] in known else [DEFAULT, *args])


def _surrogates(text: str) -> bool:
    """Whether a text has bytes of a file name that are not UTF-8; these cannot be printed."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def read_size(option: str, text: str) -> int | tuple[int, int]:
    """One number for queries and keys, or one for each."""
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})?", text):
        raise typer.BadParameter(f"{option} must be NUMBER or QUERIES,KEYS, got {text!r}")
    first, *second = map(int, text.split(","))
    return (first, second[0]) if second else first


def read_sides(option: str, text: str) -> tuple[int, int]:
    """HEIGHT,WIDTH, or one number for both."""
    size = read_size(option, text)
    return (size, size) if isinstance(size, int) else size


def build(pattern: str, seq_len: str, block_size: str) -> "BlockMask":
    """The mask of options as they were given; what is wrong with them is a usage error."""
    from masks._parse import parse

    sizes = read_size("--seq-len", seq_len), read_size("--block-size", block_size)
    with usage_errors():
        return parse(pattern)(*sizes)


@contextmanager
def usage_errors(
    option: str = "", kinds: tuple[type[Exception], ...] = (OSError, TypeError, ValueError)
) -> Iterator[None]:
    """Errors about arguments and files, or about one option, as errors of the command line."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(f"{option}: {error}" if option else str(error)) from error


@contextmanager
def progress_bar(label: str) -> Iterator["Progress"]:
    """A bar on the terminal's standard error, and what moves it."""
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def reach(
    patterns: Annotated[
        list[str], typer.Argument(help="Pattern of each layer, cyclically repeated.")
    ],
    seq_len: SeqLen = "4096",
    block_size: BlockSize = "128",
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 32,
    samples: Annotated[
        int | None,
        typer.Option(min=2, help="Number of random keys. Default: all if memory allows."),
    ] = None,
    token: Annotated[
        list[int] | None,
        typer.Option(help="Also print the receptive field of this token; repeatable."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="HEIGHT,WIDTH: also follow the middle pixel of an image.")
    ] = None,
    tile: Annotated[
        str | None, typer.Option(help="HEIGHT,WIDTH: pixels are ordered by tiles, not by rows.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the receptive field over layers: connected pairs, hops, unreached tokens."""
    from masks.analysis import pixel_reach, receptive_field, spectral_gap

    stack = [build(pattern, seq_len, block_size) for pattern in patterns]
    given = stack[0] if len(stack) == 1 else stack
    with usage_errors(), progress_bar("following tokens") as progress:
        field = receptive_field(given, layers, samples=samples, progress=progress)
        views = views_of(given, token, layers) if token else []
        gaps = [spectral_gap(mask) for mask in dict.fromkeys(stack)]
        pixels = None
        if image is not None:
            sides = None if tile is None else read_sides("--tile", tile)
            pixels = pixel_reach(given, read_sides("--image", image), field.layers, tile=sides)
    if as_json:
        found = asdict(field) | {"spectral_gap": gaps, "tokens": views}
        print(json.dumps(found | {"pixels": None if pixels is None else asdict(pixels)}))
        return
    console = Console()
    console.print(_layer_table(field, pixels))
    console.print(_summary(field, gaps))
    for view in views:
        console.print(f"token {view['token']} sees {view['seen']} tokens after each layer")


def lint(
    patterns: Annotated[list[str], typer.Argument(help="Pattern of each layer.")],
    seq_len: SeqLen = "4096",
    block_size: BlockSize = "128",
    within: Annotated[
        str | None, typer.Option(help='A pattern that must contain them, such as "causal()".')
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers of the model, to find tokens that stay unconnected."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Name of a rule to leave out; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find likely defects of patterns; exit with status 1 if there are any."""
    from masks._parse import optional_pattern
    from masks.lint import lint as find

    with usage_errors():
        stack = [build(pattern, seq_len, block_size) for pattern in patterns]
        findings = find(
            stack[0] if len(stack) == 1 else stack,
            within=optional_pattern(within),
            layers=layers,
            ignore=ignore or (),
        )
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        print("\n".join(map(str, findings)) or "nothing found")
    raise typer.Exit(bool(findings))


def gallery(
    module: Annotated[
        list[Path] | None, typer.Option(help="A Python file with patterns to show; repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder to write.")] = Path(
        "gallery"
    ),
    seq_len: Annotated[
        str, typer.Option(help="Length in tokens for patterns from --module.")
    ] = "4096",
    block_size: BlockSize = "128",
    only: Annotated[bool, typer.Option("--only", help="Leave out the built-in patterns.")] = False,
    as_json: Json = False,
) -> None:
    """Write an HTML page with the built-in patterns and those of your own files."""
    from masks.gallery import ENTRIES, of_module, sections, write

    sizes = read_size("--seq-len", seq_len), read_size("--block-size", block_size)
    shown = []
    with usage_errors(), progress_bar("drawing patterns") as progress:
        own = [entry for path in module or () for entry in of_module(path, *sizes)]
        entries = own if only else [*own, *ENTRIES]
        for section in sections(entries):
            shown.append(section)
            progress(len(shown), len(entries))
    with usage_errors("--output"):
        written = write(output, shown)
    if not as_json:
        print(f"wrote {written}")
        return
    patterns = [
        {
            "title": section.entry.title,
            "pattern": str(section.entry.pattern),
            "pictures": [f"{section.entry.file_name}.{suffix}" for suffix in section.pictures],
            "figures": section.figures,
        }
        for section in shown
    ]
    print(json.dumps({"page": str(written), "patterns": patterns}))


def diff(
    a: PatternText,
    b: PatternText,
    seq_len: SeqLen = "4096",
    block_size: BlockSize = "128",
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Picture to write (PNG or SVG).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two patterns: common pairs, pairs of one alone, and their figures."""
    from masks.gallery import difference

    if output is not None and output.suffix not in (".png", ".svg"):
        raise typer.BadParameter(f"--output must end in .png or .svg, got {output}")
    with usage_errors(), progress_bar("comparing patterns"):
        masks = build(a, seq_len, block_size), build(b, seq_len, block_size)
        found = difference(*masks, names=(a, b))
    if output is not None:
        with usage_errors("--output"):
            output.write_bytes(found.pictures[output.suffix[1:]])
    counts = {"both": found.both, "only_a": found.only_a, "only_b": found.only_b}
    if as_json:
        print(json.dumps(counts | {"figures": found.figures}))
        return
    table = Table("", escape(a), escape(b), box=None)
    for name, (of_a, of_b) in found.figures.items():
        table.add_row(name, of_a, of_b)
    table.add_row("common pairs", *[f"{found.both:,}"] * 2)
    table.add_row("pairs of this pattern only", f"{found.only_a:,}", f"{found.only_b:,}")
    Console().print(table)
    if output is not None:
        print(f"wrote {output}")


def views_of(
    masks: "BlockMask | Sequence[BlockMask]", tokens: Sequence[int], layers: int
) -> list[dict]:
    """For each token how many tokens it sees after 1, 2, ... layers, itself included."""
    from masks.analysis import hops

    return [
        {
            "token": token,
            "seen": [int(((row >= 0) & (row <= n)).sum()) for n in range(1, row.max() + 1)],
        }
        for token, row in zip(tokens, hops(masks, tokens, layers), strict=True)
    ]


def _layer_table(field: "ReceptiveField", pixels: "PixelReach | None") -> Table:
    table = Table(box=None)
    pairs = "causal pairs" if field.causal else "pairs"
    for column in ("layers", f"share of {pairs} connected", "new pairs"):
        table.add_column(column, justify="right")
    if pixels is not None:
        for column in ("up", "down", "left", "right", "radius (pixels)"):
            table.add_column(column, justify="right")
    for i, (share, (low, high)) in enumerate(zip(field.share, field.interval, strict=True)):
        shown = f"{share:.4%}" if field.exact else f"{share:.2%} ({low:.2%} to {high:.2%})"
        row = [str(i + 1), shown, "yes" if field.added[i] else "none"]
        if pixels is not None:
            sides = (pixels.up, pixels.down, pixels.left, pixels.right, pixels.radius)
            row += [str(side[i]) for side in sides]
        table.add_row(*row)
    return table


def _summary(field: "ReceptiveField", gaps: list[float | None]) -> Table:
    table = Table(show_header=False, box=None)
    keys = "all tokens" if field.exact else f"{field.followed} random keys, 95 % interval"
    connected = "not within these layers" if field.full_after is None else str(field.full_after)
    mean = "-" if field.mean_path is None else f"{field.mean_path:.2f} mean"
    rows = {
        "followed": keys,
        "layers until all pairs are connected": connected,
        "hops": f"{mean}, {field.longest_path} max",
        "tokens that no other attends": f"{field.unreached:,}",
        "tokens that attend no other": f"{field.blind:,}",
        "spectral gap": ", ".join("none" if gap is None else f"{gap:.4g}" for gap in gaps),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
