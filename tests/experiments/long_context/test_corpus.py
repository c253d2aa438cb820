"""What the samples ask for, and that it can be answered."""

import pytest
import torch

from experiments.long_context.corpus import IGNORED, QUERY, Corpus, Task, read_text


def test_second_half_of_a_copy_is_the_first():
    tokens, labels = Corpus(Task.COPY, 101, seed=0).sample(3)
    asked = (labels != IGNORED).nonzero().flatten()
    assert asked.tolist() == list(range(50, 101))
    assert torch.equal(labels[asked], torch.cat([tokens, labels[-1:]])[asked + 1 - 51])


def test_what_a_retrieval_asks_for_stands_earlier_in_it():
    tokens, labels = Corpus(Task.RETRIEVAL, 500, seed=0).sample(3)
    asked = (labels != IGNORED).nonzero().flatten()
    assert len(asked) == 8
    starts = (tokens == QUERY).nonzero().flatten().tolist()
    values = {int(tokens[i + 1]): int(tokens[i + 2]) for i in starts[:-8]}
    for place in asked.tolist():
        assert values[int(tokens[place])] == labels[place]


def test_samples_depend_on_seed_and_number_alone():
    first, again = (Corpus(Task.COPY, 64, seed=1).sample(5)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, Corpus(Task.COPY, 64, seed=2).sample(5)[0])
    assert not torch.equal(first, Corpus(Task.COPY, 64, seed=1).sample(6)[0])


def test_text_is_read_by_bytes(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    text = read_text(tmp_path / "text", 64)
    tokens, labels = Corpus(Task.TEXT, 64, seed=0, text=text).sample(0)
    assert torch.equal(labels, tokens + 1)
    with pytest.raises(ValueError, match="text must have more than 200 bytes"):
        read_text(tmp_path / "text", 200)


def test_files_of_a_folder_are_read_by_name(tmp_path):
    (tmp_path / "more").mkdir()
    files = {"b.txt": "two", "a.md": "one", "more/c.txt": "three", "d.py": "x"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert bytes(read_text(tmp_path, 5).tolist()) == b"one\ntwo\nthree"
    with pytest.raises(ValueError, match="has 13"):
        read_text(tmp_path, 13)
