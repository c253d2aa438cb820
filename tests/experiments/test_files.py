import json
from pathlib import Path

import pytest

from experiments.files import write_json


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
