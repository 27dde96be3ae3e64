"""docs/learn: code, numbers and links are up to date, Python runs, and figures equal those that their script draws."""

import contextlib
import doctest
import io
import json
import os
import re
import sys

import pytest
from conftest import ROOT

if not (ROOT / "ladder").is_dir() or not (ROOT / "docs/benchmarks/h200").is_dir():
    pytest.skip("the ladder or the measurements are not beside the tests", allow_module_level=True)

sys.path.insert(0, str(ROOT))

from ladder import snippets, symbols  # noqa: E402

PAGES = snippets.pages()
FIGURES = ROOT / "docs/learn/figures"
CHAPTERS = [page for page in PAGES if page.name[:2].isdigit()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_fresh_and_their_links_live(page):
    assert snippets.problems(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_and_print_what_the_page_says(page):
    # A block that quotes a source follows a `code` comment, and is not a complete program.
    text = snippets.CODE.sub("", page.read_text())
    for code, output in re.findall(r"^```python\n(.*?)^```\n+(?:```text\n(.*?)^```)?", text, re.M | re.S):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, page.name, "exec"), {})
        assert said.getvalue() == output


def test_every_chapter_is_in_the_list_and_has_its_parts():
    contents = (ROOT / "docs/learn/README.md").read_text()
    assert [int(page.name[:2]) for page in CHAPTERS] == list(range(1, len(CHAPTERS) + 1))
    for page in CHAPTERS:
        text = page.read_text()
        assert f"({page.name})" in contents, page.name
        for part in ("The idea", "The code", "Measured", "Exercise"):
            assert re.search(rf"^## {part}", text, re.MULTILINE), f"{page.name} has no section {part}"
        assert re.search(r"!\[[^\]]+\]\(", text), f"{page.name} shows no figure"
        assert "<!-- code: " in text, f"{page.name} quotes no source"


def test_every_answer_names_the_code_that_it_speaks_of():
    questions = (ROOT / "docs/learn/questions.md").read_text().split("\n### ")[1:]
    assert len(questions) > 40
    for text in questions:
        assert re.search(r"\]\(\.\./\.\./[\w/.-]+\.(?:py|cuh?|c|h|cpp)#", text.split("\n## ")[0]), text.split("\n")[0]


def test_no_page_is_unfinished():
    for page in PAGES:
        assert not re.search(r"\b(TODO|TBD|FIXME|XXX)\b", page.read_text()), page.name


def test_every_exercise_stands_in_a_chapter():
    shown = set(re.findall(r"\(exercises/(\w+\.py)\)", "".join(page.read_text() for page in CHAPTERS)))
    assert shown == {path.name for path in (ROOT / "docs/learn/exercises").glob("[0-9]*.py")}


# ---- figures ----


def test_every_figure_is_shown_and_there():
    shown = set(re.findall(r"!\[.+?\]\(figures/(\w+\.svg)\)", "".join(page.read_text() for page in PAGES)))
    assert shown == {path.name for path in FIGURES.glob("*.svg")}


