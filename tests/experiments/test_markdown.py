from experiments.markdown import update


def test_pages_are_checked_and_written(tmp_path, capsys):
    pages = {tmp_path / name: "new\n" for name in ("a.md", "b.md")}
    (tmp_path / "a.md").write_text("old\n")
    (tmp_path / "b.md").write_text("new\n")
    assert update(pages, check=True) == 1
    assert (tmp_path / "a.md").read_text() == "old\n"
    assert update(pages, check=False) == 0
    assert update(pages, check=True) == 0
    assert capsys.readouterr().out.splitlines() == [
        *("not current: a.md", f"wrote {tmp_path}/a.md", f"wrote {tmp_path}/b.md", "current")
    ]
