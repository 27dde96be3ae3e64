"""docs/learn/flash_attention.html is up to date with its sources, and in a browser its numbers equal the
reference's."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SEED
from headless import chromium

SOURCES = ROOT / "ladder/page"
PAGE = ROOT / "docs/learn/flash_attention.html"
if not SOURCES.is_dir():
    pytest.skip("the ladder is not beside the tests", allow_module_level=True)
sys.path[:0] = [str(SOURCES), str(ROOT)]

import examples  # noqa: E402
import recording  # noqa: E402
from ladder import variants  # noqa: E402
from ladder.page import record  # noqa: E402

EXAMPLES = json.loads(examples.FILE.read_text())
ORDERS = ("standard", "v1", "v2")
TOLERANCE = {32: 5e-6, 64: 1e-13}  # outputs are of order 1


def build(folder, *arguments):
    return subprocess.run(
        [sys.executable, folder / "ladder/page/build.py", *arguments], capture_output=True, text=True, timeout=60
    )


# ---- the sources ----


def test_committed_page_is_what_its_sources_make():
    done = build(ROOT, "--check")
    assert done.returncode == 0, done.stderr


def test_a_stale_page_and_broken_sources_are_found(tmp_path):
    shutil.copytree(SOURCES, tmp_path / "ladder/page")
    assert "is not what its sources make" in build(tmp_path, "--check").stderr
    assert build(tmp_path).returncode == 0 and build(tmp_path, "--check").returncode == 0
    assert (tmp_path / "docs/learn" / PAGE.name).read_bytes() == PAGE.read_bytes()
    style = tmp_path / "ladder/page/style.css"
    style.write_text(style.read_text() + "\n/* later */\n")
    assert build(tmp_path, "--check").returncode == 1
    twice = tmp_path / "ladder/page/timeline.js"
    twice.write_text(twice.read_text() + "\nfunction describe() {}\n")
    assert "timeline.js and draw.js both declare describe" in build(tmp_path).stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["name"])
def test_examples_hold_the_answers_of_the_reference(example):
    q, k, v = (np.array(example[name]) for name in "qkv")
    out, lse = examples.exact(q, k, v, example["settings"]["causal"])
    np.testing.assert_allclose(example["out"], out, rtol=0, atol=1e-13)
    np.testing.assert_allclose([-np.inf if x is None else x for x in example["lse"]], lse, rtol=0, atol=1e-13)
    assert all((64 * x == np.round(64 * x)).all() for x in (q, k, v))


def test_examples_show_what_their_names_say():
    assert [example["name"] for example in EXAMPLES] == list(examples.EXAMPLES)
    by_name = {example["name"]: example for example in EXAMPLES}
    assert None in by_name["Rows that see nothing: more rows than keys"]["lse"]
    rising = by_name["The maximum keeps rising"]
    scores = np.array(rising["q"]) @ np.array(rising["k"]).T
    tiles = scores.reshape(len(scores), -1, rising["settings"]["tileN"]).max(2)
    assert (np.diff(np.maximum.accumulate(tiles, axis=1), axis=1) > 0).mean() > 0.8


def test_time_line_is_a_valid_recording_or_the_model():
    text = recording.FILE.read_text()
    trace = json.loads(text)
    recording.check(trace)
    if trace["source"].startswith("model:"):
        assert text == recording.dump(recording.model()), "run python ladder/page/recording.py"


def test_model_of_the_schedule_keeps_the_rules_of_the_kernel():
    trace = recording.model(tiles=6, stages=2)
    recording.check(trace)

    def of(event, tile, role=None):
        return [e for e in trace["events"] if (e["event"], e["tile"]) == (event, tile) and role in (None, e["role"])]

    busy = sorted((e["begin_ns"], e["end_ns"]) for e in trace["events"] if e["event"] in ("scores", "values"))
    assert len(busy) == 2 * 2 * 6
    assert all(end <= begin + 1 for (_, end), (begin, _) in zip(busy, busy[1:], strict=False))  # one product at a time
    for tile in range(6):
        for operand, reader in (("K", "scores"), ("V", "values")):
            (copy,) = (e for e in of("copy", tile) if e["operand"] == operand)
            reads = of(reader, tile)
            assert len(reads) == 2 and copy["end_ns"] <= min(e["begin_ns"] for e in reads) + 1
            for later in of("copy", tile - 2):  # it takes the stage of this tile
                if later["operand"] == operand:
                    assert later["begin_ns"] >= max(e["end_ns"] for e in reads) - 1
        for role in ("consumer0", "consumer1"):
            (scores,), (softmax,), (values,) = (of(event, tile, role) for event in ("scores", "softmax", "values"))
            assert scores["end_ns"] <= softmax["begin_ns"] and softmax["end_ns"] <= values["begin_ns"] + 1


def test_stamps_become_a_recording():
    """Two items of one consumer and the producer, with hand-made clocks; the second item is shown."""
    event = record.EVENT
    consumer = [
        (0, "wait_item", 0), (40, "epilogue", 0), (50, "wait_item", 0), (60, "wait_keys", 1), (100, "scores", 1),
        (110, "wait_scores", 1), (600, "softmax", 1), (900, "rescale", 1), (950, "wait_keys", 0), (951, "wait_turn", 0),
        (1000, "scores", 0), (1010, "wait_values", 1), (1020, "product", 1), (1030, "wait_scores", 0),
        (1500, "softmax", 0), (1900, "wait_product", 1), (2100, "rescale", 0), (2150, "wait_values", 0),
        (2160, "product", 0), (2170, "wait_product", 0), (2700, "epilogue", 0), (3000, "wait_item", 0),
    ]  # fmt: skip
    producer = [
        (0, "wait_item", 0),
        (45, "wait_item", 0),
        (46, "wait_keys", 1),
        (56, "copied", 1),
        (60, "wait_keys", 0),
    ]
    producer += [(160, "copied", 0), (170, "wait_values", 1), (180, "copied", 1), (190, "wait_item", 0)]
    block = np.zeros(variants.TRACE_ROLES, variants.ROLE)
    for role, stamps in ((0, producer), (1, consumer)):
        item = -1
        block[role]["count"] = len(stamps)
        for i, (clock, name, tile) in enumerate(stamps):
            item += name == "wait_item"
            block[role]["stamps"][i] = (10_000 + clock, tile, item, event[name])
    trace = record.recorded(block, 1, 1, 1000.0, source="hand", stages=2)  # at 1 GHz a cycle is a nanosecond
    recording.check(trace)
    assert trace["tiles"] == 2
    found = {(e["event"], e["tile"], e.get("operand"), e["begin_ns"] + 46, e["end_ns"] + 46) for e in trace["events"]}
    assert {
        ("copy", 1, "K", 56, 100), ("copy", 0, "K", 160, 951), ("wait_full", 1, "K", 60, 100),
        ("scores", 1, None, 100, 600), ("scores", 0, None, 1000, 1500), ("softmax", 0, None, 1500, 1900),
        ("values", 1, None, 1500, 2100),  # issued at 1020, after the scores of tile 0
        ("values", 0, None, 2160, 2700),
    } <= found  # fmt: skip
    assert not [e for e in trace["events"] if e["begin_ns"] + 46 > 2700 or e["end_ns"] + 46 > 2700]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"source": ""}, "source"),
        ({"clock_mhz": 0}, "clock_mhz is 0"),
        ({"events": []}, "no events"),
        ({"role": "consumer7"}, "role is 'consumer7'"),
        ({"event": "copy", "role": "consumer0"}, "event is 'copy', not one of"),
        ({"tile": 8}, "tile is 8"),
        ({"operand": "Q"}, "operand is 'Q'"),
        ({"end_ns": -1}, "lasts from"),
        ({"begin_ns": float("nan")}, "lasts from nan"),
    ],
)
def test_a_wrong_recording_is_refused_by_its_field(change, said):
    trace = recording.model()
    (trace if change.keys() <= trace.keys() else trace["events"][0]).update(change)
    with pytest.raises(ValueError, match=re.escape(said)):
        recording.check(trace)


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser):
    """open_page(fragment, **context) returns the page when it is ready. After the test: there was no error, and no
    request to the network."""
    contexts, wrong = [], []

    def open_it(fragment="", *, file=PAGE, reduced_motion="reduce", **options):
        context = browser.new_context(reduced_motion=reduced_motion, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10000)
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
        page.goto(file.as_uri() + fragment)
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture(scope="module")
def shared(browser):
    """One page, shared by tests that set everything they need."""
    page = browser.new_page()
    page.goto(PAGE.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    yield page
    page.close()


def until(page, condition):
    """Waits for a condition. Playwright's own wait evaluates strings, which the page's content security policy
    forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


