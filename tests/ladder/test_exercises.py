"""The exercises of docs/learn: each judge accepts our solution, refuses mistakes, and names what is not written."""

import ast
import errno
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, SEED

FOLDER = ROOT / "docs/learn/exercises"
if not FOLDER.is_dir() or not (ROOT / "docs/benchmarks/h200").is_dir():
    pytest.skip("docs/learn or the measurements are not beside the tests", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import broken  # noqa: E402
import judging  # noqa: E402
import kernels  # noqa: E402
import simulator  # noqa: E402

SOLUTIONS = FOLDER.parent / "solutions"
EXERCISES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
KERNELS = {path.stem: path.name for path in sorted(FOLDER.glob("[0-9]*.c*"))}
FUNCTIONS = [name for name in EXERCISES if name not in KERNELS]


def parts_of(name):
    exercise = judging.load(FOLDER / f"{name}.py")
    return exercise, judging.parts(vars(exercise), FOLDER / f"{name}.py", solution=True)


def test_exercises_and_solutions_belong_together():
    assert EXERCISES == sorted(path.stem for path in SOLUTIONS.iterdir() if path.is_file())
    assert [int(name[:2]) for name in EXERCISES] == list(range(1, len(EXERCISES) + 1))
    for name in EXERCISES:
        steps, ideas = judging.hints(name)
        assert len({*steps}) == 3 and ideas, name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_judge_accepts_the_solution(name):
    exercise, functions = parts_of(name)
    exercise.judge(**functions)  # a mistake shows its own text
    assert judging.verdict(exercise.judge, functions) == "passed"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_exercise_that_is_not_written_says_so(name, monkeypatch, capsys):
    path = str(FOLDER / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith(f"{name}: not written yet: {parts_of(name)[0].TO_WRITE[0]}(")


def test_the_command_gives_hints():
    command = [sys.executable, str(FOLDER / "02_online_softmax.py")]
    done = subprocess.run([*command, "--hint", "3"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout[:62]) == (0, "02_online_softmax, hint 3: base = where(new_max is -inf, 0, ne")
    done = subprocess.run([*command, "--hint", "4"], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 1 and done.stderr == "usage: python 02_online_softmax.py [--solution | --hint 1, 2 or 3]\n"
    )


def test_the_command_judges_the_solution():
    command = [sys.executable, str(FOLDER / f"{EXERCISES[0]}.py"), "--solution"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{EXERCISES[0]}: passed\n")


# ---- mistakes that readers make first, and what the judge must say about them ----


def without_maximum(scores):
    weight = np.exp(scores)
    return weight / weight.sum(1, keepdims=True), np.log(weight.sum(1))


def one_maximum_for_all_rows(scores):
    p = np.exp(scores - scores.max())
    total = p.sum(1)
    return p / np.where(total == 0, 1, total)[:, None], np.where(total == 0, -np.inf, scores.max() + np.log(total))


def tiles_without_maximum(q, k, v, scale, block_q=64, block_k=64):
    p = np.exp(scale * q @ k.T)
    return p @ v / p.sum(1, keepdims=True), np.log(p.sum(1))


def strips(q, k, v, scale, block_q=64, block_k=64):
    parts = [scores_whole(q[i : i + block_q], k, v, scale) for i in range(0, len(q), block_q)]
    return np.concatenate([out for out, _ in parts]), np.concatenate([lse for _, lse in parts])


def tiles_of_64(q, k, v, scale, block_q=64, block_k=64):
    out, lse = parts_of("03_tiled_forward")[1]["attention"](q, k, v, scale, 64, 64)
    return out if (block_q, block_k) == (64, 64) else out + 1, lse


def smaller_time(operations, moved, peak=989e12, bandwidth=4.8e12):
    return min(operations / peak, moved / bandwidth), "compute" if operations / peak > moved / bandwidth else "memory"


def always_two_bytes(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, element_bytes):
    return 4 * batch * headdim * (nheads * seqlen_q + nheads_k * seqlen_k)


def arrives_before_it_puts(tiles, slots, full, empty, put):
    for tile in range(tiles):
        lap, slot = divmod(tile, slots)
        while not empty[slot].done((lap + 1) % 2):
            yield
        full[slot].arrive()
        put(slot, tile)


def arrives_before_it_takes(tiles, slots, full, empty, take):
    for tile in range(tiles):
        lap, slot = divmod(tile, slots)
        while not full[slot].done(lap % 2):
            yield
        empty[slot].arrive()
        take(slot)


def takes_the_lap_for_the_parity(tiles, slots, full, empty, take):
    for tile in range(tiles):
        lap, slot = divmod(tile, slots)
        while not full[slot].done(lap):
            yield
        take(slot)
        empty[slot].arrive()


def empty_by_the_first_row(outs, lses):
    kept = ~np.isneginf(lses[:, 0])
    if not kept.any():
        return np.zeros(outs.shape[1:]), np.full(lses.shape[1], -np.inf)
    return parts_of("11_split_keys")[1]["combine"](
        np.where(kept[:, None, None], outs, 0), np.where(kept[:, None], lses, -np.inf)
    )


def forgets_numbers_beside_infinities(out, exact, plain, floor=1e-6):
    right = parts_of("13_budget")[1]["within_budget"]
    return bool((out == exact)[np.isinf(exact)].all()) if np.isinf(exact).any() else right(out, exact, plain, floor)


def equal_shares(rank, ranks, n, layout):
    return np.array_split(np.arange(n), ranks)[rank].tolist()


def waits_for_the_lap(tiles, slots, full, empty, read):
    for tile in range(tiles):
        yield full[tile % slots], tile // slots
        read(tile % slots)
        empty[tile % slots].arrive()


def waits_without_a_parity(tiles, slots, full, empty, read):
    for tile in range(tiles):
        yield full[tile % slots]
        read(tile % slots)


def forgets_to_rescale(row_max, row_sum, acc, scores, v):
    new_max = np.maximum(row_max, scores.max(1))
    p = np.exp(scores - np.where(np.isneginf(new_max), 0, new_max)[:, None])
    return new_max, row_sum + p.sum(1), acc + p @ v


def nan_for_masked_tiles(row_max, row_sum, acc, scores, v):
    new_max = np.maximum(row_max, scores.max(1))
    with np.errstate(invalid="ignore"):
        p, factor = np.exp(scores - new_max[:, None]), np.exp(row_max - new_max)
    return new_max, factor * row_sum + p.sum(1), factor[:, None] * acc + p @ v


def scores_whole(q, k, v, scale, block_q=64, block_k=64):
    s = scale * q @ k.T
    top = s.max(1, keepdims=True)
    p = np.exp(s - top)
    return p @ v / p.sum(1, keepdims=True), (top + np.log(p.sum(1, keepdims=True)))[:, 0]


def top_left(row0, rows, seqlen_q, seqlen_k, block_k):
    end = min(row0 + rows, seqlen_k)
    return min(row0 + 1, seqlen_k) // block_k, -(-end // block_k)


def computes_everything(row0, rows, seqlen_q, seqlen_k, block_k):
    return 0, -(-seqlen_k // block_k)


def without_delta(q, k, v, dout, lse, delta, scale):
    p = np.exp(scale * q @ k.T - lse[:, None])
    ds = p * (dout @ v.T)
    return scale * ds @ k, scale * ds.T @ q, p.T @ dout


def heads_dealt_in_turn(q, nheads_k):
    return np.stack([q[:, h::nheads_k].reshape(-1, q.shape[2]) for h in range(nheads_k)])


def nan_of_empty_pieces(outs, lses):
    lse = np.logaddexp.reduce(lses, axis=0)
    with np.errstate(invalid="ignore"):
        return (np.exp(lses - lse)[..., None] * outs).sum(0), lse


def without_shift(outs, lses):
    with np.errstate(all="ignore"):
        weight = np.exp(lses)
        return (weight[..., None] * np.nan_to_num(outs)).sum(0) / weight.sum(0)[:, None], np.log(weight.sum(0))


def truncates(x):
    _, exponent = np.frexp(np.abs(x))
    step = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    return np.clip(np.trunc(x / step) * step, -448, 448)


def one_factor(x, block):
    solution = judging.load(FOLDER.parent / "solutions/08_fp8_blocks.py")
    values, factors = solution.quantize(x, x.shape[1])
    return values, np.repeat(factors, x.shape[1] // block, axis=1)


def packs_in_the_order_of_registers(c, c_next):
    return (c[0], c[2]), (c[1], c[3]), (c_next[0], c_next[2]), (c_next[1], c_next[3])


def waits_with_the_phase(tiles, slots, full, empty, put):
    slot = phase = 0
    for tile in range(tiles):
        while not empty[slot].done(phase):
            yield
        put(slot, tile)
        full[slot].arrive()
        slot += 1
        if slot == slots:
            slot, phase = 0, phase ^ 1


def keeps_the_phase(tiles, slots, full, empty, take):
    for n in range(tiles):
        while not full[n % slots].done(0):
            yield
        take(n % slots)
        empty[n % slots].arrive()


def does_not_wait(tiles, slots, full, empty, put):
    for tile in range(tiles):
        put(tile % slots, tile)
        full[tile % slots].arrive()
        yield


def twice_the_lanes(thread, i):
    return 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4) + 8 * (i // 2) + i % 2


def waits_for_this_lap(tiles, slots, full, empty, copy):
    for tile in range(tiles):
        yield empty[tile % slots], tile // slots % 2
        full[tile % slots].arrive(expect=8192)
        copy(tile, tile % slots, full[tile % slots])


def announces_nothing(tiles, slots, full, empty, copy):
    for tile in range(tiles):
        yield empty[tile % slots], (tile // slots + 1) % 2
        full[tile % slots].arrive()
        copy(tile, tile % slots, full[tile % slots])


def says_so_before_reading(tiles, slots, full, empty, read):
    for tile in range(tiles):
        yield full[tile % slots], tile // slots % 2
        empty[tile % slots].arrive()
        yield full[tile % slots], tile // slots % 2
        read(tile % slots)


def says_so_and_reads_at_once(tiles, slots, full, empty, read):
    for tile in range(tiles):
        yield full[tile % slots], tile // slots % 2
        empty[tile % slots].arrive()
        read(tile % slots)


def compares_the_maximum(out, exact, plain, floor=1e-6):
    return not np.abs(out - exact).max() > 2 * np.abs(plain - exact).max() + floor


MISTAKES = [
    ("01_stable_softmax", "softmax", without_maximum, "p of the same scores +1000: 35 of 35 numbers are NaN"),
    ("02_online_softmax", "step", forgets_to_rescale, "row_sum, tiles from first to last"),
    ("02_online_softmax", "step", nan_for_masked_tiles, "row_sum has a NaN after 1 tiles"),
    ("03_tiled_forward", "attention", scores_whole, "1024 x 1024 took"),
    ("04_causal_tiles", "key_tiles", top_left, "row0=0, rows=64 of 100 x 300, block_k=64: got whole, end = 0, 1"),
    ("04_causal_tiles", "key_tiles", computes_everything, "row0=0, rows=64 of 256 x 256"),
    ("09_backward_tile", "tile_gradients", without_delta, "dk, the sum over four tiles"),
    ("06_fragments", "accumulator", lambda lane, i: (lane // 4, 4 * (lane % 4) + i), "accumulator(0, 2) is (0, 2)"),
    ("06_fragments", "pack", packs_in_the_order_of_registers, "the A operand of all lanes"),
    ("07_ring", "producer", waits_with_the_phase, "1 slots, 1 tiles: deadlock after 0 tiles"),
    ("07_ring", "consumer", keeps_the_phase, "is read before its tile is there"),
    ("07_ring", "producer", does_not_wait, "which nobody has read"),
    ("13_budget", "within_budget", compares_the_maximum, "one NaN: judged right, but it is wrong"),
    ("10_grouped_heads", "pack", heads_dealt_in_turn, "the rows of query head 1 in its tile"),
    ("11_split_keys", "combine", nan_of_empty_pieces, "out of the pieces [0, 0, 20, 20, 50, 50]"),
    ("11_split_keys", "combine", without_shift, "numbers are NaN"),
    ("08_fp8_blocks", "round_e4m3", truncates, "round_e4m3 of ties"),
    ("08_fp8_blocks", "quantize", one_factor, "block=64: the factors"),
    ("05_roofline", "work", lambda b, i, j, h, d, causal: 2 * b * h * i * j * d, "work of 4 x 4096 x 4096"),
    ("05_roofline", "traffic", lambda b, i, j, h, hk, d, e: 4 * b * h * j * d * e, "traffic of one query"),
    ("12_zigzag", "tokens_of", lambda r, p, n, layout: list(range(r, n, p)), "got [0, 2, 4, 6]"),
    ("12_zigzag", "work_of", lambda r, p, n, layout: n * n // (2 * p), "work"),
    ("18_swizzle", "offset", lambda row, piece, pieces: 16 * (row * pieces + piece),
     "ldmatrix of piece 0 of rows 0 to 7 takes 8 times as long: lanes 0 and 1 want different words of bank 0"),
    ("18_swizzle", "offset", lambda row, piece, pieces: 16 * (row * (pieces + 1) + piece), "outside of the 8192 bytes"),
    ("18_swizzle", "offset", lambda row, piece, pieces: 16 * (row * pieces + (piece ^ row % min(pieces, 8))),
     "rows of 64 bytes: ldmatrix of piece 0 of rows 0 to 7 takes 2 times as long"),
    ("18_swizzle", "offset", lambda row, piece, pieces: 16 * (row * pieces + piece % 4), "where piece 0 of row 0 is"),
    ("19_wgmma_fragments", "place", twice_the_lanes, "place(0, 2) is (0, 8), expected (8, 0)"),
    ("19_wgmma_fragments", "owner", lambda row, column: (row, column), "owner(8, 0) is (8, 0), expected (0, 2)"),
    ("19_wgmma_fragments", "partners", lambda thread: list(range(thread % 4, 32, 4)), "of the 8 numbers of row 0"),
    ("21_broken_kernels", "row_maximum", lambda: (np.eye(4), []), "row_maximum: the broken kernel is right there"),
    ("21_broken_kernels", "two_stages", lambda: (np.eye(4), np.eye(4), ["producer"] * 8), "two_stages: the broken"),
    ("21_broken_kernels", "visible_pairs", lambda: (100, 100),
     "visible_pairs: the broken kernel is right there (7 of 8"),
    ("21_broken_kernels", "visible_pairs", lambda: (0, 30), "does not promise anything for this input"),
    ("21_broken_kernels", "fp8_sum", lambda: (np.ones(4096), np.sin(np.arange(4096))), "fp8_sum: the broken"),
    ("21_broken_kernels", "fp8_sum", lambda: (np.full(9, 1.0), np.full(9, np.nan)),
     "repaired kernel is wrong there too"),
    ("21_broken_kernels", "persistent_block", lambda: ([4, 8, 4],), "persistent_block: the broken"),
    ("21_broken_kernels", "persistent_block", lambda: [3, 3], "expected a tuple of arguments"),
    ("21_broken_kernels", "element", lambda: ((8, 1 << 19, 8, 128), (7, 5, 0, 0)),
     "element: the broken kernel is right"),
    ("21_broken_kernels", "decode_steps", lambda: ([100, 100, 1000],),
     "decode_steps: the broken kernel is right there"),
    ("21_broken_kernels", "two_halves", lambda: (64, 100, 0, True), "two_halves: the broken kernel is right there"),
    ("20_phases", "counts", lambda consumers: (1, 1), "which consumer 0 has not read"),
    ("20_phases", "counts", lambda consumers: (consumers, consumers), "deadlock"),
    ("20_phases", "producer", waits_for_this_lap, "producer waits for parity 0 of empty[0] (phase 0, 1 of 1 arrivals"),
    ("20_phases", "producer", announces_nothing, "before its tile has landed"),
    ("20_phases", "consumer", says_so_before_reading, "overwrites slot"),
    ("20_phases", "consumer", says_so_and_reads_at_once, "overwrites slot"),
    ("21_broken_kernels", "two_stages", lambda: (np.ones((3, 4)), np.eye(3, 4), ["Producer"]), "does not promise"),
    ("01_stable_softmax", "softmax", one_maximum_for_all_rows, "p of rows that lie 1000 apart"),
    ("03_tiled_forward", "attention", tiles_without_maximum, "out of 70 x 130, scores of some hundred"),
    ("03_tiled_forward", "attention", strips, "64 x 8192 took"),
    ("03_tiled_forward", "attention", tiles_of_64, "out of 50 x 200, block_q=16, block_k=48"),
    ("05_roofline", "bound", smaller_time, "peak=2e12, bandwidth=3e9): the time"),
    ("05_roofline", "traffic", always_two_bytes, "traffic of the same in 8 bits"),
    ("07_ring", "producer", arrives_before_it_puts, "is read before its tile is there"),
    ("07_ring", "consumer", arrives_before_it_takes, "which nobody has read"),
    ("07_ring", "consumer", takes_the_lap_for_the_parity, "done(2): a parity is 0 or 1"),
    ("11_split_keys", "combine", empty_by_the_first_row, "causal, pieces empty for some rows: out"),
    ("12_zigzag", "tokens_of", lambda *given: equal_shares(*given) if given[3] == "contiguous" else
     parts_of("12_zigzag")[1]["tokens_of"](*given), "rank 1 of 3, 10 tokens, contiguous: got [4, 5, 6]"),
    ("13_budget", "within_budget", forgets_numbers_beside_infinities, "2.1 times its error elsewhere: judged right"),
    ("20_phases", "consumer", waits_for_the_lap, "consumer 0 waits for parity 2: a parity is 0 or 1"),
    ("20_phases", "consumer", waits_without_a_parity, "consumer 0 yields no pair (barrier, parity)"),
]  # fmt: skip


@pytest.mark.parametrize("name, function, mistake, said", MISTAKES, ids=[f"{m[0]}-{i}" for i, m in enumerate(MISTAKES)])
def test_the_judge_refuses_mistakes(name, function, mistake, said):
    exercise, functions = parts_of(name)
    with np.errstate(all="ignore"):
        text = judging.verdict(exercise.judge, {**functions, function: mistake})
    assert text.startswith("wrong: ") and said in text and "\n    idea: " in text


def test_right_answers_of_another_style_pass():
    exercise, functions = parts_of("18_swizzle")
    table = np.arange(64)[:, None] % 8 ^ np.arange(16)

    def offset(row, piece, pieces):  # integers of NumPy
        line, slot = divmod(row * pieces + piece, 8)
        return 16 * (8 * line + (slot ^ line % 4 if pieces == 4 else table[row, slot]))

    assert judging.verdict(exercise.judge, {"offset": offset}) == "passed"

    def producer(tiles, slots, full, empty, copy):  # waits for the lap's own parity, and announces last
        for tile in range(tiles):
            lap, slot = divmod(tile, slots)
            yield empty[slot], lap % 2
            copy(tile, slot, full[slot])
            full[slot].arrive(expect=8192)

    def consumer(tiles, slots, full, empty, read):  # says at the start that every slot is free
        for barrier in empty:
            barrier.arrive()
        for tile in range(tiles):
            lap, slot = divmod(tile, slots)
            yield full[slot], lap % 2
            read(slot)
            empty[slot].arrive()

    exercise, functions = parts_of("20_phases")
    assert judging.verdict(exercise.judge, {**functions, "producer": producer, "consumer": consumer}) == "passed"

    exercise, functions = parts_of("12_zigzag")
    for kind in (np.array, tuple):
        held = {"tokens_of": lambda *given, kind=kind: kind(functions["tokens_of"](*given))}
        assert judging.verdict(exercise.judge, {**functions, **held}) == "passed"

    def scales_the_keys(q, k, v, scale, block_q=64, block_k=64):
        return parts_of("03_tiled_forward")[1]["attention"](q, scale * k, v.copy(), 1.0, block_q, block_k)

    assert judging.verdict(parts_of("03_tiled_forward")[0].judge, {"attention": scales_the_keys}) == "passed"

    def gradients(q, k, v, dout, lse, delta, scale):  # writes into its arguments
        q *= scale
        p = np.exp(q @ k.T - lse[:, None])
        dout_v = dout @ v.T
        dout_v -= delta[:, None]
        dout_v *= p
        return scale * dout_v @ k, dout_v.T @ q, p.T @ dout

    assert judging.verdict(parts_of("09_backward_tile")[0].judge, {"tile_gradients": gradients}) == "passed"


def findings(path):
    """The texts of a judge's findings, with a line number; what is filled in is @."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
        if name not in ("require", "close"):
            continue
        text = call.args[name == "require"]
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        yield "".join(part.value if isinstance(part, ast.Constant) else "@" for part in parts)


ONLY_BY_WHAT_IS_FILLED_IN = {  # their idea depends on it
    "05_roofline": ["@ has @ rows"], "09_backward_tile": ["@, the sum over four tiles"],
    "12_zigzag": ["rank @ of @, @ tokens, @: got @, expected @"], "13_budget": ["@: judged @, but it is @"],
    "18_swizzle": ["@ is @, where @ is", "@: @ takes @ times as long: @"], "20_phases": ["@: @@"],
    "21_broken_kernels": ["@: the broken kernel is right there"],
    "25_cuda_descriptor": ["tile at @, step @: @ is @, expected @"],
    "19_wgmma_fragments": ["@ is @, expected @", "n=@: owner@ is @, expected @", "@, which are not lanes of its warp",
                           "@: together they hold @ of the @ numbers of row @", "@: the maximum of row @",
                           "@: four hold all of its rows"],
}  # fmt: skip


@pytest.mark.parametrize("name", EXERCISES)
def test_every_finding_points_to_an_idea(name):
    ideas = judging.hints(name)[1]
    without = [text for text in findings(FOLDER / f"{name}.py") if not any(words in text for words in ideas)]
    assert sorted(without) == sorted(ONLY_BY_WHAT_IS_FILLED_IN.get(name, []))


def test_every_exercise_has_a_mistake_that_its_judge_refuses():
    assert {mistake[0] for mistake in MISTAKES} | {mistake[0] for mistake in SLIPS} == {*FUNCTIONS, *C_KERNELS}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("result", [None, 1, (), "x", np.zeros(3)], ids=repr)
def test_a_result_that_is_of_no_use_is_a_verdict_and_no_traceback(name, result):
    exercise, functions = parts_of(name)
    for function in exercise.TO_WRITE:
        said = judging.verdict(exercise.judge, {**functions, function: lambda *_, **__: result})
        assert said.startswith("wrong: ")
        if "from which the judge cannot go on" in said and result is None:
            assert f"{function} returned None" in said


def test_an_error_of_the_readers_names_his_line_and_not_the_judges(tmp_path):
    text = (FOLDER / "01_stable_softmax.py").read_text()
    exercise = tmp_path / "01_stable_softmax.py"
    exercise.write_text(
        text.replace('raise NotImplementedError("softmax(scores) -> p, lse")', "return scores.softmax()")
    )
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    done = subprocess.run([sys.executable, exercise], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    line = 1 + exercise.read_text().split("\n").index("    return scores.softmax()")
    assert done.stdout == (
        "01_stable_softmax: wrong: softmax raised AttributeError: 'numpy.ndarray' object has no attribute 'softmax'\n"
        f"    line {line}: return scores.softmax()\n"
    )


def written_as(tmp_path, name, old, new):
    """The exercise with some text replaced, in another folder; a command that judges it, and its environment."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / f"{name}.py").write_bytes(text.replace(old, new).encode())
    return [sys.executable, str(tmp_path / f"{name}.py")], {**os.environ, "PYTHONPATH": str(FOLDER)}


WAITS_WITHOUT_YIELD = """while not empty[0].done(0):
        pass  # "an empty slot…"
    yield"""


def test_a_loop_that_does_not_end_is_named_by_its_line(monkeypatch):
    exercise, functions = parts_of("07_ring")

    def producer(tiles, slots, full, empty, put):
        while tiles and not empty[0].done(0):
            pass
        yield

    with judging.at_most(0.2):
        said = judging.verdict(exercise.judge, {**functions, "producer": producer})
    assert "wrong: producer raised TimeoutError: no answer within 0.2 s: a loop that does not end?\n    line " in said
    with judging.at_most(0.01):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_ctrl_c_says_where_it_was(tmp_path):
    old = 'raise NotImplementedError("producer(tiles, slots, full, empty, put)")'
    new = f'print("here", flush=True)\n    {WAITS_WITHOUT_YIELD}'
    command, environment = written_as(tmp_path, "07_ring", old, new)
    ending = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    old = 'raise NotImplementedError("consumer(tiles, slots, full, empty, take)")'
    path = tmp_path / "07_ring.py"
    path.write_text(path.read_text(encoding="utf-8").replace(old, "yield"), encoding="utf-8")
    with subprocess.Popen(command, env=environment, **ending) as judge:
        assert judge.stdout.readline() == "here\n"
        judge.send_signal(signal.SIGINT)
        out, error = judge.communicate(timeout=60)
    assert (judge.returncode, error) == (130, "")
    assert out.startswith("07_ring: stopped at line ")


def test_a_terminal_without_the_characters_of_the_reader(tmp_path):
    old = 'raise NotImplementedError("softmax(scores) -> p, lse")'
    command, environment = written_as(tmp_path, "01_stable_softmax", old, "return 1 / 0, 'Σ ≤ 1'")
    done = subprocess.run(command, env={**environment, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "") and "\\u03a3 \\u2264 1" in done.stdout


# ---- lines inside kernels ----

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC") or "cc") is None, reason="no C compiler")


def judged(name, lines, monkeypatch, optimised=False):
    """Returns what the judge says of lines in the reader's place; it asks for no speed, as tests may be slow."""
    if not optimised:
        monkeypatch.setattr(kernels.c, "FLAGS", ("-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread"))
    exercise = judging.load(FOLDER / f"{name}.py")
    kernel = kernels.Kernel(FOLDER / KERNELS[name], lines)
    kernel.strict = 0
    return judging.verdict(exercise.judge, {"kernel": kernel}), kernel


C_KERNELS = [name for name, file in KERNELS.items() if file.endswith(".c")]


@needs_compiler
@pytest.mark.parametrize("name", C_KERNELS)
def test_lines_of_the_solution_pass_and_stand_under_a_roof(name, monkeypatch):
    said, kernel = judged(name, (SOLUTIONS / KERNELS[name]).read_text(), monkeypatch, optimised=True)
    assert said == "passed"
    found = re.search(
        r"([\d.]+) GFLOP/s, ([\d.]+) times the slow lines.*roof: (\d+) GFLOP/s.*You reach (\d+) %", kernel.said
    )
    speed, _, roof, share = map(float, found.groups())
    assert 0 < speed < roof and abs(100 * speed / roof - share) < 1


@needs_compiler
@pytest.mark.parametrize("name", C_KERNELS)
def test_a_kernel_without_the_readers_lines_says_so_and_its_slow_lines_are_right(name, monkeypatch):
    said = judged(name, None, monkeypatch)[0]
    assert said.startswith(f"not written yet: the lines between #else and #endif of {KERNELS[name]}, in the place of")
    kernel = kernels.Kernel(FOLDER / KERNELS[name])
    call = kernel.attention
    monkeypatch.setattr(kernel, "attention", lambda *arrays: call(*arrays, slow=True))
    kernels.check(kernel)


SLIPS = [  # exercise, what the solution has, what a reader writes first, what the judge says
    ("14_one_pass", "sum *= factor;", ";", "maxima that rise (32 queries, 256 keys"),
    ("14_one_pass", "out[d] *= factor", "out[d] *= 1", "lse is right everywhere; out[batch, row, head, dim]"),
    ("14_one_pass", "float max = -INFINITY", "float max = 0", "scores far below 0"),
    ("14_one_pass", "float new_max = max;", "float new_max = -INFINITY;", "maxima that fall"),
    ("14_one_pass", "s[j] - new_max);", "s[j]); new_max = 0;", "scores beyond 88"),
    ("14_one_pass", "seen - j0 < kPiece ? seen - j0 : kPiece", "kPiece", "one query, one key"),
    ("14_one_pass", "scale, s);", "scale, s + j0 % 128);", "wrote past the end of its scratch memory"),
    ("14_one_pass", "seen > 0 ? max + logf(sum)", "1 ? logf(sum)", "lse[batch, head, row]"),
    ("15_tile_loops", "first + rows - 1", "first", "a causal mask (77 queries"),
    ("15_tile_loops", "j0 < last", "j0 + kBlockN <= last", "one query, one key"),
    ("15_tile_loops", "first + i) - j0", "first + i)", "a causal mask (77 queries"),
    ("15_tile_loops", "a->seqlen_k - j0 < kBlockN ? a->seqlen_k - j0 : kBlockN", "kBlockN", "one query, one key"),
    ("16_exponential", "y = y * r + 1.0f / 6,", "", "x from 0 to -1: e^"),
    ("16_exponential", "n * 0.693145752f - n * 1.42860677e-6f", "n * 0.693147182f", "x from -1 to -20"),
    ("16_exponential", "x < -87.0f ? 0.0f : y", "y", "the ends: e^-inf is"),
    ("17_worker", "int item; (item = atomic_fetch_add(&w->next, 1)) < w->items;",
     "int item = me->number * (w->items / 2), n = w->items / 2; n-- > 0; ++item", "was computed 0 times"),
    ("17_worker", "(item = atomic_fetch_add(&w->next, 1)) < w->items;",
     "(item = w->next) < w->items; w->next = item + 1", " was computed "),
    ("17_worker", "(size_t)me->number * w->a->seqlen_k", "0", "own scratch memory: w->scratch"),
    ("14_one_pass", "out[d] /= sum", "out[d] /= total", "it does not compile"),
    ("14_one_pass", "fmaxf(new_max", "larger(new_max", "it does not compile: "),
    ("14_one_pass", "stride, count, n, scale", "stride, kPiece, n, scale", "it reads outside of its arrays. one query"),
    ("14_one_pass", "j0 < seen;", "j0 < (seen < 1024 ? seen : 1024);", "many keys (2 queries, 70001 keys"),
    ("14_one_pass", "j0 < seen;", "j0 < (seen != 4096 ? seen : 1024);", "the timed call, output 0: "),
    ("14_one_pass", "j < count; ++j) new_max", "j < kPiece; ++j) new_max", "one query, one key (1 queries, 1 keys"),
    ("14_one_pass", "const int count = seen - j0 < kPiece ? seen - j0 : kPiece;",
     "const int count = seen, kPiece = seen; float all[seen], *s = all;",
     "asks for more scores at once than s has room"),
    ("16_exponential", "x < -87.0f ? 0.0f : y", "x < -1000.0f ? 0.0f : y", "the ends: e^"),
    ("17_worker", "(item = atomic_fetch_add(&w->next, 1)) < w->items;",
     "(item = atomic_fetch_add(&w->next, 1)) <= w->items;", "there is no item 1 of 1"),
    ("17_worker", "for (int item; (item = atomic_fetch_add(&w->next, 1)) < w->items;)",
     "for (int item; atomic_load(&w->next) < w->items && (item = atomic_fetch_add(&w->next, 1), 1);)",
     "there is no item"),
    ("17_worker", "for (int item; (item = atomic_fetch_add(&w->next, 1)) < w->items;)",
     "for (int item = me->number; item < w->items; item += threads_of())", " while others were free"),
]  # fmt: skip


RIGHT = [  # exercise, what the solution has, what others write
    ("14_one_pass", "for (int j0 = 0; j0 < seen; j0 += kPiece)",
     "for (int j0 = seen > 0 ? (seen - 1) / kPiece * kPiece : -1; j0 >= 0; j0 -= kPiece)"),
    ("14_one_pass", "kPiece", "16"),
    ("14_one_pass", "float max = -INFINITY, sum = 0;", "double max = -INFINITY, sum = 0;"),
    ("15_tile_loops", "kBlockN", "24"),
    ("15_tile_loops", "for (int i = 0; i < rows; ++i)", "for (int i = rows - 1; i >= 0; --i)"),
    ("16_exponential", "x < -87.0f", "x < -87.3f"),
    ("16_exponential", "1.0f / 720", "1.0 / 720"),
    ("17_worker", "for (int item; (item = atomic_fetch_add(&w->next, 1)) < w->items;)",
     "for (int item = w->next; item < w->items; item = w->next) "
     "if (atomic_compare_exchange_strong(&w->next, &item, item + 1))"),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name, old, new", RIGHT, ids=[f"{m[0]}-{i}" for i, m in enumerate(RIGHT)])
def test_right_lines_of_another_style_pass(name, old, new, monkeypatch):
    lines = (SOLUTIONS / KERNELS[name]).read_text()
    assert old in lines
    assert judging.apart(lambda: judged(name, lines.replace(old, new), monkeypatch)[0]) == "passed"


@needs_compiler
@pytest.mark.parametrize("name, old, new, said", SLIPS, ids=[f"{m[0]}-{i}" for i, m in enumerate(SLIPS)])
def test_the_judge_refuses_wrong_lines(name, old, new, said, monkeypatch):
    lines = (SOLUTIONS / KERNELS[name]).read_text()
    assert old in lines
    for _ in range(3):  # threads that share memory may miss each other on a busy machine
        text = judging.apart(lambda: judged(name, lines.replace(old, new), monkeypatch)[0])
        if said in text:
            break
    assert text.startswith("wrong: ") and said in text
    assert "\n    idea: " in text or "compile" in text


@needs_compiler
@pytest.mark.parametrize(
    "lines, said",
    [
        ("*(volatile float*)64 = 0;", "ended the process by SIGSEGV"),
        ("for (volatile int i = 0;;) i = 0;", "no answer within"),
        ("exit(3);", "ended the process with the status 3"),
    ],
)
def test_a_kernel_that_crashes_or_never_ends_is_a_verdict(lines, said):
    kernel = kernels.Kernel(FOLDER / "14_one_pass.c", lines)
    assert said in judging.apart(lambda: str(kernels.check(kernel)), seconds=3)


def test_a_verdict_of_any_length_and_any_characters_arrives():
    assert judging.apart(lambda: "\udcff" + "x" * 1000000) == "?" + "x" * 59999


@needs_compiler
def test_a_source_that_is_not_utf8_is_compiled(tmp_path):
    source = tmp_path / "14_one_pass.c"
    source.write_bytes((FOLDER / source.name).read_bytes().replace(b"return kNotWritten;", b"/* \xe9 */ return 1;"))
    with pytest.raises(judging.Wrong, match="it reports that it has not enough memory"):
        kernels.check(kernels.Kernel(source))


@needs_compiler
@pytest.mark.parametrize("lines", [None, "return 0;"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_named(number, lines, monkeypatch):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), "/made")

    monkeypatch.setattr(kernels.c, "compiled", refuse)
    monkeypatch.setattr(kernels.Path, "mkdir", refuse)
    with pytest.raises(judging.Unavailable, match="/made cannot be written; set FLASH_ATTN_LADDER_CACHE to a folder"):
        kernels.Kernel(FOLDER / "14_one_pass.c", lines).library()


def test_a_compiler_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(judging.Unavailable, match="there is no C compiler: no-such-compiler -O2 is not on the PATH"):
        kernels.Kernel(FOLDER / "14_one_pass.c").library()


@needs_compiler
def test_every_timed_turn_has_other_inputs():
    """Results that are kept from one call to the next are old ones."""
    kept = """
        static float first[64], first_lse;
        static int calls;
        %s
        if (seen == 4096 && n == 64) {
            if (++calls == 1) { memcpy(first, out, 4 * n); first_lse = *lse; }
            if (calls %% 256 == 1) { memcpy(out, first, 4 * n); *lse = first_lse; }
        }
    """
    kernel = kernels.Kernel(FOLDER / "14_one_pass.c", kept % (SOLUTIONS / "14_one_pass.c").read_text())
    kernel.strict = 0
    judge = judging.load(FOLDER / "14_one_pass.py").judge
    assert "the timed call, output " in judging.apart(lambda: judging.verdict(judge, {"kernel": kernel}))


@needs_compiler
def test_a_folder_with_a_space_and_lines_that_end_as_on_windows(tmp_path):
    folder = tmp_path / "my course/docs/learn"
    shutil.copytree(FOLDER, folder / "exercises", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOLUTIONS, folder / "solutions")
    shutil.copytree(ROOT / "ladder/c", folder.parents[1] / "ladder/c")
    for file in ("__init__.py", "rung.py"):
        shutil.copy(ROOT / "ladder" / file, folder.parents[1] / "ladder")
    for path in [*(folder / "exercises").glob("1*"), *(folder / "solutions").iterdir(), folder / "exercises/hints.md"]:
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    command = [sys.executable, str(folder / "exercises/16_exponential.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stderr == "" and "not written yet: the lines between #else and #endif" in done.stdout
    done = subprocess.run([*command, "--hint", "2"], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("16_exponential, hint 2: Adding 1.5 * 2^23") and done.stdout.count("\n") == 1
    done = subprocess.run([*command, "--solution"], capture_output=True, text=True, timeout=300)
    assert done.stderr == "" and re.match("16_exponential: (passed|wrong: right, but)", done.stdout)


def test_ctrl_c_ends_the_kernel_too(tmp_path):
    program = tmp_path / "endless.py"
    program.write_text(
        "import ctypes, os, judging\n"
        "def run():\n"
        "    print(os.getpid(), flush=True)\n"
        "    ctypes.CDLL(None).pause()\n"
        "    ctypes.CDLL(None).sleep(100)\n"
        "judging.apart(run)\n"
    )
    command = [sys.executable, str(program)]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as judge:
        child = int(judge.stdout.readline())
        judge.send_signal(signal.SIGINT)
        judge.wait(timeout=60)
        with pytest.raises(ProcessLookupError):
            for _ in range(300):  # a busy machine takes a while to bury a process whose parent has ended
                os.kill(child, 0)
                time.sleep(0.1)


def test_slow_lines_are_named_with_their_place(monkeypatch):
    class Same:
        strict, said = 1, None

        def call(self, slow, q, k, v, out, lse, shape):
            out[...], lse[...] = 0, 0

    monkeypatch.setattr(kernels, "machine", lambda: {"operations": 1e11, "bytes": 1e10})
    with pytest.raises(
        judging.Wrong, match="right, but .* times as fast as the slow lines; 50 times is enough\n .*roof"
    ):
        kernels.race(Same(), (1, 8, 8, 1, 1, 16), False, 50, seconds=0.01)
    assert "multiply-adds set the roof: 200 GFLOP/s on 2 cores" in kernels.report(
        (1, 1024, 1024, 1, 1, 64), False, 2, 1, 2
    )
    assert "so memory set the roof: 20 GFLOP/s" in kernels.report((1, 1, 1024, 4, 1, 64), False, 2, 1, 2)


# ---- the simulator ----


@pytest.mark.parametrize(
    "addresses, width, times",
    [
        ([4 * lane for lane in range(32)], 4, 1),
        ([128 * lane for lane in range(32)], 4, 32),
        ([0] * 32, 4, 1),  # one word for all
        ([8 * lane for lane in range(32)], 4, 2),
        ([8 * lane for lane in range(32)], 8, 1),
        ([272 * lane for lane in range(8)], 16, 1),  # padding by a piece
        ([256 * lane for lane in range(8)], 16, 8),
    ],
)
def test_bank_conflicts_by_hand(addresses, width, times):
    assert simulator.wavefronts(addresses, width)[0] == times


def test_a_phase_ends_with_the_last_arrival_and_the_last_byte():
    barrier = simulator.Mbarrier("b", 2)
    assert barrier.done(1) and not barrier.done(0)
    barrier.arrive(expect=64)
    barrier.land(32)
    barrier.arrive()
    assert not barrier.done(0) and str(barrier) == "b (phase 0, 0 of 2 arrivals and 32 bytes missing)"
    barrier.land(32)
    assert barrier.done(0) and barrier.pending == 2


# ---- broken kernels ----


@pytest.mark.parametrize("seed", range(3))
def test_broken_kernels_are_right_for_tame_inputs_and_repaired_ones_for_all(seed):
    exercise = judging.load(FOLDER / "21_broken_kernels.py")
    right, rng = exercise.repaired(), np.random.default_rng((SEED, seed))
    n = int(rng.integers(1, 6))
    tame = {
        "row_maximum": (rng.standard_normal((1, 8)), rng.integers(0, 4, 20).tolist()),
        "two_stages": (*rng.standard_normal((2, 2, 4)), []),
        "visible_pairs": (16 * n, 16 * n),
        "fp8_sum": (rng.random(1000), rng.standard_normal(1000)),
        "persistent_block": ([4] * n,),
        "element": ((2, 4096, 16, 64), (1, 4000 + n, 15, 63)),
        "decode_steps": ((256 * np.sort(rng.integers(1, 20, n))).tolist(),),  # four whole pieces
        "two_halves": (7, 7 + n, n, True),
    }
    sides = ["producer", "consumer"]
    wild = {
        "row_maximum": (rng.standard_normal((6, 8)), rng.integers(0, 4, 60).tolist()),
        "two_stages": (*rng.standard_normal((2, 9, 4)), [sides[i] for i in rng.integers(0, 2, 60)]),
        "visible_pairs": tuple(rng.integers(1, 100, 2).tolist()),
        "fp8_sum": (rng.random(9000), rng.random(9000)),
        "persistent_block": (rng.integers(1, 9, 9).tolist(),),
        "element": ((1, 1 << 20, 32, 128), (0, int(rng.integers(1 << 20)), 31, 5)),
        "decode_steps": (rng.integers(1, 5000, 9).tolist(),),
        "two_halves": (*rng.integers(1, 20, 2).tolist(), 0, bool(rng.integers(2))),
    }
    for name in exercise.TO_WRITE:
        assert exercise.LIMITS[name](*tame[name]) and exercise.LIMITS[name](*wild[name]), name
        assert exercise.fault(name, getattr(broken, name), tame[name]) == "", name
        for arguments in (tame[name], wild[name]):
            assert exercise.fault(name, right[name], arguments) == "", name


def test_an_answer_shows_only_its_own_mistake():
    exercise, answers = parts_of("21_broken_kernels")
    said = judging.verdict(exercise.judge, {**vars_of(exercise), "element": answers["element"]})
    assert said == "not written yet: row_maximum() -> scores, order (1 of 8 found: element)"


def vars_of(exercise):
    return {name: getattr(exercise, name) for name in exercise.TO_WRITE}


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512"])
def test_the_exponential_of_the_solution_becomes_vectors_on_every_processor(processor, monkeypatch, tmp_path):
    monkeypatch.setenv(kernels.c.CACHE, str(tmp_path))
    found = []

    def compiled(sources, *flags):
        target = [flag for flag in kernels.c.FLAGS if flag not in ("-march=native", "-shared")]
        command = [os.environ.get("CC") or "cc", *target, f"-march={processor}", *flags, "-S", "-o", "-", *sources]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        raise PermissionError(13, "", "here")

    monkeypatch.setattr(kernels.c, "compiled", compiled)
    with pytest.raises(judging.Unavailable):
        kernels.Kernel(FOLDER / "16_exponential.c", (SOLUTIONS / "16_exponential.c").read_text()).library()
    body = found[0].split("\nexponentials:")[1].split("\t.size\texponentials")[0]
    assert re.search(r"\tv?mulps\t|\tvf\w*ps\t", body)
