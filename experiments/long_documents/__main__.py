"""Classification of long documents: the author of a passage of 512 bytes to 64K, or several
labels of a document, with a pre-trained encoder.

python -m experiments.language_model data classic-books-markdown   # into data/books
python -m experiments.long_documents floors      # linear models of word and byte counts
python -m experiments.long_documents train 4096 --seeds 3 --tokens words
python -m experiments.long_documents train 8192 --tokens words --init-from runs/authors-words/4096
python -m experiments.long_documents record authors-words runs/authors-words
python -m experiments.long_documents tune ecthr ECTHR_FOLDER ROBERTA_FOLDER --tokens 4096
python -m experiments.long_documents record-tuned runs/ecthr/*/seed*
"""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli import (
    RESULTS,
    SHIPPED,
    Output,
    Overwrite,
    RecordName,
    help_of,
    needs_extra,
    output_folder,
    usage_errors,
)
from experiments.long_documents.settings import Settings

app = typer.Typer(add_completion=False, help=help_of(__doc__), rich_markup_mode=None)
LENGTHS = tuple(2**n for n in range(9, 17))
FLOORS = SHIPPED / "long-documents-floors.json"
STEP_BYTES = 2**18  # of a training step, whatever the length is
CONFIG = Path(__file__).with_name("authors.yaml")
Data = Annotated[
    Path,
    typer.Option(
        file_okay=False, help="Folder with books/, written by experiments.language_model data."
    ),
]
Lengths = Annotated[list[int], typer.Option("--length", help="Bytes of a passage; repeatable.")]


@app.command()
def floors(
    data_root: Data = Path("data"),
    lengths: Lengths = list(LENGTHS),  # noqa: B006
    authors: Annotated[int, typer.Option(min=2)] = 50,
    output: Annotated[Path, typer.Option(dir_okay=False, help="The record.")] = RESULTS
    / FLOORS.name,
    overwrite: Overwrite = False,
) -> None:
    """Measure linear models of word and byte counts; the same command resumes."""
    needs_extra("lra", "numba")
    from experiments.long_documents.floors import measure

    output_folder(output.parent, overwrite)
    with usage_errors():
        measure(data_root / "books", lengths, authors, output)
    print(f"wrote {output}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    length: Annotated[int, typer.Argument(help="Bytes of a passage.")],
    data_root: Data = Path("data"),
    tokens: Annotated[str, typer.Option(help="bytes or words.")] = "bytes",
    authors: Annotated[int, typer.Option(min=2)] = 50,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder. Default: runs/authors-TOKENS.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Number of seeds trained at once.")] = 1,
    init_from: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of another length: each seed starts from the best weights of the same "
            "seed there, with repeated positions. Default: random weights.",
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="End the run after this time.")
    ] = None,
) -> None:
    """Train and test several seeds; the same command resumes. Other options are those of
    `python -m experiments.lra fit`, such as --model.encoder.attention."""
    needs_extra("lra", "lightning")
    from experiments.files import write_json
    from experiments.language_model.books import Books
    from experiments.long_documents.authors import (
        DATA,
        Authors,
        by_author,
        check_same_books,
        identity,
        starting_from,
    )
    from experiments.lra import presets
    from experiments.lra import seeds as runs

    with usage_errors():
        Authors(length, authors, tokens)  # pyright: ignore[reportArgumentType]
        books = Books.read(data_root / "books")
        chosen = by_author(books, authors)
    folder = (output or Path(f"runs/authors-{tokens}")) / str(length)
    data = identity(books, chosen)
    with usage_errors():
        check_same_books(folder, data)
        starts = [] if init_from is None else starting_from(init_from, data, seeds, folder)
    write_json(folder / DATA, data)
    given = [f"--config={path}" for path in (presets.FOLDER / presets.COMMON, CONFIG)]
    given += [f"--data.data_root={data_root}", f"--data.batch_size={max(1, STEP_BYTES // length)}"]
    task = {"length": length, "authors": authors, "tokens": tokens}
    given += [f"--data.task.init_args.{name}={value}" for name, value in task.items()]
    given += [*starts, *context.args]
    runs.main(given, seeds=seeds, output=folder, at_once=at_once, seconds=seconds)


@app.command()
def record(
    name: RecordName,
    runs: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of `train`.")],
    floors: Annotated[Path, typer.Option(exists=True, dir_okay=False)] = FLOORS,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Gather the seeds of all lengths and the floors into a record with a picture."""
    from experiments.long_documents.results import gather, table_of
    from experiments.report import wide_console

    with usage_errors():
        facts, paths = gather(name, runs, floors, output_folder(output, overwrite))
    wide_console().print(table_of(facts))
    print(f"wrote {paths[0]} and {paths[1]}")


@app.command()
def tune(
    source: Annotated[str, typer.Argument(help="ecthr or mimic.")],
    data: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of the data.")
    ],
    encoder: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="Folder of an encoder of transformers."),
    ],
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a document that are read.")] = 512,
    attention: Annotated[str, typer.Option(help="eager, sdpa, ours, or a pattern.")] = (
        Settings.attention
    ),
    steps: Annotated[int, typer.Option(min=1)] = Settings.steps,
    batch_size: Annotated[int, typer.Option(min=1, help="Documents of a step.")] = (
        Settings.batch_size
    ),
    every: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = Settings.every,
    learning_rate: float = Settings.learning_rate,
    warmup_steps: Annotated[
        int,
        typer.Option(min=0, help="Steps until the learning rate is reached, at most --steps."),
    ] = Settings.warmup_steps,
    seed: Annotated[int, typer.Option(min=0)] = Settings.seed,
    output: Annotated[Path, typer.Option(file_okay=False)] = Path("runs"),
    seconds: Annotated[
        float | None, typer.Option(min=1, help="End the run after this time.")
    ] = None,
) -> None:
    """Fine-tune a pre-trained encoder on documents with several labels, in the folder
    OUTPUT/SOURCE/TOKENS/seedN; the same command resumes a run that --seconds or Ctrl-C stopped."""
    needs_extra("hf", "transformers")
    from experiments.long_documents.labelled import SOURCES
    from experiments.long_documents.pretrained import Run

    if source not in SOURCES:
        raise typer.BadParameter(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    with usage_errors():
        settings = Settings(
            str(encoder),
            tokens,
            attention,
            steps,
            batch_size,
            every,
            learning_rate,
            warmup_steps,
            seed,
        )
        folder = output / source / str(tokens) / f"seed{seed}"
        result = Run(settings, SOURCES[source](data), folder).train(seconds)
    if result is None:
        print("the time is over; the same command resumes")
        raise typer.Exit(1)
    print(f"{tokens:,} tokens, seed {seed}: micro F1 {100 * result['micro_f1']:.1f} %")


@app.command()
def record_tuned(
    runs: Annotated[
        list[Path], typer.Argument(exists=True, file_okay=False, help="Folders of `tune`.")
    ],
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Gather seeds and lengths of one data set into a record."""
    from experiments.files import record_path, write_json
    from experiments.long_documents.pretrained import gather

    with usage_errors():
        facts = gather(runs)
    folder = output_folder(output, overwrite)
    path = record_path(folder, f"long-documents-{facts['name']}", facts["device"])
    write_json(path, facts)
    for tokens, group in facts["lengths"].items():
        print(
            f"{int(tokens):,} tokens, {len(group['runs'])} runs: {100 * group['micro_f1']:.1f} %"
        )
    print(f"wrote {path}")


if __name__ == "__main__":
    app()
