"""Writes the tables of docs/paper.md: figures of the FlashAttention paper and of our records.

    python docs/paper.py

A table is between `<!-- name -->` and `<!-- /name -->`. In place of a table without a record, the
page names the command that makes one. Of the records of several GPUs the latest is shown, of
training steps and language models the record of each GPU. With `--check` nothing is written: the
command prints whether the page is current.
"""

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # as a script, and where docs is no package

from documents import EXPECTED, TUNED, authors, tuned  # noqa: E402
from language_models import LANGUAGE_MODELS, briefly, language_model, long_step  # noqa: E402
from lengths import KINDS, landscapes, parts_of_standard  # noqa: E402
from pretraining_steps import pretraining  # noqa: E402
from published import published_landscape  # noqa: E402
from records import newest, paragraphs  # noqa: E402

from experiments.markdown import table, update, written  # noqa: E402

PAGE, README = ROOT / "docs/paper.md", ROOT / "README.md"
THEORY = "[performance](performance.md#theory-and-measurement)"
ARENA = "[Long Range Arena](../experiments/lra/README.md)"
PRETRAINING = ("pretraining", "pretraining-padding")
LANDSCAPE = "python -m experiments.bench landscape"


def or_command(ours: str, command: str) -> str:
    """Our tables, or the command that makes the record."""
    return ours or f"*Not measured yet. `{command}` makes the record.*"


def overview() -> str:
    """The subject of each table and figure, and whether there is a record."""
    rows = []
    for name, asks, page, records in (
        ("Figure 1", "time of the parts of standard attention", "below", ("bench-landscape",)),
        ("Figure 2", "memory traffic, block size, density", THEORY, ("io-complexity",)),
        ("Figure 3", "time and memory over lengths", "below", KINDS),
        ("Tables 1, 2", "training BERT-large and GPT-2", "below", PRETRAINING),
        ("Tables 3, 6", "Long Range Arena, Path-X", ARENA, ("lra-arena", "lra-path-x-labels")),
        ("Table 4", "language models with longer contexts", "below", LANGUAGE_MODELS),
        ("Table 5", "classification of long documents", "below", (*EXPECTED, *TUNED)),
    ):
        found = sum(newest(each) is not None for each in records)
        rows.append([name, asks, page, f"{found} of {len(records)}"])
    return table(["in the paper", "subject", "our results", "records"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "overview": overview,
    "parts": lambda: or_command(parts_of_standard("bench-landscape"), LANDSCAPE),
    "published": published_landscape,
    "landscape": lambda: or_command(landscapes(), LANDSCAPE),
    "pretraining": lambda: or_command(
        pretraining(*PRETRAINING), "python -m experiments.pretraining measure gpt2"
    ),
    "language-models": lambda: or_command(
        paragraphs([*map(language_model, LANGUAGE_MODELS), long_step()]), "contexts.sh"
    ),
    "authors": authors,
    "tuned": lambda: or_command(tuned(), "python -m experiments.long_documents tune"),
}


def main() -> int:
    sentence = {"language-model": briefly}
    pages = {
        PAGE: written(PAGE.read_text(), TABLES),
        README: written(README.read_text(), sentence, between=""),
    }
    return update(pages, check="--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
