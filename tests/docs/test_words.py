"""Code and documents have the words of docs/glossary.md, and none of their own for a term."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = [path for folder in ("masks", "sparseflash") for path in (ROOT / folder).rglob("*.py")]
OTHERS = [
    *(path for path in ROOT.glob("*.md")),
    *(
        path
        for folder in ("experiments", "tests", "docs", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md") and path != Path(__file__)
    ),
]
PRESENT = [path for path in OTHERS if path.parent.name != "notebook"]
# Metaphors that once stood for a term, and the term. Those in quotes are keys of older records.
TERMS = {
    r"relays?|relayed": "load-wait warp",
    r"announce[ds]?|announcements?": "publish work tiles",
    r"owed|grown": "row max, row sum",
    r"rooms?": "register budget, occupancy, capacity",
    r"(?<!\")roofs?": "roofline",
    r"(?<!ast\.)(walks?|walked|walking)": "block range, iterate",
    r"unevenness": "imbalance",
    r"(?<!\")(contenders?|rivals?)": "implementation, baseline",
    r"strangers?": "what does not import one another",
    r"in turns": "ping-pong, alternately",
    r"handed over|hands? over|handed back|hands? back": "commit, release",
    r"raises? (\w+ )?where": "raises if",
    r"alike|anew|begun|travels?": "equal, again, started, is sent",
    r"stands?( in)? for|one's own": "replaces, the user's",
    r"(goes|went|going) on": "continues, resumes",
}
# Everywhere but in the notebook, which is history.
PRESENT_TERMS = {
    r"(?<![-_])peers?": "baseline",
    r"bursts?": "turn",
    r"uneven(ly)?": "imbalance, of unequal lengths",
}
# In the library alone: elsewhere they have a plain meaning.
LIBRARY_TERMS = {
    r"hear|hears|heard|told": "publish and receive work tiles",
    r"peak": "row max",
    r"turned": "transposed, rotated",
    r"kept(?! waiting)": "cached, saved",
    r"(?<!in |in_)places?|placed": "position, index, offset",
    r"(?<!\")banks?": "bit tiles",
    r"meets?|met": "overlaps, arrives",
    r"tells?": "distinguishes, depends",
    r"alive|lives|nobody|somebody|whoever": "what holds it, by its name",
    r"in vain|surely|go(es)? together": "what is computed, certain or a multiple",
    r"serves?|served": "computes, supports, is valid for",
    r"wants?|wanted": "needs, needed, requires a gradient",
    r"(?<!there )(is|are) no (?!longer|faster|slower|more|less|larger|smaller)[a-z]+": "is not a",
    r"likewise": "also, as in",
}


@pytest.mark.parametrize(
    ("metaphor", "term", "files"),
    [
        *((metaphor, term, [*LIBRARY, *OTHERS]) for metaphor, term in TERMS.items()),
        *((metaphor, term, [*LIBRARY, *PRESENT]) for metaphor, term in PRESENT_TERMS.items()),
        *((metaphor, term, LIBRARY) for metaphor, term in LIBRARY_TERMS.items()),
    ],
    ids=[*TERMS.values(), *PRESENT_TERMS.values(), *LIBRARY_TERMS.values()],
)
def test_a_term_and_no_metaphor(metaphor, term, files):
    word = re.compile(rf"(?<![a-z])({metaphor})(?![a-z])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := word.search(line))
    ]
    assert found == [], f"say {term}, or another word of docs/glossary.md"
