import pytest

from experiments.pieces import export, restore

FILES = {"a": b"x" * 5000, "b/c": bytes(range(256)) * 40}


def test_files_come_back_from_pieces_of_a_limited_size(tmp_path):
    pieces = export(FILES, tmp_path / "pieces", piece_bytes=6000)
    assert [path.name for path in pieces] == [f"piece-{n}" for n in range(len(pieces))]
    assert len(pieces) > 2
    assert all(path.stat().st_size <= 6000 for path in pieces)
    assert sorted(restore(tmp_path / "pieces", tmp_path / "back")) == [
        tmp_path / "back" / "a",
        tmp_path / "back" / "b" / "c",
    ]
    for name, content in FILES.items():
        assert (tmp_path / "back" / name).read_bytes() == content


def test_an_export_takes_the_place_of_a_longer_one(tmp_path):
    export(FILES, tmp_path, piece_bytes=3000)
    (only,) = export({"a": b"y"}, tmp_path)
    assert list(tmp_path.iterdir()) == [only]


def test_pieces_are_found_whatever_order_their_names_have(tmp_path):
    first, second, *_ = export(FILES, tmp_path / "pieces", piece_bytes=9000)
    first.rename(tmp_path / "between")
    second.rename(first)
    (tmp_path / "between").rename(second)
    restore(tmp_path / "pieces", tmp_path)
    assert (tmp_path / "a").read_bytes() == FILES["a"]


def test_missing_damaged_and_foreign_pieces_are_named(tmp_path):
    folder = tmp_path / "pieces"
    with pytest.raises(ValueError, match=r"pieces has no piece-"):
        restore(folder, tmp_path)
    pieces = export(FILES, folder, piece_bytes=6000)
    content = pieces[1].read_bytes()
    pieces[1].unlink()
    with pytest.raises(ValueError, match="pieces lacks piece-1"):
        restore(folder, tmp_path)
    pieces[1].write_bytes(content[:-1] + b"?")
    with pytest.raises(ValueError, match=r"piece-1 is damaged: its SHA-256"):
        restore(folder, tmp_path)
    pieces[1].write_bytes(b"no header")
    with pytest.raises(ValueError, match=r"piece-1 is not a piece of an archive"):
        restore(folder, tmp_path)
    other = export({"a": b"other"}, tmp_path / "others")[0]
    pieces[1].write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match=r"piece-1 is of another archive than .*piece-0"):
        restore(folder, tmp_path)
    assert not (tmp_path / "a").exists()
