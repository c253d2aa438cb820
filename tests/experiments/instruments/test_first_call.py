import json

import pytest
from typer import BadParameter

from experiments.instruments import first_call


def test_every_process_and_call_is_timed(tmp_path, capsys):
    first_call.main(1, 64, 16, ["warmup"], output=tmp_path)
    (path,) = tmp_path.glob("first-call-*.json")
    found = json.loads(path.read_text())
    assert found["complete"]
    calls = [(row["implementation"], row["cache"], row["call"]) for row in found["rows"]]
    assert calls == [
        ("warmup", cache, call)
        for cache in ("empty", "filled")
        for call in ("warmup", "first mask", "second mask", "again")
    ]
    assert all(0 < row["seconds"] < 60 for row in found["rows"])
    assert "second mask" in capsys.readouterr().out


def test_caches_are_those_of_the_folder(tmp_path, monkeypatch):
    for variable in first_call.CACHES:
        monkeypatch.delenv(variable, raising=False)
    seen = {}
    monkeypatch.setattr(
        first_call,
        "attend_sparseflash",
        lambda leaves, _: seen.update(first_call.os.environ) or leaves[0] * leaves[1] * leaves[2],
    )
    first_call.measure("sparseflash", "empty", str(tmp_path), first_call.Sizes(1, 32, 8, "cpu"))
    for variable in first_call.CACHES:
        assert seen[variable] == str(tmp_path / variable)


def test_an_unknown_implementation_is_named():
    with pytest.raises(
        BadParameter, match="unknown implementation 'flash'; known: sparseflash, warmup, flex"
    ):
        first_call.main(only=["flash"])