def slide(page, name, value):
    page.eval_on_selector(f"#{name}", "(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }", str(value))


def assert_right(page, precision, exact):
    """Checks that every order ends at the exact answer, and that the page says so."""
    for order in ORDERS:
        got = page.evaluate("order => { const {out, lse} = picture.walks()[order]; return {out, lse}; }", order)
        for mine, theirs in zip((got["out"], got["lse"]), exact, strict=True):
            np.testing.assert_allclose(np.array(mine, float), theirs, rtol=0, atol=TOLERANCE[precision], err_msg=order)


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=[example["name"] for example in EXAMPLES])
def test_example_equals_the_reference(shared, number, precision):
    shared.select_option("#example", str(number))
    shared.check(f"input[name=precision][value='{precision}']", force=True)
    example = EXAMPLES[number]
    assert_right(shared, precision, (example["out"], [-np.inf if x is None else x for x in example["lse"]]))
    assert shared.evaluate("picture.difference()") < TOLERANCE[precision]
    assert "the Python reference" in shared.inner_text("#check")
    if precision == 32 and number != 0:
        assert shared.evaluate("picture.difference()") > 1e-9, "float32 that is too good to be float32"


LEAST = {"seqlenQ": 1, "seqlenK": 1, "headdim": 1, "tileM": 2, "tileN": 2, "seed": 1}
MOST = {"seqlenQ": 32, "seqlenK": 32, "headdim": 16, "tileM": 16, "tileN": 16, "seed": 99}
RUNS = """(order) => picture.walks()[order].steps.filter(({kind}) => kind === "exp")
    .map(({rows, keys, chip: {m, l}}) => ({rows, keys, m, l}))"""


