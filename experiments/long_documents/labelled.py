"""Long documents with several labels each, read from the files of the published datasets.

ECtHR is public: https://archive.org/details/ECtHR-NAACL2021, or the ecthr.tar.gz of LexGLUE.
MIMIC-III is available on request at https://physionet.org. Nothing is downloaded here.
"""

import csv
import gzip
import hashlib
import io
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import rich.progress

from experiments.lra.tasks import SPLITS

# The articles of the Convention that are labels in LexGLUE.
ARTICLES = ("2", "3", "5", "6", "8", "9", "10", "11", "14", "P1-1")
ALLEGED = "allegedly_violated_articles"
FILES = dict(
    zip(SPLITS, ("train", "dev", "test"), strict=True)
)  # names of the splits in both sources
LEXGLUE = "ecthr.jsonl"
SUMMARY = "Discharge summary"
CODES = 50  # number of the most frequent codes, which are the labels
LONGEST_NOTE = 2**24  # letters
LISTS = "of github.com/jamesmullenbach/caml-mimic, folder mimicdata/mimic3"
PHYSIONET = "part of MIMIC-III, https://physionet.org/content/mimiciii"
ARCHIVE = f"unpack {LEXGLUE} of LexGLUE, or ECtHR-NAACL2021 of archive.org"


