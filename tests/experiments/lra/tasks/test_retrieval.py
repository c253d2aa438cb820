import shutil

import numpy as np
import pytest

from experiments.lra.tasks import SPLITS, Retrieval


def test_retrieval_reads_pairs_in_place(tmp_path):
    folder = tmp_path / "tsv_data"
    folder.mkdir()
    for part in ("train", "eval", "test"):
        other = part.encode()
        lines = [b'1.0\tA\tB\tone "text\t' + other, b"0.0\tC\tD\t" + b"x" * 5000 + b"\ty"]
        (folder / f"new_aan_pairs.{part}.tsv").write_bytes(b"\n".join(lines) + b"\n")
    splits = Retrieval().splits(tmp_path)
    for split, part in zip(SPLITS, (b"train", b"eval", b"test"), strict=True):
        documents, label, _ = splits[split][0]
        assert [bytes((ids - 1).astype(np.uint8)) for ids in documents] == [b'one "text', part]
    pairs = splits["validation"]
    assert len(pairs) == 2
    assert label == 1
    assert len(pairs[1][0][0]) == 4000


def test_a_bad_line_of_retrieval_is_named_or_skipped(tmp_path, capsys):
    folder = tmp_path / "tsv_data"
    folder.mkdir()
    for part in ("train", "eval", "test"):
        lines = [b"1.0\tA\tB\tx\ty", b"broken", b"0.0\tA\tC\tx\tz"]
        (folder / f"new_aan_pairs.{part}.tsv").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 2: must be 5 columns"):
        Retrieval().splits(tmp_path)["train"][1]
    with pytest.raises(ValueError, match=r"has .*'skip_corrupt': False"):
        Retrieval(skip_corrupt=True).splits(tmp_path)
    for index in folder.glob("*.index"):
        shutil.rmtree(index)
    train = Retrieval(skip_corrupt=True).splits(tmp_path)["train"]
    assert [train[i][1] for i in range(len(train))] == [1, 0]
    assert "train.tsv: 2 lines read, 1 left out" in capsys.readouterr().out
