import json

import numpy as np
import torch
from typer import Typer
from typer.testing import CliRunner

from experiments.lra import floor_readers, floors
from experiments.lra.tasks import ListOps, Pathfinder, Text, listops


def test_readers_see_so_many_levels():
    # [MAX 1 [MIN 5 [MED 7 7 7] ] ], and 9 is the guess for every MAX, 0 for every MIN, 4 for MED
    source = "( ( ( [MAX 1 ) ( ( ( [MIN 5 ) ( ( ( ( [MED 7 ) 7 ) 7 ) ] ) ) ] ) ) ] )"
    ids, guesses = listops.tokenize(source), torch.tensor([0, 9, 4, 0]).numpy()
    assert [floor_readers.read(ids, levels, guesses) for levels in range(4)] == [9, 1, 4, 5]


def test_listops_floors_are_those_of_the_literature():
    measured = list(floor_readers.listops_floors(3000).values())
    assert abs(measured[0] - 0.364) < 0.06
    assert measured == sorted(measured)


def test_readers_guess_what_they_were_not_tested_on(monkeypatch):
    def generate(samples, seed):
        operators = ("[MIN", "[MAX", "[MED", "[SM")
        sources = [f"( ( {operators[n % 4]} 3 ) ] )" for n in range(samples)]
        return {
            "tokens": np.concatenate([listops.tokenize(source) for source in sources]),
            "offsets": 3 * np.arange(samples + 1),
            "labels": np.where(np.arange(samples) < samples // 5, 3, 7),
        }

    monkeypatch.setattr(floor_readers, "generate", generate)
    assert list(floor_readers.listops_floors(20).values()) == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_networks_see_distances_and_places_of_discs_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(
        floor_readers,
        "_network_accuracy",
        lambda forms, labels: seen.append((forms, labels)) or 0.5,
    )
    found = floor_readers.pathfinder_floors(Pathfinder(), 6)
    assert list(found.values()) == [0.5, 0.5, 0.5]
    images = Pathfinder(distractors="none").images("floors", 6)
    drawings = [images.draw(i) for i in range(6)]
    (apart, labels), (turned, _), (plain, _) = seen
    assert labels.tolist() == [drawing.label for drawing in drawings]
    distance = torch.tensor([np.linalg.norm(d.discs[0] - d.discs[1]) for d in drawings])
    torch.testing.assert_close(apart[..., 0], (distance / 31).float().expand(2, 6))
    assert turned.shape == (16, 6, 5)
    places = torch.tensor(np.stack([d.discs for d in drawings])).flatten(1) / 31 - 0.5
    for forms in (turned, plain):
        torch.testing.assert_close(forms[0, :, :4], places.float())
    assert torch.equal(plain[1, :, :2], plain[0, :, 2:4])


def test_absolute_coordinates_say_more_where_contours_have_a_direction(monkeypatch):
    monkeypatch.setattr(floor_readers, "STEPS", 500)
    monkeypatch.setattr(floor_readers, "BATCH", 256)
    found = floor_readers.pathfinder_floors(Pathfinder(resampling="clipped"), 8000)
    assert found["coordinates of the discs"] > 0.6
    assert found["coordinates of the discs, turned and mirrored"] < 0.6


def test_a_threshold_is_chosen_on_one_set_and_tested_on_another():
    scores, labels = np.array([0.1, 0.9, 0.2, 0.8]), np.array([0, 1, 0, 1])
    tested, right = np.array([0.4, 0.6, 0.3, 0.7]), np.array([0, 1, 1, 0])
    assert floor_readers.threshold_accuracy(scores, labels, tested, right) == 0.5


def test_shared_words_tell_films_that_name_their_own(tmp_path):
    lines = []
    for n in range(100):
        film = f"word{n // 4 * 7} actor{n // 4}" if n % 2 else ""
        texts = f"a film {film} indeed", f"the film {film or n} it is"
        lines.append("\t".join([f"{n % 2}.0", "a", "b", *texts]))
    folder = tmp_path / "film_pairs"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    # Digits are no words: "actor" and "word" are shared where the label is 1.
    assert set(floor_readers.film_pairs_floors(tmp_path).values()) == {1.0}


def test_long_reviews_share_words_of_any_film(tmp_path):
    """Only what is divided by the words of both reviews sees that they share little of theirs."""
    folder = tmp_path / "film_pairs"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        lines = []
        for n in range(40):
            own = [
                " ".join(f"{split}{side}{letters(200 * n + k)}" for k in range(200))
                for side in "ab"
            ]
            same = " ".join(f"common{letters(k)}" for k in range(40))
            texts = [f"{same} {text}" for text in own] if n % 2 == 0 else ["an actor"] * 2
            lines.append(f"{n % 2}.0\ta\tb\t{texts[0]}\t{texts[1]}\n")
        (folder / f"{split}.tsv").write_text("".join(lines))
    found = floor_readers.film_pairs_floors(tmp_path)
    assert found["shared words"] == 1.0
    assert found["shared words, not divided by the lengths"] < 0.6


def letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_floors_are_written_where_they_are_asked_for(tmp_path, monkeypatch):
    for name in ("listops_floors", "pathfinder_floors"):
        monkeypatch.setattr(floor_readers, name, lambda *arguments: {"floor": 0.5})
    app = Typer()
    app.command()(floors.main)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.json").write_text('{"floors": {"other": 1}, "measured": {}}')
    assert CliRunner().invoke(app, ["--output", "here.json"]).exit_code == 0
    measured = json.loads((tmp_path / "here.json").read_text())["floors"]
    pathfinder = {"pathfinder32-hard", "pathfinder256-hard-unclipped"}
    assert set(measured) >= {"other", "listops"} | pathfinder
    assert CliRunner().invoke(app, ["--task", "listops"]).exit_code == 0
    (only,) = json.loads((tmp_path / "results" / "lra-floors.json").read_text())["floors"]
    assert only == "listops"
    refused = CliRunner().invoke(app, ["--task", "pathfinder"])
    assert (refused.exit_code, "unknown task" in refused.output) == (2, True)
    refused = CliRunner().invoke(app, ["--task", "film-pairs", "--data-root", "none"])
    assert (refused.exit_code, "is missing" in refused.output) == (2, True)


def test_a_network_is_tested_where_it_was_neither_trained_nor_chosen(monkeypatch):
    monkeypatch.setattr(floor_readers, "CHECKED_EVERY", 1)
    monkeypatch.setattr(floor_readers, "STEPS", 3)
    chosen_on, tested_on = iter((0.5, 0.9, 0.7)), iter((0.6, 0.4, 1.0))

    def right(network, forms, labels):
        parts = [torch.full((2,), float(part)) for part in (next(chosen_on), next(tested_on))]
        return torch.cat([torch.ones(6), *parts])

    monkeypatch.setattr(floor_readers, "_right", right)
    assert floor_readers._network_accuracy(torch.rand(1, 10, 1), torch.ones(10).long()) == 0.4


def test_symmetries_keep_distances():
    discs = torch.randn(5, 4)
    forms = floor_readers.symmetries(discs)
    assert len({tuple(form[0].tolist()) for form in forms}) == 16
    apart = [(form[:, :2] - form[:, 2:]).norm(dim=-1) for form in forms]
    for distance in apart:
        torch.testing.assert_close(distance, apart[0])


def test_networks_find_what_coordinates_tell(monkeypatch):
    monkeypatch.setattr(floor_readers, "STEPS", 500)
    monkeypatch.setattr(floor_readers, "BATCH", 64)
    apart = torch.rand(1, 2000, 1)
    labels = (apart[0, :, 0] > 0.5).long()
    assert floor_readers._network_accuracy(apart, labels) > 0.95
    assert floor_readers._network_accuracy(torch.rand(1, 2000, 1), labels) < 0.6
    labels[1200:] = 1 - labels[1200:]
    assert floor_readers._network_accuracy(apart, labels) < 0.05


def test_measured_floors_are_found_by_task():
    assert set(floors.floors(Pathfinder(64, resampling="clipped"))) == {
        "distance of the discs",
        "coordinates of the discs, turned and mirrored",
        "coordinates of the discs",
    }
    undirected = Pathfinder(64, distractors="described", directions="any", resampling="clipped")
    assert floors.floors(undirected) != floors.floors(Pathfinder(64, resampling="clipped"))
    assert floors.floors(ListOps())["root operator only"] > 0.3
    assert floors.floors(Text()) == {}