def test_the_script_draws_the_figures_again(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from ladder import figures

    figures.draw(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in FIGURES.glob("*.svg")}
    for drawn in tmp_path.iterdir():
        committed = (FIGURES / drawn.name).read_text()
        if f"Matplotlib v{matplotlib.__version__}," not in committed:
            pytest.skip(f"{drawn.name} is not from matplotlib {matplotlib.__version__}")
        assert drawn.read_text() == committed, f"run python -m ladder.figures: {drawn.name} differs"


# ---- faults that the command must notice ----

PAGE = """# Page

<!-- code: cuda/device/ring.cuh#Ring::next -->
```cuda
__device__ __forceinline__ void next() {
    if (++slot == kSlots) slot = 0, phase ^= 1;
}
```

A number: <!-- value: docs/benchmarks/h200/ladder.json {kernel=naive us} / {kernel=naive us} :.1f -->1.0<!-- / -->.

<!-- table: docs/benchmarks/h200/ladder.json
row: naive | kernel=naive
column: heads | {nheads}
column: of itself | {us} / {us} :.2f
-->

|  | heads | of itself |
| --- | ---: | ---: |
| naive | 16.0 | 1.00 |

<!-- end -->
"""


def test_a_fresh_page_stays_as_it_is():
    assert snippets.filled(PAGE) == PAGE


@pytest.mark.parametrize("old, new", [("++slot", "++slots"), (">1.0<", ">1.1<"), ("| 1.00 |", "| 2.00 |")])
def test_stale_places_are_filled_again(old, new):
    assert old in PAGE
    assert snippets.filled(PAGE.replace(old, new)) == PAGE


def test_a_query_of_another_file_does_not_take_the_conditions_of_the_row():
    own, other = ("docs/benchmarks/h200/ladder.json", "docs/benchmarks/amd-epyc/cpu.json")
    query = f"{{us}} / {{@{other} system=copy us}} :.9f"
    rows = [json.loads((ROOT / file).read_text())["rows"] for file in (own, other)]
    (mine,), (copy,) = ([r["us"] for r in rows[0] if r.get("kernel") == "naive"],
                        [r["us"] for r in rows[1] if r["system"] == "copy"])  # fmt: skip
    assert snippets.number(own, query, "kernel=naive") == f"{mine / copy:.9f}"


def test_a_column_about_a_rung():
    table = "docs/benchmarks/h200/languages.json\nrow: x | system=c_tiles\ncolumn: idea | about"
    assert snippets._table(table).endswith("| --- | --- |\n| x | online softmax: a tile of S in the cache |\n")


def test_the_examples_in_docstrings():
    failed, tried = doctest.testmod(snippets)
    assert tried >= 2 and not failed


def test_an_empty_code_comment_is_filled():
    assert snippets.filled(re.sub(r"```cuda.*?```\n", "", PAGE, flags=re.DOTALL)) == PAGE


@pytest.mark.parametrize(
    "text, said",
    [
        ("a <!-- value: docs/benchmarks/h200/ladder.json {system=ours us} -->1<!-- / -->", "4 rows have"),
        ("a <!-- value: docs/benchmarks/h200/ladder.json {kernel=none us} -->1<!-- / -->", "no rows have"),
        ("a <!-- value: docs/benchmarks/h200/ladder.json {kernel=naive us} -->1", "has no end"),
        ("<!-- value: docs/benchmarks/h200/ladder.json {kernel=naive us} -->1<!-- / -->", "begins with"),
        ("text <!-- code: cuda/device/ring.cuh#Ring -->\n", "cannot be filled"),
        ("<!-- code: cuda/device/ring.cuh#Rings -->\n", "no definitions of Rings"),
        ('<!-- code: cuda/device/ring.cuh "wait_" .. "}" -->\n', "2 lines with 'wait_'"),
        ('<!-- code: cuda/device/ring.cuh "void next" .. "nothing" -->\n', "no line with 'nothing'"),
    ],
)  # fmt: skip
def test_places_that_cannot_be_filled(text, said):
    with pytest.raises((snippets.Stale, symbols.NotFound), match=re.escape(said)):
        snippets.filled(text)


def test_dead_links(tmp_path):
    page, code = tmp_path / "page.md", tmp_path / "code.cuh"
    code.write_text("// void commented();\nstruct Real { int a; };\nint function(int x) { return Real{x}.a; }\n")
    dead = ["none.md", "code.cuh#commented", "code.cuh#Unreal", "#nothing"]
    links = [*dead, "code.cuh", "code.cuh#Real", "code.cuh#function", "#a-page-of-links", "https://example.org/x"]
    page.write_text("# A page of `links`\n\n" + " ".join(f"[x]({link})" for link in links))
    assert snippets.dead_links(page) == dead


def test_the_command_checks_and_fills(tmp_path, monkeypatch):
    monkeypatch.setattr(snippets, "FOLDER", tmp_path)
    monkeypatch.setattr(snippets, "ROOT", ROOT)
    relative = os.path.relpath(ROOT, tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("++slot", "slot++") + f"\n[ring]({relative}/cuda/device/ring.cuh#Ring)\n")
    monkeypatch.setattr(type(page), "relative_to", lambda self, other: self.name)
    said = []
    assert snippets.main(["--check"], said.append) == 1
    assert said == ["page.md is stale: run python -m ladder.snippets"]
    assert snippets.main([], said.append) == 0
    assert snippets.main(["--check"], said.append) == 0
    assert said[1:] == ["filled page.md"]


# ---- symbols ----

CPP = """\
int declared(int x);
#define MACRO(x) \\
    (x + 1)
// About twice.
template <typename T, int kD>
__global__ void __launch_bounds__(kD * 2, 1)
    twice(const T* x) {
    if (once(x)) { call("}"); }  // }
}
struct alignas(16) Outer {
    static constexpr int kSize = 4;  // of it
    float f() const { return kSize; }
};
void user() {
    const auto lambda = [&](int x) {
        return x;
    };
    twice<int, 2>(nullptr);
    if (declared(1)) { return; }
}
enum class Kind { kOne };
"""


@pytest.mark.parametrize(
    "symbol, first, last",
    [
        ("declared", "int declared(int x);", "int declared(int x);"),
        ("MACRO", "#define MACRO(x) \\", "    (x + 1)"),
        ("twice", "// About twice.", "}"),
        ("Outer", "struct alignas(16) Outer {", "};"),
        ("Outer::f", "float f() const { return kSize; }", "float f() const { return kSize; }"),
        ("kSize", "static constexpr int kSize = 4;  // of it", "static constexpr int kSize = 4;  // of it"),
        ("lambda", "const auto lambda = [&](int x) {", "};"),
        ("Kind", "enum class Kind { kOne };", "enum class Kind { kOne };"),
    ],
)  # fmt: skip
def test_symbols_of_cpp(tmp_path, symbol, first, last):
    path = tmp_path / "a.cuh"
    path.write_text(CPP)
    lines = symbols.source_of(path, symbol).splitlines()
    assert (lines[0], lines[-1]) == (first, last)


@pytest.mark.parametrize("symbol", ["call", "once", "x", "nothing", "Outer::kD", "nullptr"])
def test_uses_are_no_definitions(tmp_path, symbol):
    path = tmp_path / "a.cuh"
    path.write_text(CPP)
    assert not symbols.has_symbol(path, symbol)


def test_symbols_of_python(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import x\n\nA: int = 1\n\n\nclass B:\n    @property\n    def c(self):\n        return x\n")
    assert symbols.source_of(path, "A") == "A: int = 1"
    assert symbols.source_of(path, "B.c") == "@property\ndef c(self):\n    return x"
    assert not symbols.has_symbol(path, "x") and not symbols.has_symbol(path, "c")
