import numpy as np
import pytest

from experiments.lra.tasks import SPLITS, Text, collate


def test_text_is_bytes_of_reviews(tmp_path):
    for part in ("train", "test"):
        for sentiment in ("neg", "pos"):
            folder = tmp_path / "aclImdb" / part / sentiment
            folder.mkdir(parents=True)
            for n in range(10):
                (folder / f"{n}_1.txt").write_text(f"{part} {sentiment} {n}")
    splits = Text().splits(tmp_path)
    assert [len(splits[split]) for split in SPLITS] == [18, 2, 20]
    train, validation, test = (
        [(bytes((ids - 1).astype(np.uint8)).decode(), label) for (ids,), label, _ in read]
        for read in ([splits[split][i] for i in range(len(splits[split]))] for split in SPLITS)
    )
    for part, found in (("train", train + validation), ("test", test)):
        expected = [
            (f"{part} {sentiment} {n}", label)
            for label, sentiment in enumerate(("neg", "pos"))
            for n in range(10)
        ]
        assert sorted(found) == expected
    on_test = Text(validate_on_test=True).splits(tmp_path)
    assert len(on_test["train"]) == 20
    assert on_test["validation"] is on_test["test"]
    short = Text(length=5)
    assert (short.name, short.shape.seq_len) == ("text-5", 5)
    assert collate(short.shape, [splits["test"][0]]).ids.shape == (1, 1, 5)
    with pytest.raises(ValueError, match="length must be at least one byte, got 0"):
        Text(length=0)