@pytest.mark.parametrize("case", range(6))
def test_random_settings_equal_the_reference_at_every_step(shared, case):
    rng = np.random.default_rng((SEED, case))
    setting = {name: int(rng.integers(least, MOST[name] + 1)) for name, least in LEAST.items()}
    causal, order, precision = bool(rng.integers(2)), ORDERS[case % 3], (32, 64)[int(rng.integers(2))]
    for name, value in setting.items():
        slide(shared, name, value)
    shared.set_checked("#causal", causal)
    shared.check(f"input[name=order][value={order}]", force=True)
    shared.check(f"input[name=precision][value='{precision}']", force=True)
    q, k, v = (np.array(x) for x in shared.evaluate("(({q, k, v}) => [q, k, v])(picture.inputs())"))
    assert q.shape == (setting["seqlenQ"], setting["headdim"]) and k.shape == v.shape
    assert len(k) == setting["seqlenK"] and np.abs(q).max() < 10 and len(np.unique(q)) >= (q.size + 1) // 2
    assert_right(shared, precision, examples.exact(q, k, v, causal))

    # m and l of every row in every tile, against a softmax of the keys up to there
    met = shared.evaluate(RUNS, order)
    assert met
    scores = q @ k.T / np.sqrt(setting["headdim"])
    i, j = np.indices(scores.shape)
    if causal:
        scores[j > i + len(k) - len(q)] = -np.inf
    for step in met:
        seen = scores[slice(*step["rows"]), : step["keys"][1]]
        m = seen.max(1)
        np.testing.assert_allclose(np.array(step["m"], float), m, rtol=0, atol=TOLERANCE[precision] * 4)
        total = np.exp(seen - np.where(np.isneginf(m), 0, m)[:, None]).sum(1)
        np.testing.assert_allclose(np.array(step["l"], float), total, rtol=TOLERANCE[precision] * 10, atol=0)