class Document(NamedTuple):
    """A document: its text, and its labels as indices of Labelled.labels."""

    text: str
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Labelled:
    """The documents of a data set.

    Attributes:
        name: One of SOURCES.
        labels: Names of the labels.
        splits: Documents of the train, validation and test splits.
    """

    name: str
    labels: tuple[str, ...]
    splits: Mapping[str, list[Document]]

    def __post_init__(self):
        for split in SPLITS:
            if not self.splits[split]:
                raise ValueError(f"{self.name} must have documents in {split}, got none")

    @property
    def sha256(self) -> str:
        """SHA-256 of all texts and labels, in order."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for text, labels in self.splits[split]:
                digest.update(json.dumps([split, text, labels]).encode())
        return digest.hexdigest()


def read_ecthr(folder: Path) -> Labelled:
    """Cases of the European Court of Human Rights, and the articles whose violation was alleged.

    Args:
        folder: Folder with ecthr.jsonl of LexGLUE, whose lines have their split in `data_type`; or
            with train.jsonl, dev.jsonl and test.jsonl. A line has `facts` (paragraphs) and
            `allegedly_violated_articles`.

    Raises:
        ValueError: The files are missing, or a line has another form; the message names it.

    Reference:
        Chalkidis et al. 2021, Paragraph-level rationale extraction through regularization.
    """
    splits: dict[str, list[Document]] = {split: [] for split in SPLITS}
    whole = folder / LEXGLUE
    if whole.exists():
        of_file = {name: split for split, name in FILES.items()}
        for where, case in _lines(whole):
            if (name := case.get("data_type")) not in of_file:
                raise ValueError(f"{where}: data_type must be one of {[*of_file]}, got {name!r}")
            splits[of_file[name]].append(_case(where, case))
        return Labelled("ecthr", ARTICLES, splits)
    for split, name in FILES.items():
        path = folder / f"{name}.jsonl"
        if not path.exists():
            raise ValueError(f"{path} is missing: {ARCHIVE}")
        splits[split] = [_case(where, case) for where, case in _lines(path)]
    return Labelled("ecthr", ARTICLES, splits)


def _lines(path: Path) -> Iterator[tuple[str, dict]]:
    """The objects of a file of JSON lines, each with its file and line for messages."""
    with rich.progress.open(
        path, "r", encoding="utf-8", description=path.name, transient=True
    ) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                case = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not valid JSON: {error}") from error
            if not isinstance(case, dict):
                raise ValueError(f"{where} must be an object, got {type(case).__name__}")
            yield where, case


def _case(where: str, case: dict) -> Document:
    for name in ("facts", ALLEGED):
        found = case.get(name)
        if not isinstance(found, list) or not all(isinstance(part, str) for part in found):
            raise ValueError(f"{where}: {name} must be a list of texts, got {found!r:.80}")
    labels = sorted(ARTICLES.index(name) for name in {*case[ALLEGED]} & {*ARTICLES})
    return Document("\n".join(case["facts"]), tuple(labels))


def read_mimic(folder: Path) -> Labelled:
    """Discharge summaries of MIMIC-III, and the 50 most frequent diagnoses and procedures.

    The text of an admission consists of its summaries and their addenda, in the order of the file.

    Args:
        folder: Folder with NOTEEVENTS, DIAGNOSES_ICD and PROCEDURES_ICD of MIMIC-III, as .csv or
            .csv.gz, and train_50_hadm_ids.csv, dev_50_hadm_ids.csv and test_50_hadm_ids.csv, with
            an admission in each line.

    Raises:
        ValueError: A file or a column is missing, or an admission has no summary; the message
            names it.

    Reference:
        Mullenbach et al. 2018, Explainable prediction of medical codes from clinical text.
    """
    lists = {split: folder / f"{name}_50_hadm_ids.csv" for split, name in FILES.items()}
    for path in lists.values():
        if not path.exists():
            raise ValueError(f"{path} is missing: {LISTS}")
    texts: dict[str, list[str]] = defaultdict(list)
    columns = ("HADM_ID", "CATEGORY", "ISERROR", "TEXT")
    for admission, category, wrong, text in _rows(folder, "NOTEEVENTS", columns):
        if category == SUMMARY and wrong != "1":
            texts[admission].append(text)
    codes: dict[str, set[str]] = defaultdict(set)
    for table in ("DIAGNOSES_ICD", "PROCEDURES_ICD"):
        for admission, code in _rows(folder, table, ("HADM_ID", "ICD9_CODE")):
            if code and admission in texts:
                codes[admission].add(
                    f"{table[0]}{code}"
                )  # a code such as 0331 may be a diagnosis or a procedure
    often = Counter(code for own in codes.values() for code in own)
    names = sorted(often, key=lambda code: (-often[code], code))[:CODES]
    splits = {}
    for split, path in lists.items():
        admissions = path.read_text().split()
        if lost := [admission for admission in admissions if admission not in texts]:
            raise ValueError(f"{path}: admission {lost[0]} has no discharge summary in {folder}")
        splits[split] = [
            Document(
                "\n".join(texts[admission]),
                tuple(n for n, code in enumerate(names) if code in codes[admission]),
            )
            for admission in admissions
        ]
    return Labelled("mimic", tuple(names), splits)


def _rows(folder: Path, name: str, columns: tuple[str, ...]) -> Iterator[list[str]]:
    """Yields the given columns of each row of a table; names are compared without case."""
    with _table(folder, name) as file:
        rows = csv.reader(file)
        head = [column.upper() for column in next(rows, [])]
        if missing := [column for column in columns if column not in head]:
            raise ValueError(f"{name} of {folder} must have the columns {missing}, got {head}")
        places = [head.index(column) for column in columns]
        for row in rows:
            if len(row) != len(head):
                raise ValueError(
                    f"{name} of {folder}, line {rows.line_num}: must have {len(head)} columns, "
                    f"got {len(row)}"
                )
            yield [row[place] for place in places]


@contextmanager
def _table(folder: Path, name: str) -> Iterator[IO[str]]:
    csv.field_size_limit(LONGEST_NOTE)
    for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz"):
        if path.exists():
            with rich.progress.open(path, "rb", description=path.name, transient=True) as raw:
                content = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
                yield io.TextIOWrapper(content, encoding="utf-8", newline="")
            return
    raise ValueError(f"{folder / name}.csv is missing: {PHYSIONET}")


SOURCES: dict[str, Callable[[Path], Labelled]] = {"ecthr": read_ecthr, "mimic": read_mimic}
