"""The page of the site that shows the gallery of masks.gallery, made at every build."""

from masks._pattern import BUILTIN
from masks.gallery import BLOCK, ENTRIES, LEGEND, TOKENS, Section, sections

INTRODUCTION = f"""# Patterns

Every built-in pattern, at {TOKENS:,} tokens in blocks of {BLOCK} where the axes do not say
otherwise. {LEGEND} Density s is the share of blocks that are not white.

Patterns combine: `a & b`, `a | b`, `a - b`, `a ^ b`, `~a`; `masks.stack([...])` gives each head
its own. On the command line:

```bash
python -m masks "local(256) | butterfly()"
python -m masks gallery --module my_patterns.py
python -m masks diff "local(256)" "butterfly()" --output difference.svg
```

The first draws an expression, the second writes a page like this one with patterns of your own,
the third shows where two patterns differ.
"""


def pages() -> dict[str, str | bytes]:
    """The files of the gallery: gallery.md and its pictures, by their paths in the site."""
    files: dict[str, str | bytes] = {}
    text = [INTRODUCTION]
    for shown in sections(ENTRIES):
        path = f"gallery/{shown.entry.file_name}"
        files |= {f"{path}.{suffix}": content for suffix, content in shown.pictures.items()}
        text.append(section(shown, path))
    return files | {"gallery.md": "\n".join(text)}


def section(shown: Section, path: str) -> str:
    """The Markdown of one pattern."""
    title = shown.entry.title
    heading, reference = title, ""
    if title in BUILTIN:
        heading = f"`{title}`"
        reference = f" Reference: [`masks.{title}`](api/patterns.md#masks.{title})."
    figures = ", ".join(f"{name} {value}" for name, value in shown.figures.items())
    return (
        f"## {heading}\n\n`{shown.entry.pattern}`. {shown.entry.good_for}{reference}\n\n"
        f"![{shown.entry.pattern}]({path}.png)\n\n{figures}. [Vector picture]({path}.svg)\n"
    )