def test_bytes_by_hand(shared):
    """6 rows, 8 keys, headdim 3, tiles of 4 x 4. The causal mask leaves all tiles: row 3 sees keys 0 to 5."""
    size = {"seqlenQ": 6, "seqlenK": 8, "headdim": 3, "tileM": 4, "tileN": 4, "causal": True}
    shared.evaluate("(size) => picture.change({example: -1, ...size})", size)
    row, inputs = 3 * 2, (6 + 8 + 8) * 3 * 2
    carried = 3 * 4 + 8  # a row of v1's O with m and l
    expected = {
        "standard": inputs + 6 * row + 4 * 6 * 8 * 4,
        "v1": 2 * 8 * row + 6 * carried + 2 * 6 * (row + 2 * carried) + 6 * 3 * (4 + 2),
        "v2": 6 * row + 2 * 2 * 8 * row + 6 * (row + 4),
    }
    for order, bytes_moved in expected.items():
        assert shared.evaluate("(order) => picture.walks()[order].bytes", order) == bytes_moved, order
    shared.evaluate("picture.change({order: 'v2'})")
    shared.evaluate("picture.go(Infinity)")
    shown = shared.inner_text("[data-order=v2]").replace("\u202f", "")
    assert f"{expected['v2']} of {expected['v2']} bytes" in shown


def test_bytes_are_those_of_the_traffic_experiment(shared):
    model = pytest.importorskip("flash_attn_lab.experiments._traffic", reason="no experiments in this checkout")
    for seqlen, headdim, m, n in ((32, 16, 8, 4), (29, 7, 5, 12), (8192, 128, 128, 128)):
        for causal in (False, True):
            problem, tile = model.Problem(seqlen, headdim, causal), model.Tile(m, n)
            expected = [model.standard(problem), model.v1(problem, tile), model.v2(problem, tile)]
            size = {"seqlenQ": seqlen, "seqlenK": seqlen, "headdim": headdim, "tileM": m, "tileN": n, "causal": causal}
            counted = "(size) => ['standard', 'v1', 'v2'].map((order) => picture.bytesOf({...size, order}))"
            assert shared.evaluate(counted, size) == expected


def test_counted_bytes_follow_the_formula(shared):
    wrong = shared.evaluate("""() => {
        const wrong = [];
        for (let n = 0; n < 20; ++n) {
            const size = {seqlenQ: 1 + n * 7 % 32, seqlenK: 1 + n * 11 % 32, headdim: 1 + n % 16};
            const settings = {...size, tileM: 2 + n % 7, tileN: 2 + n % 5, causal: n % 2 === 1, example: -1};
            picture.change(settings);
            for (const [order, walk] of Object.entries(picture.walks()))
                if (walk.bytes !== picture.bytesOf({...settings, order})) wrong.push({...settings, order});
        }
        return wrong;
    }""")
    assert wrong == []


def test_playing_an_example_to_its_end(open_page):
    page = open_page("#example=1&order=v2&row=9")
    slide(page, "speed", 5)  # 30 steps a second
    page.click("#play")
    assert page.inner_text("#play") == "Pause" and page.get_attribute("#step-text", "aria-live") == "off"
    until(page, "!picture.state.playing")
    assert page.inner_text("#play") == "Play" and page.get_attribute("#step-text", "aria-live") == "polite"
    last = page.evaluate("picture.walks().v2.steps.length - 1")
    assert page.evaluate("picture.state.index") == last and page.inner_text("#count") == f"{last} / {last}"
    shown = page.locator("#row-numbers td.o").all_inner_texts()
    np.testing.assert_allclose([float(x.replace("−", "-")) for x in shown], EXAMPLES[1]["out"][9], rtol=0, atol=0.0051)
    assert page.inner_text("#step-text").startswith("Done.")


def test_a_causal_run_skips_tiles_and_shows_the_maximum_move(open_page):
    page = open_page("#example=1&order=v2&row=9")
    kinds = page.evaluate("picture.walks().v2.steps.map(({kind}) => kind)")
    assert kinds.count("skip") == 3 and kinds.count("values") == 4 + 3 + 2 + 1
    page.evaluate(f"picture.go({kinds.index('skip')})")
    assert "are skipped: no copy, no work" in page.inner_text("#step-text")
    assert page.locator("#memory .tile-skipped").count() == 1
    moved = page.evaluate("picture.walks().v2.steps.findIndex(({moved}) => moved?.some(Boolean))")
    page.evaluate(f"picture.go({moved})")
    assert re.match(r"The maximum moves in \d of 4 rows", page.inner_text("#step-text"))
    assert page.locator("#chip .moved").count() >= 2  # m and the factor


