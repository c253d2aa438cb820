import torch

from experiments.lra import floors
from experiments.lra.tasks import ListOps, Pathfinder, Text, listops


def test_readers_see_so_many_levels():
    # [MAX 1 [MIN 5 [MED 7 7 7] ] ], and 9 is the guess for every MAX, 0 for every MIN, 4 for MED
    source = "( ( ( [MAX 1 ) ( ( ( [MIN 5 ) ( ( ( ( [MED 7 ) 7 ) 7 ) ] ) ) ] ) ) ] )"
    ids, guesses = listops.tokenize(source), torch.tensor([0, 9, 4, 0]).numpy()
    assert [floors.read(ids, levels, guesses) for levels in range(4)] == [9, 1, 4, 5]


def test_listops_floors_are_those_of_the_literature():
    measured = list(floors.listops_floors(3000).values())
    assert abs(measured[0] - 0.364) < 0.06
    assert measured == sorted(measured)


def test_symmetries_keep_distances():
    discs = torch.randn(5, 4)
    forms = floors.symmetries(discs)
    assert len({tuple(form[0].tolist()) for form in forms}) == 16
    apart = [(form[:, :2] - form[:, 2:]).norm(dim=-1) for form in forms]
    for distance in apart:
        torch.testing.assert_close(distance, apart[0])


def test_networks_find_what_coordinates_tell(monkeypatch):
    monkeypatch.setattr(floors, "STEPS", 500)
    apart = torch.rand(1, 2000, 1)
    labels = (apart[0, :, 0] > 0.5).long()
    assert floors._network_accuracy(apart, labels) > 0.95
    assert floors._network_accuracy(torch.rand(1, 2000, 1), labels) < 0.6


def test_measured_floors_are_found_by_task():
    assert set(floors.floors(Pathfinder(64))) == {
        "distance of the discs",
        "coordinates of the discs",
    }
    assert floors.floors(ListOps())["root operator only"] > 0.3
    assert floors.floors(Text()) == {}
