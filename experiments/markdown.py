"""Tables in Markdown, and pages whose tables are replaced from records."""

import re
from collections.abc import Callable, Iterable, Mapping


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