def test_keys(open_page):
    page = open_page("#example=1&row=5")
    state = lambda name: page.evaluate(f"picture.state.{name}")  # noqa: E731
    press = page.keyboard.press
    press("ArrowRight"), press("ArrowRight"), press("ArrowLeft")
    assert state("index") == 1
    press("End")
    assert state("index") == page.evaluate("picture.walks().v2.steps.length - 1")
    press("Home")
    assert state("index") == 0
    press("j"), press("j"), press("k")
    assert state("row") == 6 and page.inner_text("#row-title") == "Row 6, in numbers"
    for key, order in zip("123", ORDERS, strict=True):
        press(key)
        assert state("settings.order") == order and page.is_checked(f"input[name=order][value={order}]")
    press("c")
    assert state("settings.causal") is False and not page.is_checked("#causal")
    press("+")
    assert state("speed") == 3
    press("Space")
    assert state("playing")
    press("Space")
    assert not state("playing")
    press("r")
    assert page.input_value("#example") == "-1"

    press("Home")
    page.focus("#seqlenQ")  # a slider keeps its arrows
    press("ArrowLeft")
    assert state("index") == 0 and state("settings.seqlenQ") == 15
    page.focus("#memory")
    press("ArrowDown"), press("ArrowDown"), press("ArrowUp")
    assert state("row") == 7
    outline = page.evaluate("getComputedStyle(document.getElementById('memory')).outlineStyle")
    assert outline == "solid"
    page.focus("#play")
    press("Space")  # the button's own key: once, not twice
    assert state("playing")
    press("Space")
    page.uncheck("#shortcuts")
    page.focus("#memory")
    press("c"), press("2")
    assert state("settings.causal") is False and state("settings.order") == "v2"


def test_every_control_can_be_reached_and_has_a_name(open_page):
    page = open_page()
    nameless = page.evaluate("""[...document.querySelectorAll("button, input, select, [tabindex]")].filter((e) => {
        const labels = [...e.labels ?? []].map((label) => label.innerText);
        return ![e.getAttribute("aria-label"), e.innerText, ...labels].some((name) => name?.trim());
    }).map((e) => e.outerHTML)""")
    assert nameless == []
    visited = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        visited.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"theme", "example", "order", "causal", "memory", "row", "first", "play", "seek", "gantt", "time"} <= visited


LARGE = "#q=32&k=32&d=16&m=16&n=16"


