import json
from pathlib import Path

import pytest

from experiments.files import read_json, read_object, write_json


def test_folders_are_made_and_no_draft_is_left(tmp_path):
    path = tmp_path / "new" / "folder" / "a.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_what_was_there_stays_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, "before")
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, object())

    def interrupted(draft, text):
        draft.write_bytes(text[:3].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, "after")
    assert json.loads(path.read_text()) == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "value", [{}, [], {"a": []}, {"rows": [{"b": [1, None]}, {}], "c": {"d": {"e": 1.5}}}, [[1]]]
)
def test_what_is_written_is_read_back(value, tmp_path):
    write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text()) == value


def test_a_measurement_takes_one_line(tmp_path):
    write_json(tmp_path / "a.json", {"rows": [{"ms": 1}, {"ms": 2}]})
    assert '  {"ms": 1},\n' in (tmp_path / "a.json").read_text()


def test_a_file_that_does_not_exist_has_the_value_for_that(tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path, absent=[1]) == [1]
    write_json(path, {"a": 2})
    assert read_json(path, absent=[1]) == {"a": 2}


def test_a_file_of_another_kind_or_a_part_of_a_file_is_named(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match=r"a\.json must be a record, got no file"):
        read_object(path, "a record", ["rows"])
    write_json(path, {"data": 1})
    assert read_object(path, "a record", ["data"]) == {"data": 1}
    with pytest.raises(ValueError, match=r"a\.json must be a record, but has no 'rows', 'floors'"):
        read_object(path, "a record", ["rows", "data", "floors"])
    path.write_text(path.read_text()[:-4])
    with pytest.raises(ValueError, match=r"a\.json must be JSON: "):
        read_object(path, "a record", ["data"])
    write_json(path, [1])
    with pytest.raises(ValueError, match="must be a record, got no object"):
        read_object(path, "a record", [])
