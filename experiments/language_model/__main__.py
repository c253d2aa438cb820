"""A language model of books, with dense or block-sparse causal attention.

    python -m experiments.language_model data classic-books-markdown --output data/books
    python -m experiments.language_model tokenize --vocabulary 16384  # default: bytes
    python -m experiments.language_model train 25m-16k --output runs/dense
    python -m experiments.language_model train 25m-16k --output runs/sparse \\
        --attention "local(512); butterfly() | global_tokens(128)"
    python -m experiments.language_model sample runs/sparse --prompt "It was"
    python -m experiments.language_model record contexts runs/dense runs/sparse
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli import (
    RESULTS,
    ExportTo,
    ImportFrom,
    Output,
    Overwrite,
    RecordName,
    building,
    check_known,
    help_of,
    needs_extra,
    output_folder,
    usage_errors,
)
from experiments.language_model.presets import PRESETS
from experiments.language_model.settings import EVERY, ModelConfig, Settings

app = typer.Typer(add_completion=False, help=help_of(__doc__), rich_markup_mode=None)
DATA = Path("data/books")
Folder = Annotated[Path, typer.Option(file_okay=False, help="Folder of the run.")]


@app.command()
def data(
    source: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of books.")],
    output: Annotated[Path, typer.Option(file_okay=False)] = DATA,
    most_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest size; whole authors are taken, those with the most books first."
        ),
    ] = None,
) -> None:
    """Build the data set from the .md and .txt files of a folder. A file is a book, and its folder
    is the author. Books that are contained in longer ones are left out; books.json lists all."""
    from experiments.language_model.books import build

    with building(output.parent, output.name) as draft, usage_errors():
        facts = build(source, draft, most_bytes)
    for split, size in facts["bytes"].items():
        number = sum(book["split"] == split for book in facts["books"].values())
        print(f"{split}: {number:,} books, {size:,} bytes, SHA-256 {facts['sha256'][split]}")
    for path, share in facts["left_out"].items():
        print(f"left out, because longer books contain {100 * share:.0f} % of it: {path}")


@app.command()
def tokenize(
    data: Annotated[Path, typer.Option(file_okay=False, help="Folder that `data` wrote.")] = DATA,
    output: Annotated[Path, typer.Option(file_okay=False)] = Path("data/books-tokens"),
    vocabulary: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 16_384,
) -> None:
    """Train a tokenizer on the training split, and write the books as its tokens."""
    needs_extra("hf", "tokenizers")
    from experiments.language_model.tokens import encode

    with building(output.parent, output.name) as draft, usage_errors():
        facts = encode(data, draft, vocabulary)
    for split, size in facts["bytes"].items():
        tokens = facts["tokens"][split]
        print(f"{split}: {tokens:,} tokens of {size / tokens:.2f} bytes")


@app.command()
def train(
    preset: Annotated[str, typer.Argument(help=f"Size and context: {', '.join(PRESETS)}.")],
    output: Folder,
    data: Annotated[Path, typer.Option(file_okay=False, help="Folder that `data` wrote.")] = DATA,
    attention: Annotated[
        list[str],
        typer.Option(help="flash, sdpa, or patterns of heads, separated by ;. Repeat for layers."),
    ] = [*ModelConfig.attention],  # noqa: B006
    positions: Annotated[str, typer.Option(help="rotary or learned.")] = ModelConfig.positions,
    block_size: Annotated[int, typer.Option(min=16, max=512)] = ModelConfig.block_size,
    dropout: Annotated[float, typer.Option(min=0, max=0.9)] = ModelConfig.dropout,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run.")] = Settings.steps,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = (
        Settings.step_tokens
    ),
    learning_rate: Annotated[float | None, typer.Option(help="Default: of the preset.")] = None,
    warmup_steps: Annotated[
        int,
        typer.Option(min=0, help="Steps until the learning rate is reached, at most --steps."),
    ] = Settings.warmup_steps,
    short_context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence in the first steps.")
    ] = Settings.short_context,
    short_steps: Annotated[int, typer.Option(min=0, help="Number of these steps.")] = (
        Settings.short_steps
    ),
    precision: Annotated[
        str, typer.Option(help="Precision of Lightning: 32-true, ...")
    ] = Settings.precision,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = (
        Settings.compiled
    ),
    seed: Annotated[int, typer.Option(min=0)] = Settings.seed,
    every: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = EVERY,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="End the run after this time.")
    ] = None,
    export_to: ExportTo = None,
    resume: ImportFrom = None,
) -> None:
    """Train a model; the same command resumes an interrupted run."""
    check_known("preset", [preset], PRESETS)
    if positions not in ("rotary", "learned"):
        raise typer.BadParameter(f"--positions must be rotary or learned, got {positions!r}")
    needs_extra("lra", "lightning")
    from shutil import copyfile

    import torch

    from experiments.language_model import training
    from experiments.language_model.books import Books
    from experiments.language_model.tokens import TOKENIZER

    torch.set_float32_matmul_precision("high")
    chosen = PRESETS[preset]
    sizes = (chosen.layers, chosen.dim, chosen.heads, chosen.context)
    with usage_errors():
        books = Books.read(data)
        settings = Settings(
            model=ModelConfig(
                *sizes, tuple(attention), positions, block_size, dropout, len(books.token_bytes)
            ),
            steps=steps,
            step_tokens=step_tokens,
            learning_rate=chosen.learning_rate if learning_rate is None else learning_rate,
            warmup_steps=warmup_steps,
            seed=seed,
            data=dict(books.sha256),
            precision=precision,
            compiled=compiled,
            short_context=short_context,
            short_steps=short_steps,
        )
        result = training.train(settings, books, output, seconds, every, export_to, resume)
        if (data / TOKENIZER).exists():
            copyfile(data / TOKENIZER, output / TOKENIZER)  # `sample` reads it
    speed = f", {result['bytes_per_second']:,.0f} bytes/s" if result["bytes_per_second"] else ""
    loss = f"{result['bits_per_byte']:.4f} bits per byte"
    print(f"step {result['trained']:,} of {steps:,}: {loss}{speed}")


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a run.")],
    prompt: str = "",
    attention: Annotated[
        list[str], typer.Option(help="As in `train`; needed if it names Python files.")
    ] = [],  # noqa: B006
    length: Annotated[int, typer.Option(min=1, help="Largest number of tokens.")] = 500,
    temperature: Annotated[float, typer.Option(min=0)] = 0.8,
    seed: int = 0,
) -> None:
    """Print text that a trained model generates after a prompt."""
    needs_extra("lra", "lightning")
    from itertools import islice

    import torch

    from experiments.language_model.model import generate
    from experiments.language_model.tokens import Reader
    from experiments.language_model.training import CHECKPOINT, load

    with usage_errors():
        model = load(folder / CHECKPOINT, attention)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        reader = Reader(folder)
        text = prompt.encode()  # written with the first token, so not if it is refused
        for token in islice(generate(model, reader.tokens(prompt), temperature, seed), length):
            sys.stdout.buffer.write(text + reader.text(token))
            sys.stdout.buffer.flush()
            text = b""
    print()


@app.command()
def record(
    name: RecordName,
    runs: Annotated[
        list[Path],
        typer.Argument(exists=True, help="Folders of runs, and records, whose runs are added."),
    ],
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Gather runs into a record with a picture, and compare them with the first run. Runs that
    differ in the seed alone are compared by their mean."""
    import json

    from experiments.language_model.results import gather, table_of
    from experiments.report import wide_console

    with usage_errors():
        paths = gather(name, runs, output_folder(output, overwrite))
    wide_console().print(table_of(json.loads(paths[0].read_text())))
    print(f"wrote {paths[0]} and {paths[1]}")


if __name__ == "__main__":
    app()
