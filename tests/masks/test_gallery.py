import io
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.image import imread

import masks
from masks import BlockMask
from masks._pattern import BUILTIN
from masks.analysis import receptive_field
from masks.gallery import ENTRIES, Entry, _overview, difference, of_module, sections, write

BROWSERS = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# For --dump-dom: which pictures are shown, as the title; others on the console.
LOOK = """<script>addEventListener("load", () => {
    const shown = [...document.images].map(i => i.naturalWidth > 0 && i.clientWidth > 0)
    document.title = JSON.stringify(shown)
    if (shown.includes(false)) console.error("a picture is not shown")
})</script>"""
SMALL = [
    Entry("near & far", "local(20) | butterfly()", "<a test>", 256, 32),
    Entry("few queries", masks.causal(align="bottom-right"), "", (32, 64), 16),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery")
    write(folder, list(sections(SMALL)))
    return folder


def test_entries_are_the_built_in_patterns_and_can_be_built():
    assert {entry.title for entry in ENTRIES} >= BUILTIN.keys()
    for entry in ENTRIES:
        assert entry.build().density > 0
        assert entry.title not in BUILTIN or entry.title in str(entry.pattern)
    assert len({entry.file_name for entry in ENTRIES}) == len(ENTRIES)


class Page(HTMLParser):
    """The files that a page refers to, and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.images, self.links, self.ids, self.text, self.open = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.images += [attrs["src"]] if tag == "img" else []
        self.links += [attrs["href"]] if tag == "a" else []
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.open += [tag] if tag not in ("img", "meta") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_shows_pictures_that_exist_and_decode(folder):
    page = Page((folder / "index.html").read_text())
    assert page.open == []
    assert page.images == ["near-far.png", "few-queries.png"]
    assert all(imread(folder / name).std() > 0 for name in page.images)
    vectors = [link for link in page.links if link.endswith(".svg")]
    assert len(vectors) == 2
    assert all(ElementTree.parse(folder / name).getroot().tag.endswith("svg") for name in vectors)
    assert [link for link in page.links if link[0] == "#"] == [f"#{name}" for name in page.ids]
    text = " ".join(page.text)
    assert "<a test>" in text
    assert "local(20) | butterfly()" in text
    assert "near & far" in text


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")
@pytest.mark.parametrize(("missing", "shown"), [(False, "[true,true]"), (True, "[true,false]")])
def test_page_opens_in_a_browser_with_every_picture_shown(folder, tmp_path, missing, shown):
    page = shutil.copytree(folder, tmp_path / "page") / "index.html"
    if missing:
        (page.parent / "few-queries.png").unlink()
    page.write_text(page.read_text() + LOOK)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert f"<title>{shown}</title>" in found.stdout
    assert ("CONSOLE" in found.stderr) == missing


def test_figures_say_what_a_pattern_costs_and_sees():
    (section,) = sections([Entry("butterfly", "butterfly()", "")])
    assert section.figures["density"] == "0.3125"
    assert section.figures["layers to full connectivity"] == "4"
    assert section.figures["connected after 1, 2, 4 layers"] == "0.312, 0.688, 1"


def test_pictures_of_the_same_pattern_are_the_same_bytes():
    first, second = (next(sections(SMALL)).pictures for _ in range(2))
    assert first == second


def test_long_masks_are_drawn_in_cells(monkeypatch):
    monkeypatch.setattr(BlockMask, "to_dense", None)
    heads = masks.stack([masks.full(), masks.butterfly()])
    shown = sections([Entry("long", of, "", 1 << 17) for of in ("butterfly()", heads)])
    assert all(imread(io.BytesIO(s.pictures["png"])).std() > 0 for s in shown)


def test_keys_among_more_than_there_are_pixels_are_all_seen():
    keys = masks.pattern(lambda q, k: k % 97 == 50)(2000, 16)
    found = difference(keys, keys - keys)
    picture = torch.tensor(imread(io.BytesIO(found.pictures["png"])))[200:, :, :3]
    is_blue = ((picture[..., 2] - picture[..., 0] > 0.05).sum(0) > 300).int()
    assert int((is_blue.diff() == 1).sum()) == 21


def test_rows_far_longer_than_others_are_seen_beside_them():
    figure = _overview(masks.parse("global_tokens(16) | local(16)")(8192, 16), None)
    axes = figure.axes[1]
    assert (axes.get_yscale(), axes.get_ylim()[0]) == ("log", 0.5)
    (bars,) = axes.patches
    assert to_rgba(bars.get_edgecolor())[3] == 1
    assert bars.get_linewidth() == 1
    assert _overview(masks.causal()(512, 16), None).axes[1].get_yscale() == "linear"


def test_axes_have_whole_tokens_blocks_and_layers():
    mask = masks.stack([masks.local(3), masks.full()])(20, 16)
    figure = _overview(mask, receptive_field(mask, 12))
    ticks = [t for a in figure.axes for t in (*a.get_xticks(), *a.get_yticks())]
    shares = figure.axes[2].get_yticks()
    assert all(t == round(t) for t in ticks[: -len(shares)])
    assert "mean of 2 heads" in figure.axes[1].get_ylabel()


def test_patterns_of_a_module_are_shown(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import masks\nnear = masks.local(8)\nnumber = 3\n")
    (entry,) = of_module(path, 100, 16)
    assert (entry.title, entry.good_for) == ("near", f"{path}:near")
    assert entry.build() == masks.local(8)(100, 16)
    path.write_text("number = 3\n")
    with pytest.raises(ValueError, match="defines no Pattern"):
        of_module(path)
    with pytest.raises(ValueError, match="does not exist"):
        of_module(tmp_path / "nothing.py")


def test_a_pattern_that_cannot_be_built_is_named():
    wrong = Entry("wrong tree", "tree([-1], prefix_len=3)", "", 64)
    with pytest.raises(ValueError, match=r"wrong tree cannot be built: .* a tree of 1 nodes"):
        list(sections([wrong]))


def test_difference_counts_pairs_and_draws_them():
    a, b = torch.rand(2, 100, 100) < 0.3
    found = difference(BlockMask.from_dense(a, 16), BlockMask.from_dense(b, 16))
    counts = [int(pairs.sum()) for pairs in (a & b, a & ~b, b & ~a)]
    assert [found.both, found.only_a, found.only_b] == counts
    picture = imread(io.BytesIO(found.pictures["png"]))[..., :3]
    alone = difference(masks.full()(64, 16), ~masks.full()(64, 16))
    assert (alone.both, alone.only_a, alone.only_b) == (0, 64 * 64, 0)
    blue = torch.tensor(imread(io.BytesIO(alone.pictures["png"]))[..., :3])
    is_blue = (blue - torch.tensor([0, 0x72, 0xB2]) / 255).abs().amax(-1) < 0.01
    assert is_blue.float().mean() > 0.5
    assert picture.std() > 0


def test_a_mask_and_itself_have_no_pairs_of_their_own():
    mask = masks.causal()(64, 16)
    found = difference(mask, mask, names=("causal", "causal"))
    assert (found.both, found.only_a, found.only_b) == (64 * 65 // 2, 0, 0)


def test_masks_of_other_lengths_have_no_difference():
    with pytest.raises(ValueError, match="must share lengths"):
        difference(masks.full()(64, 16), masks.full()(128, 16))
