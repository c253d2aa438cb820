"""Numbers and tables as text, and pages whose tables are replaced from records."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_percent(share: float, deviation: float | None, digits: int = 2) -> str:
    """A share and its standard deviation, or only the share if there is none: "37.10 ± 0.52"."""
    words = f"{100 * share:.{digits}f}"
    return words if deviation is None else f"{words} ± {100 * deviation:.{digits}f}"


def written(page: str, parts: Mapping[str, Callable[[], str]], between: str = "\n") -> str:
    """A page with new parts, each between `<!-- name -->` and `<!-- /name -->`.

    Args:
        page: Text of the page.
        parts: By name, a function that returns the part.
        between: Text between a mark and its part.

    Raises:
        ValueError: For a page without the marks of a part.
    """
    for name, part in parts.items():
        marks = rf"(?<=<!-- {name} -->{between}).*?(?={between}<!-- /{name} -->)"
        marked = re.compile(marks, re.DOTALL)
        if not marked.search(page):
            raise ValueError(f"the page needs <!-- {name} --> and <!-- /{name} -->")
        page = marked.sub(lambda _, part=part: part(), page)
    return page


def update(pages: Mapping[Path, str], check: bool) -> int:
    """Writes pages, or only checks them.

    Args:
        pages: The text that each file must have.
        check: Whether the files are only compared with it.

    Returns:
        The number of files that have another text, which is 0 after they are written.
    """
    if check:
        old = [path.name for path, text in pages.items() if path.read_text() != text]
        print(f"not current: {', '.join(old)}" if old else "current")
        return len(old)
    for path, text in pages.items():
        path.write_text(text)
        print(f"wrote {path}")
    return 0
