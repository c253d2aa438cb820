"""The library speaks the words of docs/glossary.md, and none of its own for what has a term."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("masks", "sparseflash") for path in (ROOT / folder).rglob("*.py")]
# Metaphors that once stood for a term, and the term.
TERMS = {
    r"relays?|relayed": "load-wait warp",
    r"hear|hears|heard|told|announce[ds]?|announcements?": "publish and receive work tiles",
    r"owed|grown|peak": "row max, row sum",
    r"rooms?": "register budget, occupancy, capacity",
    r"roofs?": "roofline",
    r"walks?|walked|walking": "block range, iterate",
    r"turned": "transposed, rotated",
    r"unevenness": "imbalance",
    r"contenders?|rivals?|peers?": "implementation, baseline",
    r"strangers?": "what does not import one another",
    r"in turns": "ping-pong, alternately",
    r"handed over|hands? over|handed back|hands? back": "commit, release",
}


@pytest.mark.parametrize(("metaphor", "term"), TERMS.items(), ids=TERMS.values())
def test_library_has_a_term_and_no_metaphor(metaphor, term):
    word = re.compile(rf"(?<![a-z])({metaphor})(?![a-z])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := word.search(line))
    ]
    assert found == [], f"say {term}, or another word of docs/glossary.md"
