"""The documentation site: complete, no dead link, nothing from other sites, searchable from disk, no wider than a
phone.

$FLASH_ATTN_SITE is a site that docs/site/build.py has made. Without it the tests make one, if Sphinx is installed.
"""

import importlib.util
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import flash_attn_minimal
from flash_attn_minimal import distributed

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs/site").is_dir():
    pytest.skip("the documents are not beside the tests", allow_module_level=True)
sys.path.append(str(ROOT / "docs/site"))

import check  # noqa: E402
from headless import chromium  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if "FLASH_ATTN_SITE" in os.environ:
        return Path(os.environ["FLASH_ATTN_SITE"])
    for name in ("sphinx", "furo", "myst_parser"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    folder = tmp_path_factory.mktemp("documentation") / "site"
    done = subprocess.run([sys.executable, ROOT / "docs/site/build.py", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def anchors(page):
    return check.Page(page.read_text()).anchors


# ---- what is there ----


def test_no_dead_link_and_nothing_from_elsewhere(site):
    assert check.problems(site) == []


def test_every_markdown_page_of_the_repository_is_there(site):
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    pages = [re.sub(r"(^|/)README\.md$", r"\1index.md", name) for name in listed.stdout.split()]
    assert len(pages) > 60
    assert [page for page in pages if not (site / page).with_suffix(".html").is_file()] == []


def test_every_public_function_has_its_entry(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    for module in (flash_attn_minimal, distributed):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= entries
    for name in ("transformer.ops.rms_norm", "transformer.ops.linear", "integrations.flash_attn.install"):
        assert f"flash_attn_minimal.{name}" in entries
    hopper = "flash_attn_minimal.integrations.flash_attn.hopper"
    assert f"{hopper}.flash_attn_combine" in entries and f"{hopper}.refusing" not in entries  # it imports the second


def test_arguments_have_their_types(site):
    page = (site / "docs/api/attention.html").read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert "softmax_scale float | None factor on q k^T; None means headdim ** -0.5." in text
    assert page.count('id="flash_attn_minimal.flash_attn_func"') == 1
    assert len(re.findall(r'descname[^>]*><span class="pre">flash_attn_func<', page)) == 1  # not one for each overload


def test_a_page_of_the_reference_begins_with_what_is_on_it(site):
    page = (site / "docs/api/attention.html").read_text()
    table = re.search(r'<table class="[^"]*overview[^"]*">(.*?)</table>', page, re.DOTALL)[1]
    links = re.findall(r'href="#(flash_attn_minimal[^"]*)"', table)
    assert links[:2] == ["flash_attn_minimal.flash_attn_func", "flash_attn_minimal.flash_attn_varlen_func"]
    assert "flash_attn_minimal.Plan" in links and page.index("overview") < page.index('class="sig ')
    distributed_page = (site / "docs/api/distributed.html").read_text()
    assert "flash_attn_minimal.torch.context_parallel.context_parallel_attention" in re.findall(
        r'href="#(flash_attn_minimal[^"]*)"', distributed_page[: distributed_page.index('class="sig ')]
    )


def test_signatures_have_names_and_defaults_and_arrays_are_called_arrays(site):
    page = (site / "docs/api/attention.html").read_text()
    signature = re.search(r'id="flash_attn_minimal.flash_attn_func">(.*?)</dt>', page, re.DOTALL)[1]
    assert re.sub(r"<[^>]+>|\s", "", signature).startswith("flash_attn_func(q,k,v,dropout_p=0.0,softmax_scale=None,")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert "bias , mask array | None" in text and "Any" not in text


def test_every_declaration_of_the_headers_has_its_anchor(site):
    for header in sorted((ROOT / "cuda").glob("*.h")):
        declared = re.findall(r"^FA_API .*?(fa_\w+)\(|^\} (fa_\w+);", header.read_text(), re.MULTILINE)
        names = {function or struct for function, struct in declared}
        assert len(names) > 10
        assert names <= anchors(site / f"docs/api/c/{header.stem}.html")


def test_links_to_source_files_lead_to_the_symbol(site):
    chapter = (site / "docs/learn/03_tiles.html").read_text()
    assert 'href="../../cuda/flash_attn_minimal.cu.html#attention_kernel"' in chapter
    page = (site / "cuda/flash_attn_minimal.cu.html").read_text()
    line = re.search(r'<span class="symbol" id="attention_kernel"></span>(.*)', page)[1]
    assert "template" in line or line.lstrip().startswith('<span class="c1">//')


def test_interactive_page_and_pictures_are_those_of_the_repository(site):
    name = "docs/learn/flash_attention.html"
    assert (site / name).read_bytes() == (ROOT / name).read_bytes()
    forward = (site / "docs/benchmarks/h200/forward.html").read_text()
    pictures = re.findall(r'<img[^>]* src="([^"]+)"', forward)
    assert len(pictures) == 2
    assert all((site / "docs/benchmarks/h200" / picture).resolve().is_file() for picture in pictures)


# ---- the check itself ----


@pytest.mark.parametrize(
    "html, said",
    [
        ('<a href="b.html#there">', None),
        ('<a href="b.html">', None),
        ('<a href="https://example.org/">', None),
        ('<img src="data:image/png;base64,AA==">', None),
        ('<link rel="canonical" href="https://example.org/">', None),
        ('<a href="c.html">', "c.html is not there"),
        ('<a href="b.html#gone">', "b.html#gone has no such anchor"),
        ('<a href="#gone">', "#gone has no such anchor"),
        ('<a href="../outside.html">', "../outside.html is outside the site"),
        ('<a href="/b.html">', "/b.html is outside the site"),
        ('<a href="repository:b.html">', "repository:b.html is no link of a page"),
        (
            '<script src="https://cdn.example.org/x.js"></script>',
            "https://cdn.example.org/x.js is fetched from elsewhere",
        ),
        ('<script src="//cdn.example.org/x.js"></script>', "//cdn.example.org/x.js is fetched from elsewhere"),
        ('<link rel="stylesheet" href="http://e.org/x.css">', "http://e.org/x.css is fetched from elsewhere"),
        ('<link rel="preconnect" href="https://fonts.e.org">', "https://fonts.e.org is fetched from elsewhere"),
        ('<style>@import "https://e.org/x.css";</style>', "https://e.org/x.css is fetched from elsewhere"),
        ('<p style="background: url(https://e.org/x.png)">', "https://e.org/x.png is fetched from elsewhere"),
        ('<img srcset="https://e.org/x.png 2x">', "https://e.org/x.png is fetched from elsewhere"),
        ('<img src="gone.png">', "gone.png is not there"),
    ],
)
def test_check_finds(html, said, tmp_path):
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<p id="there">')
    assert check.problems(tmp_path) == ([f"a.html: {said}"] if said else [])


def test_check_reads_style_sheets(tmp_path):
    (tmp_path / "x.css").write_text(
        '@font-face { src: url("https://fonts.e.org/x.woff2") } p { background: url(x.css) }'
    )
    assert check.problems(tmp_path) == ["x.css: https://fonts.e.org/x.woff2 is fetched from elsewhere"]


# ---- in a browser, from the disk ----


@pytest.fixture(scope="module")
def browser():
    with chromium("--blink-settings=imagesEnabled=false") as browser:
        yield browser


@pytest.fixture
def open_page(site, browser):
    contexts, wrong = [], []

    def open_it(address, width):
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
        name, _, query = address.partition("?")
        page.goto((site / name).as_uri() + ("?" + query if query else ""))
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert wrong == []


def test_no_page_is_wider_than_the_screen(site, open_page):
    page = open_page("index.html", 390)
    pages = [
        path for path in sorted(site.rglob("*.html")) if path.name != "flash_attention.html"
    ]  # test_page.py has it
    few = {"index.html", "attention.html", "forward.html", "flash_attn.html", "flash_attn_minimal.cu.html"}
    wide = []
    for path in pages:
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        for width in (320, 1280, 390) if path.name in few else (390,):
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wide.append(f"{path.relative_to(site)} at {width}")
        if not page.evaluate("[...document.images].every(image => getComputedStyle(image).maxWidth == '100%')"):
            wide.append(f"{path.relative_to(site)}: a picture")
    assert len(pages) > 100 and wide == []


def test_search_answers_without_a_server(open_page):
    for words, expected in (
        ("fa_kvcache_attention", "flash_attn.h"),
        ("softcap", "Attention"),
        ("ping-pong", "Hopper"),
    ):
        page = open_page(f"search.html?q={words}", 1280)
        page.wait_for_selector("#search-results li a")
        page.wait_for_function("!document.querySelector('#search-progress')?.textContent.includes('Searching')")
        titles = page.eval_on_selector_all("#search-results li > a", "links => links.map(a => a.textContent)")
        assert any(expected in title for title in titles), (words, titles)
        page.wait_for_selector("#search-results li p.context mark")
        excerpts = page.eval_on_selector_all("#search-results p.context", "all => all.map(one => one.textContent)")
        assert all(words.split("-")[0] in excerpt.lower() for excerpt in excerpts[:1]) and len(excerpts[0]) < 300


def test_menu_opens_on_a_phone(open_page):
    page = open_page("docs/learn/03_tiles.html", 390)
    entry = page.locator(".sidebar-tree a", has_text="Quick reference").first
    assert entry.bounding_box()["x"] < 0
    page.locator(".mobile-header label[for=__navigation]").click()
    page.wait_for_function("document.querySelector('.sidebar-drawer').getBoundingClientRect().left >= 0")
    entry.click()
    page.wait_for_url("**/QUICK_REFERENCE.html")
