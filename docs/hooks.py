"""What the site adds to docs/: pages that live at the top of the repository, and the gallery.

mkdocs calls the functions named on_*. Links of a page are those of the repository, so that they
work on a forge too; here they are made to lead to the pages of the site.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import gallery  # noqa: E402 (docs is no package)

# Pages of the site by the files of the repository that they show.
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design/overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "experiments/lra/README.md": "long-range-arena-results.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from the top of the repository, the gallery, and pictures of records."""
    sources = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for source in sources:
        for match in LINK.finditer((ROOT / source).read_text()):
            picture = _in_repository(source, match["target"])
            if match["image"] and (ROOT / picture).exists() and picture not in files.src_uris:
                files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    for path, content in gallery.pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links of the repository to pages of the site; names a file that is not shown."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def led(match: re.Match) -> str:
        if "://" in match["target"]:
            return match[0]
        target = _in_repository(source, match["target"])
        shown = PAGES.get(target, target.removeprefix("docs/"))
        if shown in files.src_uris:
            path = posixpath.relpath(shown, posixpath.dirname(here) or ".")
            return f"{match['image']}[{match['text']}]({path}{match['anchor'] or ''})"
        if (ROOT / target).exists():
            return match["text"]
        return match[0]

    return LINK.sub(led, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Code in a table has its escaped bars without the backslash, as on a forge."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(r"\|", "|"), html)


def _in_repository(source: str, target: str) -> str:
    """The path in the repository of a link's target in the file `source`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
