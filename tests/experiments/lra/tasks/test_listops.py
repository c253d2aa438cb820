import numpy as np
import pytest

from experiments.lra.tasks import SPLITS, ListOps, Pathfinder, listops


class TestListOps:
    def test_expressions_have_the_published_statistics(self):
        arrays = listops.generate(4000, seed=0)
        lengths = np.diff(arrays["offsets"])
        assert lengths.min() > 500
        assert lengths.max() < 2000
        assert lengths.mean() == pytest.approx(1035, abs=25)
        share = np.bincount(arrays["labels"], minlength=10) / 4000
        assert share.max() == pytest.approx(0.174, abs=0.02)

    def test_samples_do_not_depend_on_how_many_are_made(self):
        few, many = (listops.Expressions(listops.generate(n, seed=3)) for n in (2, 1001))
        assert np.array_equal(few[1][0][0], many[1][0][0])

    def test_operators_by_hand(self):
        values = np.array([9, 3, 4, 8])
        assert [listops.apply(operator, values) for operator in range(4)] == [3, 9, 6, 4]
        assert listops.apply(2, np.array([3, 4])) == 3

    def test_another_seed_makes_other_samples(self, tmp_path):
        sizes, lengths = (4, 2, 2), (20, 100)
        one, other = (
            ListOps(sizes=sizes, seed=seed, lengths=lengths).splits(tmp_path)["train"]
            for seed in (0, 1)
        )
        assert not np.array_equal(one[0][0][0], other[0][0][0])

    def test_equal_samples_are_refused(self):
        tokens = np.array([3, 4, 3, 4, 3], np.uint8)
        listops._check_different(tokens, np.array([0, 2, 5]))
        with pytest.raises(ValueError, match="two samples are equal: take another seed"):
            listops._check_different(tokens, np.array([0, 2, 4]))

    def test_values_are_those_of_a_plain_reader(self):
        expressions = listops.Expressions(listops.generate(20, seed=1))
        names = {number: symbol for symbol, number in listops.IDS.items()}
        for i in range(20):
            (ids,), label, _ = expressions[i]
            assert plain_value(names[number] for number in ids.tolist()) == label

    def test_short_expressions_are_another_task(self, tmp_path):
        task = ListOps(sizes=(30, 4, 4), lengths=(20, 100))
        assert (task.name, task.shape.seq_len) == ("listops-20-100", 128)
        assert (ListOps().name, ListOps().shape.seq_len) == ("listops", 2048)
        lengths = [len(ids) for (ids,), _, _ in task.splits(tmp_path)["train"]]
        assert 20 < min(lengths) <= max(lengths) < 100
        with pytest.raises(ValueError, match="lengths must be 20 <= low < high - 1, got"):
            ListOps(lengths=(9, 50))
        with pytest.raises(ValueError, match="lengths of published expressions are"):
            ListOps("published", lengths=(20, 100))
        with pytest.raises(ValueError, match="lengths of published expressions are"):
            ListOps("published", shortest=20)

    def test_shorter_expressions_are_for_training_only(self, tmp_path):
        task = ListOps(sizes=(40, 30, 30), lengths=(60, 100), shortest=20)
        assert (task.name, task.shape.seq_len) == ("listops-60-100", 128)
        splits = task.splits(tmp_path)
        assert [len(splits[split]) for split in SPLITS] == [40, 30, 30]
        train, test = (
            {bytes(ids) for (ids,), _, _ in (splits[split][i] for i in range(30))}
            for split in ("train", "test")
        )
        assert min(map(len, train)) < 60 < min(map(len, test))
        assert not train & test
        with pytest.raises(ValueError, match="shortest must be 20 <= shortest < 500, got 500"):
            ListOps(shortest=500)

    @pytest.mark.parametrize("task", [ListOps, Pathfinder])
    @pytest.mark.parametrize("sizes", [(0, 4, 4), (30, -1, 4), (30, 4)])
    def test_a_split_of_no_sample_is_refused(self, task, sizes):
        with pytest.raises(ValueError, match="sizes must be at least 1 for each of train"):
            task(sizes=sizes)

    def test_published_file_is_read(self, tmp_path):
        folder = tmp_path / "listops-1000"
        folder.mkdir()
        for name in listops.PUBLISHED.values():
            source = "( ( ( [MAX 4 ) ( ( ( [SM 7 ) 8 ) ] ) ) ] )"
            (folder / name).write_text(f"Source\tTarget\n{source}\t5\n")
        (ids,), label, _ = ListOps("published").splits(tmp_path)["test"][0]
        assert [listops.SYMBOLS[i - listops.FIRST] for i in ids] == ["[MAX", *"4", "[SM", *"78XX"]
        assert label == 5

    def test_a_bad_row_is_named(self, tmp_path):
        path = tmp_path / "basic_test.tsv"
        path.write_text("Source\tTarget\n( [MAX 1 ] )\t1\n( [AVG 1 ] )\t1\n")
        with pytest.raises(ValueError, match=r"basic_test\.tsv, line 3: cannot be read"):
            listops.read_tsv(path)
        path.write_text("( [MAX 1 ] )\t1\n")
        with pytest.raises(ValueError, match=r"basic_test\.tsv, line 1: must be Source"):
            listops.read_tsv(path)

    def test_a_bad_row_is_skipped_and_counted_when_asked(self, tmp_path, capsys):
        folder = tmp_path / "listops-1000"
        folder.mkdir()
        for name in listops.PUBLISHED.values():
            rows = "Source\tTarget\n( [MAX 1 ] )\t1\n( [AVG 1 ] )\t1\n( [MIN 3 ] )\t3\n"
            (folder / name).write_text(rows)
        test = ListOps("published", skip_corrupt=True).splits(tmp_path)["test"]
        assert [test[i][1] for i in range(len(test))] == [1, 3]
        assert "basic_test.tsv: 2 rows read, 1 left out" in capsys.readouterr().out


def plain_value(symbols):
    """The value of an expression without parentheses, read by recursion; None at a "]"."""
    symbol = next(symbols)
    if symbol.isdigit() or symbol == "]":
        return int(symbol) if symbol.isdigit() else None
    values = list(iter(lambda: plain_value(symbols), None))
    if symbol == "[SM":
        return sum(values) % 10
    return {"[MIN": min, "[MAX": max, "[MED": lambda v: int(np.median(v))}[symbol](values)