@pytest.mark.parametrize("fragment", ["", LARGE + "&order=v1", LARGE + "&order=standard&step=8"])
def test_phone(open_page, fragment):
    page = open_page(fragment, viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator("#next").tap()
    for picture in ("#memory", "#chip"):
        assert page.eval_on_selector(picture, "(e) => e.scrollWidth <= e.clientWidth")
    box = page.evaluate("(({x, y, w, h}) => ({x: x + w / 2, y: y + 0.9 * h}))(picture.memory.boxes.S)")
    page.locator("#memory").tap(position=box)
    rows = page.evaluate("picture.state.settings.seqlenQ")
    assert page.evaluate("picture.state.row") == int(0.9 * rows)
    for button in page.locator(".transport button").all():
        assert button.bounding_box()["height"] >= 40 and button.bounding_box()["width"] >= 36


def test_a_phone_shows_blocks_and_sums_of_the_backward_pass(open_page):
    page = open_page("#example=1", viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    slide(page, "gradient-step", 99)
    edge = "document.querySelector('#gradient-grid').parentElement.getBoundingClientRect().right"
    assert (
        page.eval_on_selector("#gradient-grid .sum", "(e) => e.getBoundingClientRect().right")
        <= page.evaluate(edge) + 4
    )


@pytest.mark.parametrize("width, height", [(1280, 720), (390, 844)])
def test_play_brings_the_picture_into_view(open_page, width, height):
    page = open_page(viewport={"width": width, "height": height})
    seen = """() => {
        const {top, bottom} = document.getElementById("memory").getBoundingClientRect();
        return top > 0 && bottom <= document.querySelector(".transport").getBoundingClientRect().top;
    }"""
    assert not page.evaluate(seen)
    page.click("#play")
    until(page, "picture.state.index > 1")
    assert page.evaluate(seen)
    at = page.evaluate("scrollY")
    page.click("#play")
    page.click("#play")  # in view already: the page stays where it is
    assert page.evaluate("scrollY") == at


def test_a_window_without_a_width(open_page):
    """As in a frame that is hidden. The page's errors are the judge, and no rectangle is drawn inside out."""
    page = open_page(LARGE + "&step=5", viewport={"width": 1, "height": 400})
    page.eval_on_selector("main", "(main) => { main.style.width = 0; }")
    page.evaluate("picture.change({order: 'standard'}, {restart: false})")
    widths = page.evaluate("[...document.querySelectorAll('rect')].map((rect) => +rect.getAttribute('width'))")
    assert len(widths) > 1000 and min(widths) >= 0


def test_dark_and_light(open_page):
    background = "getComputedStyle(document.body).backgroundColor"
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        for text, behind in (("body", "body"), (".note", ".panel"), *((f".lead .{name}", "body") for name in "qkvo")):
            assert contrast(page, text, behind) >= 4.5, (scheme, text)
    dark = page.evaluate(background)
    page.click("#theme")
    assert page.inner_text("#theme-name") == "light" and page.evaluate(background) != dark
    page.keyboard.press("t")
    assert page.inner_text("#theme-name") == "dark" and page.evaluate(background) == dark


def contrast(page, text, behind):
    """WCAG's contrast ratio of two colours of the page."""
    style = "(element, name) => getComputedStyle(element)[name]"
    colours = page.eval_on_selector(text, style, "color"), page.eval_on_selector(behind, style, "backgroundColor")
    light = []
    for colour in colours:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                  for c in (int(x) / 255 for x in re.findall(r"\d+", colour)[:3])]  # fmt: skip
        light.append(float(np.dot(linear, (0.2126, 0.7152, 0.0722))))
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_tiles_fly_unless_motion_is_reduced(open_page):
    step = "() => { picture.go(0); picture.go(1); return document.querySelectorAll('.ghost').length; }"
    calm, lively = open_page(), open_page(reduced_motion="no-preference")
    assert calm.evaluate(step) == 0
    assert lively.evaluate(step) == 1  # Q
    until(lively, "document.querySelectorAll('.ghost').length === 0")


def test_the_address_keeps_the_state(open_page):
    page = open_page("#q=12&k=20&d=5&m=3&n=6&seed=4&order=v1&causal=1&precision=64&row=7&step=11")
    wanted = dict(seqlenQ=12, seqlenK=20, headdim=5, tileM=3, tileN=6, seed=4)
    wanted |= dict(order="v1", causal=True, precision=64, example=-1)
    assert page.evaluate("picture.state.settings") == wanted
    assert page.evaluate("[picture.state.row, picture.state.index]") == [7, 11]
    page.keyboard.press("ArrowRight")
    until(page, "location.hash.includes('step=12')")
    again = open_page("#" + page.evaluate("location.hash.slice(1)"))
    assert again.evaluate("picture.state") == page.evaluate("picture.state")
    odd = open_page("#q=99&k=-3&d=x&order=v9&step=1e9&example=77&row=1.5")
    assert odd.evaluate("picture.state.settings.order") == "v2" and odd.evaluate("picture.state.index") == 0


def test_time_line_says_who_works_when(open_page):
    page, trace = open_page(), json.loads(recording.FILE.read_text())
    said = page.inner_text("#trace-source")
    model = trace["source"].startswith("model:")
    assert said.startswith("A model, not a measurement." if model else "Measured.") and trace["about"] in said
    drawn = page.locator("#gantt .event").count()
    copies = sum(event["event"] == "copy" for event in trace["events"])
    assert drawn == len(trace["events"]) + 2 * copies  # in the ring: arriving, held
    event = next(e for e in trace["events"] if e["event"] == "softmax")
    slide(page, "time", (event["begin_ns"] + event["end_ns"]) / 2)
    assert f"computes the softmax of S({event['tile']})" in page.inner_text("#time-text")
    before = page.evaluate("document.querySelector('#gantt svg').clientWidth")
    slide(page, "zoom", 6)
    assert page.evaluate("document.querySelector('#gantt svg').clientWidth") > 2 * before


def test_a_recording_takes_the_place_of_the_model(open_page, tmp_path):
    """The shortest recording that the format allows, without operands and number of stages; and a third consumer."""
    trace = recording.model(tiles=12)
    bare = [{key: value for key, value in event.items() if key != "operand"} for event in trace["events"]]
    third = [event | {"role": "consumer2"} for event in bare if event["role"] == "consumer1"]
    recorded = {"source": "a block <on> a GPU", "clock_mhz": 1000, "tiles": 12, "events": bare + third}
    shutil.copytree(SOURCES, tmp_path / "ladder/page")
    (tmp_path / "ladder/page/trace.json").write_text(json.dumps(recorded))
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    page = open_page(file=tmp_path / "docs/learn" / PAGE.name)
    assert page.inner_text("#trace-source").strip() == "Measured. a block <on> a GPU."
    names = page.locator("#gantt-names text").all_text_contents()
    assert names[:5] == ["Producer", "K stage 0", "K stage 1", "V stage 0", "V stage 1"]
    assert names[-2:] == ["Consumer 2 products", "Consumer 2 softmax"]
    slide(page, "time", 1e9)
    assert page.inner_text("#time-name").endswith(
        f"cycle {trace['events'][-1]['end_ns'] - trace['events'][0]['begin_ns']}"
    )


# ---- the backward pass, and decode in pieces ----


def partial_gradients(q, k, v, dout, causal, seen):
    """Gradients by the formulas, over the pairs of `seen`; lse and delta are those of all pairs."""
    out, lse = examples.exact(q, k, v, causal)
    scores = q @ k.T / np.sqrt(q.shape[1])
    i, j = np.indices(scores.shape)
    visible = (j <= i + len(k) - len(q)) if causal else np.full(scores.shape, True)
    p = np.where(visible, np.exp(scores - np.where(np.isneginf(lse), 0, lse)[:, None]), 0) * seen
    ds = p * (dout @ v.T - (dout * out).sum(1)[:, None]) / np.sqrt(q.shape[1])
    return {"dq": ds @ k, "dk": ds.T @ q, "dv": p.T @ dout}


SHOWN = """(({given: {q, k, v}, dout, walk: {steps, visits}, same}) => ({q, k, v, dout, visits, same, steps: steps.map(
    ({kind, block, tile, rows, keys, dq, dk, dv, order}) => ({kind, block, tile, rows, keys, dq, dk, dv, order}))}))
    (picture.below.gradients)"""


@pytest.mark.parametrize("case", range(6))
def test_gradients_equal_the_reference_after_every_tile(shared, case):
    rng = np.random.default_rng((SEED, 7, case))
    setting = {name: int(rng.integers(least, MOST[name] + 1)) for name, least in LEAST.items()}
    causal, precision = bool(rng.integers(2)), (32, 64)[case % 2]
    plan = {"owner": ("keys", "rows")[case // 2 % 2], "turns": case >= 4, "seed": case}
    shared.evaluate("(s) => picture.change({example: -1, ...s})", setting | {"causal": causal, "precision": precision})
    shared.evaluate("(plan) => picture.below.gradients.change(plan)", plan)
    shown = shared.evaluate(SHOWN)
    q, k, v, dout = (np.array(shown[name]) for name in ("q", "k", "v", "dout"))
    assert dout.shape == q.shape and np.abs(dout).max() > 0
    seen, last = np.zeros((len(q), len(k))), None
    for step in shown["steps"]:
        if step["kind"] == "tile":
            rows, keys = slice(*step["rows"]), slice(*step["keys"])
            assert not seen[rows, keys].any(), "a tile is computed twice"
            seen[rows, keys] = 1
        exact = partial_gradients(q, k, v, dout, causal, seen)
        for name, array in exact.items():
            tolerance = (1e-5 if precision == 32 else 1e-13) * max(1, np.abs(array).max())
            np.testing.assert_allclose(np.array(step[name]), array, rtol=0, atol=tolerance, err_msg=name)
        last = step
    q4, k4, v4, dout4 = (x[None, :, None] for x in (q, k, v, dout))
    whole = examples.reference.standard_attention_backward(dout4, q4, k4, v4, causal=causal)
    for name, array in zip(("dq", "dk", "dv"), whole[:3], strict=True):
        np.testing.assert_allclose(
            np.array(last[name]), array[0, :, 0], rtol=0, atol=1e-5 * max(1, np.abs(array).max())
        )
    if plan["turns"]:
        assert all(blocks == sorted(blocks) for blocks in last["order"]) and shown["same"]
    met = [
        [block for block, tiles in enumerate(shown["visits"]) if tile in tiles] for tile in range(len(last["order"]))
    ]
    assert [sorted(blocks) for blocks in last["order"]] == met


def test_gradients_of_rows_that_see_nothing_are_zero(shared):
    (number,) = (n for n, example in enumerate(EXAMPLES) if None in example["lse"])
    shared.select_option("#example", str(number))
    steps = shared.evaluate(SHOWN)["steps"]
    empty = [n for n, lse in enumerate(EXAMPLES[number]["lse"]) if lse is None]
    dq = np.array(steps[-1]["dq"], float)
    assert empty and not dq[empty].any() and np.isfinite(dq).all()


def test_who_owns_what_and_in_which_order_it_is_added(open_page):
    page = open_page("#example=1")  # 16 x 16, causal, tiles of 4
    text = lambda: page.inner_text("#gradient-text")  # noqa: E731
    assert "dK and dV will stay on chip" in text()
    assert page.locator("#gradient-grid .skipped").count() == 6
    page.click("#gradient-next")
    assert text().startswith("Block ") and "takes" not in text() and page.locator("#gradient-grid .now").count() == 1
    assert "Another timing gives other bits" in page.inner_text("#gradient-check")
    page.check("input[name=turns][value=turns]", force=True)
    assert "Another timing gives the same bits" in page.inner_text("#gradient-check")
    slide(page, "gradient-step", 99)
    assert page.inner_text("#gradient-count") == "11 / 11" and page.is_disabled("#gradient-next")
    assert page.locator("#gradient-grid .sum").all_inner_texts()[3] == "0 + block 0 + block 1 + block 2 + block 3"
    page.check("input[name=owner][value=rows]", force=True)
    assert "dK and dV took an addition of every block" in text()
    assert page.locator("#gradient-grid tfoot td").all_inner_texts() == ["dQ"] * 4 + [""]
    page.click("#gradient-timing")
    assert page.evaluate("picture.below.gradients.plan.seed") == 2


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("pieces", [1, 3, 5, 12])
def test_pieces_of_keys_merge_to_the_row(shared, precision, pieces):
    setting = {"seqlenQ": 3, "seqlenK": 13, "headdim": 6, "seed": 9, "causal": True, "precision": precision}
    shared.evaluate("(setting) => picture.change({example: -1, ...setting})", setting)
    slide(shared, "pieces", pieces)
    q, k, v = (np.array(x) for x in shared.evaluate("(({q, k, v}) => [q, k, v])(picture.inputs())"))
    shown = shared.evaluate("picture.below.pieces.result")
    out, lse = examples.exact(q, k, v, True)
    size = -(-13 // pieces)
    for n, part in enumerate(shown["parts"]):
        keys = slice(n * size, (n + 1) * size)
        assert part["keys"] == [min(13, n * size), min(13, (n + 1) * size)]
        if part["out"] is None:
            assert part["keys"][0] == 13 and part["weight"] == 0
            continue
        part_out, part_lse = examples.exact(q[-1:], k[keys], v[keys], False)
        np.testing.assert_allclose(part["out"], part_out[0], rtol=0, atol=TOLERANCE[precision])
        np.testing.assert_allclose(part["lse"], part_lse[0], rtol=0, atol=TOLERANCE[precision])
        np.testing.assert_allclose(part["weight"], np.exp(part_lse[0] - lse[-1]), rtol=0, atol=TOLERANCE[precision])
    np.testing.assert_allclose(shown["out"], out[-1], rtol=0, atol=TOLERANCE[precision])
    np.testing.assert_allclose(shown["lse"], lse[-1], rtol=0, atol=TOLERANCE[precision])
    assert ("of the pieces have no key" in shared.inner_text("#pieces-text")) == (pieces == 12)
    assert shared.evaluate("picture.below.pieces.difference") < TOLERANCE[precision]
    assert shared.locator("#pieces-table tbody tr").count() == pieces
