"""Loaders of ECtHR and MIMIC-III, on tiny files in their formats."""

import csv
import gzip
import json

import pytest

from experiments.long_documents.labelled import ALLEGED, ARTICLES, Document, read_ecthr, read_mimic

CASES = {
    "train": [(["One.", "Two."], ["3", "P1-1", "46"]), (["Three."], [])],
    "dev": [(["Four."], ["6"])],
    "test": [(["Five."], ["14", "3"])],
}


def case(facts, articles, **more):
    return json.dumps({"facts": facts, ALLEGED: articles, "violated_articles": []} | more) + "\n"


def write_ecthr(folder, cases=CASES):
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in cases.items():
        (folder / f"{name}.jsonl").write_text("".join(case(*each) for each in own))
    return folder


def test_cases_of_one_file_and_of_three_are_the_same(tmp_path):
    three = read_ecthr(write_ecthr(tmp_path / "three"))
    (tmp_path / "one").mkdir()
    lines = [case(*each, data_type=name) for name, own in CASES.items() for each in own]
    (tmp_path / "one/ecthr.jsonl").write_text("".join(reversed(lines)))
    one = read_ecthr(tmp_path / "one")
    assert three.splits["train"][0] == Document("One.\nTwo.", (1, 9))
    assert [ARTICLES[n] for n in three.splits["test"][0].labels] == ["3", "14"]
    assert three.splits["train"][1].labels == ()
    assert [*reversed(one.splits["train"])] == three.splits["train"]
    assert one.sha256 != three.sha256
    assert three.sha256 == read_ecthr(tmp_path / "three").sha256


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"dev\.jsonl, line 1 is not valid JSON"),
        ("[]", r"dev\.jsonl, line 1 must be an object, got list"),
        ('{"facts": "text"}', r"line 1: facts must be a list of texts, got 'text'"),
        ('{"facts": ["text"]}', r"line 1: allegedly_violated_articles must be a list"),
        ("", "ecthr must have documents in validation, got none"),
    ],
)
def test_other_lines_are_refused(line, message, tmp_path):
    folder = write_ecthr(tmp_path)
    (folder / "dev.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_ecthr(folder)


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"train\.jsonl is missing: unpack ecthr\.jsonl"):
        read_ecthr(tmp_path)
    with pytest.raises(ValueError, match=r"train_50_hadm_ids\.csv is missing.*caml-mimic"):
        read_mimic(tmp_path)
    (tmp_path / "ecthr.jsonl").write_text(case(["x"], [], data_type="val"))
    with pytest.raises(ValueError, match=r"data_type must be one of .*'dev'.*got 'val'"):
        read_ecthr(tmp_path)


NOTES = [
    ("100", "Discharge summary", "", 'He said "fine",\nand left.'),
    ("100", "Nursing", "", "not this"),
    ("101", "Discharge summary", "", "second"),
    ("100", "Discharge summary", "", "addendum"),
    ("102", "Discharge summary", "1", "an error"),
    ("102", "Discharge summary", "", "third"),
    ("103", "Discharge summary", "", "of no list"),
]


def write_table(path, head, rows, opened=open):
    with opened(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)


def write_mimic(folder):
    folder.mkdir(exist_ok=True)
    write_table(
        folder / "NOTEEVENTS.csv.gz",
        ["ROW_ID", "HADM_ID", "CATEGORY", "ISERROR", "TEXT"],
        [(n, *note) for n, note in enumerate(NOTES)],
        gzip.open,
    )
    diagnoses = [("100", "4019"), ("101", "4019"), ("103", "4019"), ("102", "0331"), ("999", "x")]
    write_table(folder / "DIAGNOSES_ICD.csv", ["hadm_id", "icd9_code"], [*diagnoses, ("100", "")])
    write_table(folder / "PROCEDURES_ICD.csv", ["HADM_ID", "ICD9_CODE"], [("100", "0331")])
    for name, admissions in (("train", "100\n103\n"), ("dev", "101\n"), ("test", "102\n")):
        (folder / f"{name}_50_hadm_ids.csv").write_text(admissions)
    return folder


def test_summaries_have_the_codes_of_their_admission(tmp_path):
    found = read_mimic(write_mimic(tmp_path))
    assert found.labels == ("D4019", "D0331", "P0331")
    first, other = found.splits["train"]
    assert first == Document('He said "fine",\nand left.\naddendum', (0, 2))
    assert other == Document("of no list", (0,))
    assert found.splits["validation"] == [Document("second", (0,))]
    assert found.splits["test"] == [Document("third", (1,))]


def test_tables_of_another_form_are_refused(tmp_path):
    folder = write_mimic(tmp_path)
    (folder / "test_50_hadm_ids.csv").write_text("104\n")
    with pytest.raises(ValueError, match=r"test_50_hadm_ids\.csv: admission 104 has no discharge"):
        read_mimic(folder)
    (folder / "PROCEDURES_ICD.csv").write_text("HADM_ID,ICD9_CODE\n1\n")
    with pytest.raises(ValueError, match=r"PROCEDURES_ICD.*line 2: must have 2 columns, got 1"):
        read_mimic(folder)
    (folder / "PROCEDURES_ICD.csv").write_text("HADM_ID,CODE\n")
    with pytest.raises(ValueError, match=r"PROCEDURES_ICD.*must have the columns \['ICD9_CODE'\]"):
        read_mimic(folder)
    (folder / "PROCEDURES_ICD.csv").unlink()
    with pytest.raises(ValueError, match=r"PROCEDURES_ICD\.csv is missing: part of MIMIC-III"):
        read_mimic(folder)
