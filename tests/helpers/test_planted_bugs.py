"""A bug is planted where its address says, or there is an error."""

import ast

import pytest

from tests.helpers.planted_bugs import Argument, Call, Constant, Drop, Move, Replace, plant

SOURCE = """
STAGES = const(2)

def load(ring, keys):
    total = 0
    if keys > 0:
        barrier.wait(ring.full[0], 1)  # first
        copy(ring, keys)
    else:
        barrier.wait(ring.empty[0], 1)
    found = ring.matrix().load(
        ROWS,
    )
    release(ring, mask=total < 3)
    return found
"""


@pytest.mark.parametrize(
    ("bug", "old", "new"),
    [
        (Drop(Call("load", "wait", "full")), "barrier.wait(ring.full[0], 1)", "pass"),
        (Drop(Call("load", "wait", nth=1)), "barrier.wait(ring.empty[0], 1)", "pass"),
        (
            Move(Call("load", "release"), Call("load", "load", "ROWS")),
            "found = ring.matrix().load(ROWS)\n    release(ring, mask=total < 3)",
            "release(ring, mask=total < 3)\n    found = ring.matrix().load(ROWS)",
        ),
        (
            Move(Call("load", "copy"), Call("load", "wait", "full")),
            "barrier.wait(ring.full[0], 1)\n        copy(ring, keys)",
            "copy(ring, keys)\n        barrier.wait(ring.full[0], 1)",
        ),
        (
            Argument(Call("load", "copy"), 1, "keys + 1"),
            "copy(ring, keys)",
            "copy(ring, keys + 1)",
        ),
        (Argument(Call("load", "release"), "mask", "None"), "mask=total < 3", "mask=None"),
        (Replace("load", "keys  >  0", "keys > 1"), "keys > 0", "keys > 1"),
        (Constant("STAGES", "const(1)"), "const(2)", "const(1)"),
    ],
)
def test_a_bug_changes_what_it_names_and_nothing_else(bug, old, new):
    before = ast.unparse(ast.parse(SOURCE))
    assert before.count(old) == 1
    assert ast.unparse(plant(SOURCE, [bug])) == before.replace(old, new)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (Drop(Call("store", "wait")), "function store is not there"),
        (Drop(Call("load", "arrive")), "is not there"),
        (Drop(Call("load", "wait", nth=2)), "is not there: 2 places match"),
        (Drop(Call("load", "wait")), "may be any of 2 places"),
        (Drop(Call("load", "load")), "has a result"),
        (Move(Call("load", "matrix"), Call("load", "release")), "comes before .* already"),
        (Move(Call("load", "wait", nth=1), Call("load", "copy")), "no statements of one block"),
        (Argument(Call("load", "copy"), 1, "keys"), "changes nothing"),
        (Replace("load", "keys > 1", "keys > 2"), "is not there"),
        (Replace("load", "ring", "keys"), "may be any of"),
        (Constant("ROWS", "1"), "is not there"),
    ],
)
def test_an_address_of_no_place_or_several_is_an_error(bug, message):
    with pytest.raises(LookupError, match=message):
        plant(SOURCE, [bug])
