"""The fuzz campaign: random calls of every function, planted faults that its watchdog and judges must notice, and its
command."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import CUDA, NO_CUDA, SEED, ml_dtypes, torch

import flash_attn_minimal as fa
from flash_attn_lab.fuzz import arrays, campaign, function, report, reproduce, shrink
from flash_attn_lab.fuzz.arrays import Arena, Array, backend_for
from flash_attn_lab.fuzz.case import Draw, World, functions, generate, run
from flash_attn_lab.fuzz.programs import command as command_of_programs
from flash_attn_minimal import attention, distributed

E4M3 = "float8_e4m3fn"
EXAMPLES = int(os.environ.get("FLASH_ATTN_TEST_EXAMPLES", "40"))
BACKENDS = [("cpu", None), ("cpu", "torch")] + [("cuda", None if CUDA.framework == "torch" else "cupy")] * (not NO_CUDA)


def backend_of(device, framework):
    if framework == "torch" and torch is None:
        pytest.skip("no PyTorch here")
    return backend_for(device, framework)


# ---- random calls ----


@pytest.mark.parametrize("name", functions())
@pytest.mark.parametrize("device, framework", BACKENDS, ids=lambda x: str(x))
def test_random_calls(device, framework, name):
    """FLASH_ATTN_TEST_SEED=n repeats a run; a case that fails prints itself."""
    world = World(backend_of(device, framework), function=name)
    kinds = set()
    for number in range(EXAMPLES if framework is None else EXAMPLES // 4):
        spec = generate(SEED, number, world)
        outcome = run(spec, world.backend)
        assert outcome.fine, f"seed {SEED}, case {number}: {outcome}\nreproduce({spec!r}, {device!r}, {framework!r})"
        kinds.add(outcome.kind)
    assert function.PASSED in kinds


def test_a_case_follows_from_its_seed_and_number():
    world = World(arrays.Numpy())
    specs = [generate(5, number, world) for number in range(60)]
    assert specs == [generate(5, number, world) for number in range(60)]
    assert specs != [generate(6, number, world) for number in range(60)]
    text = json.dumps(specs)
    assert repr(json.loads(text)) == repr(specs)  # what travels to a worker and into a report
    assert len({spec["function"] for spec in specs}) > 8 and any("mutation" in spec for spec in specs)


def test_a_kernel_by_name_gets_calls_that_it_serves():
    world = World(arrays.Numpy(), kernel="cpu_portable")
    specs = [generate(1, number, world) for number in range(40)]
    assert {spec["kernel"] for spec in specs} == {"cpu_portable"}
    assert {spec["function"] for spec in specs} >= {"flash_attn_func", "flash_attn_with_kvcache", "backward"}


# ---- faults that it must notice ----

SPEC = {"function": "flash_attn_func", "batch": 2, "seqlen_q": 9, "seqlen_k": 17, "group": 2, "out": True, "seed": 3}


def sabotage(monkeypatch, change, name="flash_attn_func"):
    true = getattr(attention, name)
    monkeypatch.setattr(attention, name, lambda *arrays, **options: change(true, *arrays, **options))


def beyond(array, elements):
    """The memory `elements` elements after the end of a contiguous array."""
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[-1:], (elements + 1,))[elements:]


ACROSS = {
    "lens": [[9, 9], [0, 4], [30, 31]],
    "nheads_k": 3,
    "group": 2,
    "ranks": 3,
    "causal": True,
    "out": True,
    "seed": 4,
}


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_a_wrong_row_of_one_rank_is_noticed(monkeypatch, mode):
    """A wrong number in the row, and bytes written after its array."""
    spec = ACROSS | {"function": "distributed_forward", "kernel": mode}
    assert run(spec, arrays.Numpy()) == function.Outcome(function.PASSED, mode)
    true = distributed.forward

    def sabotaged(change):
        def forward(group, q, k, v, **options):
            found = true(group, q, k, v, **options)
            if group.rank == 1:
                change(options["out"])
            return found

        monkeypatch.setattr(distributed, "forward", forward)
        return run(spec, arrays.Numpy()).kind

    assert sabotaged(lambda out: out.__setitem__((-1, 0, 0), 7.0)) == function.WRONG
    assert sabotaged(lambda out: beyond(out, 3).__setitem__(-1, 1.0)) == function.UNTOUCHED


def test_a_rank_that_raises_alone_is_noticed(monkeypatch):
    true = distributed.backward

    def backward(group, *given, **options):
        if group.rank == 2:
            raise fa.BadArgument("I alone")
        return true(group, *given, **options)

    spec = ACROSS | {"function": "distributed_backward", "given": ["dq", "dk", "dv"]}
    assert run(spec, arrays.Numpy()).kind == function.PASSED
    monkeypatch.setattr(distributed, "backward", backward)
    assert not run(spec, arrays.Numpy()).fine
    monkeypatch.undo()
    assert run(spec, arrays.Numpy()).kind == function.PASSED, "new groups after those that have ended"


def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all():
    for mutation in (["dtype", "k1"], ["shape", "v2", 1], ["none", "q0"], ["alias", "out1", "q1"]):
        spec = ACROSS | {"function": "distributed_forward", "mutation": mutation}
        assert run(spec, arrays.Numpy()).kind == function.REJECTED, mutation


def test_a_right_call_passes():
    assert run(SPEC, arrays.Numpy()) == function.Outcome(
        function.PASSED, fa.query(*[np.zeros((1, 1, 1, 8), "f4")] * 3).kernel
    )


@pytest.mark.parametrize("error", [1e-3, np.nan, np.inf])
def test_a_wrong_answer(monkeypatch, error):
    def off(true, **call):
        got = true(**call)
        call["out"][1, 4, 1, 3] += error
        return got

    sabotage(monkeypatch, off)
    outcome = run(SPEC, arrays.Numpy())
    assert outcome.kind == function.WRONG and "out(1, 4, 1, 3)" in outcome.message


def test_an_answer_that_changes(monkeypatch):
    times = itertools.count()

    def off(true, **call):
        got = true(**call)
        call["out"][1, 4, 1, 3] += next(times) * 1e-8
        return got

    sabotage(monkeypatch, off)
    assert run(SPEC, arrays.Numpy()).kind == function.PASSED
    outcome = run({**SPEC, "repeats": 1}, arrays.Numpy())
    assert outcome.kind == function.WRONG and "call 2" in outcome.message


@pytest.mark.parametrize("name, elements", [("out", 1), ("out", 300), ("v", 5), ("q", 2)])
@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_write_where_there_is_nothing_to_write(monkeypatch, name, elements, value):
    def stray(true, **call):
        beyond(call[name], elements)[:] = value
        return true(**call)

    sabotage(monkeypatch, stray)
    outcome = run(SPEC, arrays.Numpy())
    assert outcome.kind == function.UNTOUCHED and f"bytes behind {name}" in outcome.message


def test_a_write_between_the_rows_and_into_an_input(monkeypatch):
    def stray(true, **call):
        beyond(call["out"][:1, :1, :, :7], 1)[:] = 0
        return true(**call)

    spec = {**SPEC, "group": 1, "headdim": 7, "layouts": {"out": {"pad": [0, 0, 0, 2]}}}
    sabotage(monkeypatch, stray)
    assert "element 7 of out" in run(spec, arrays.Numpy()).message

    def writes_q(true, **call):
        call["q"][0, 0, 0, 0] = 1
        return true(**call)

    monkeypatch.undo()
    sabotage(monkeypatch, writes_q)
    assert run(SPEC, arrays.Numpy()).kind == function.UNTOUCHED


def test_exceptions_of_the_wrong_kind(monkeypatch):
    def fails(true, **call):
        raise IndexError("of ours")

    sabotage(monkeypatch, fails)
    outcome = run(SPEC, arrays.Numpy())
    assert outcome.kind == function.EXCEPTION and "IndexError: of ours" in outcome.message
    outcome = run({**SPEC, "mutation": ["option", "softcap", -1.0]}, arrays.Numpy())
    assert outcome.kind == function.EXCEPTION


def test_a_query_that_says_something_else(monkeypatch):
    sabotage(monkeypatch, lambda true, **call: fa.Plan("FA_UNSUPPORTED", "no", "", 0, {}), "query")
    assert run(SPEC, arrays.Numpy()).kind == function.QUERY
    monkeypatch.undo()

    def refuses(true, **call):
        raise fa.Unsupported("today")

    sabotage(monkeypatch, refuses)
    assert run(SPEC, arrays.Numpy()).kind == function.QUERY


def test_a_wrong_call_that_is_taken(monkeypatch):
    spec = {**SPEC, "mutation": ["option", "softcap", -1.0]}
    assert run(spec, arrays.Numpy()).kind == function.REJECTED
    sabotage(monkeypatch, lambda true, **call: true(**{**call, "softcap": 0.0}))
    assert run(spec, arrays.Numpy()).kind == function.ACCEPTED

    def writes_first(true, **call):
        call["out"][:] = 0
        raise fa.BadArgument("too late")

    monkeypatch.undo()
    sabotage(monkeypatch, writes_first)
    assert run(spec, arrays.Numpy()).kind == function.UNTOUCHED


# ---- arrays ----


def test_the_poison_is_nan_in_every_type():
    memory = arrays.poison(4096, seed=1)
    for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn"):
        stored = memory.view(arrays.STORAGE[dtype])
        assert np.isnan(arrays.decode(stored, dtype)).all()
    assert len(np.unique(memory.view(np.uint32))) == 4  # a NaN that somebody writes is noticed


@pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes knows how these types are stored")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float32"])
def test_numbers_are_stored_as_ml_dtypes_does(dtype):
    x = np.random.default_rng(0).standard_normal(2000, dtype=np.float32)
    native = np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype)
    x = x.astype(native).astype(np.float32)
    stored = arrays.encode(x, dtype)
    np.testing.assert_array_equal(stored.view(np.uint8), x.astype(native).view(np.uint8))
    np.testing.assert_array_equal(arrays.decode(stored, dtype), x)


def test_layouts_place_every_element_apart():
    """Random layouts: elements share memory only along repeated axes, and all of it belongs to the array."""
    draw, backend = Draw(np.random.default_rng(0)), arrays.Numpy()
    for _ in range(200):
        shape = tuple(draw.size(5) for _ in range(1 + draw.below(4)))
        layout = draw.layout(len(shape), backend)
        array = Array(shape, "int32", layout)
        arena = Arena(backend, {"x": array}, {})
        place, (strides, _, _) = arena.places["x"], array.strides()
        distinct = [1 if axis in layout.get("repeat", ()) else size for axis, size in enumerate(shape)]
        offsets = sum(
            np.arange(n).reshape([-1] + [1] * (len(shape) - 1 - i)) * strides[i] for i, n in enumerate(distinct)
        )
        at = place.offset + 4 * np.unique(offsets)
        assert len(at) == np.prod(distinct)
        assert not len(at) or (place.start <= at.min() and at.max() + 4 <= place.end <= arena.size - arrays.GUARD)
        assert shape[-1] < 2 or strides[-1] == 1


# ---- smaller cases ----


def test_shrinking_keeps_what_matters():
    spec = {
        "function": "flash_attn_func", "dtype": "float16", "batch": 3, "seqlen_q": 100, "seqlen_k": 300, "group": 4,
        "headdim": 72, "causal": True, "softcap": 30.0, "sinks": True, "seed": 1, "kernel": "cpu_naive",
        "layouts": {"q": {"pad": [0, 0, 0, 8], "flip": [1]}, "k": {"offset": 1}},
    }  # fmt: skip
    smallest = shrink.shrink(spec, lambda s: s.get("seqlen_k", 1) > 16 and s.get("causal"), tries=300)
    assert smallest.pop("seqlen_k") == 17 and all(smallest.pop(size) <= 1 for size in ("batch", "seqlen_q", "headdim"))
    assert smallest == {"function": "flash_attn_func", "causal": True, "seed": 1, "kernel": "cpu_naive"}
    tried = []
    shrink.shrink(spec, lambda s: tried.append(s) or True, tries=7)
    assert len(tried) == 7


def test_every_smaller_case_is_a_call():
    """Every case that shrinking tries can be made and judged like any other case."""
    world = World(arrays.Numpy())
    for number in range(EXAMPLES // 2):
        spec = generate(SEED, number, world)
        if "mutation" in spec:
            continue
        for smaller in itertools.islice(shrink.candidates(spec), 0, None, 11):
            assert run(functions()[spec["function"]].trimmed(smaller), world.backend).fine, smaller


RARE = {
    "masks by blocks": {
        "function": "flash_attn_func", "batch": 2, "seqlen_q": 70, "seqlen_k": 130, "nheads_k": 2, "group": 2,
        "headdim": 16, "blocks": [2, 64, 128, False],
    },
    "a shared prefix": {
        "function": "flash_attn_with_kvcache", "lengths": [40, 50], "batch": 2, "rows": 16, "pages": 4,
        "common_pages": 2, "shared_prefix": True,
    },
    "float8": {
        "function": "flash_attn_func", "dtype": E4M3, "batch": 2, "seqlen_q": 3, "seqlen_k": 5, "nheads_k": 2,
        "group": 2, "headdim": 16, "fast_accum": True, "out_dtype": "float16",
        "descale": {"q": [2, 4], "k": [1, 2], "v": [2]}, "layouts": {"k_descale": {"pad": [1, 1], "step": 2}},
    },
    "float8, packed": {
        "function": "flash_attn_varlen_func", "dtype": E4M3, "lens": [[3, 4], [2, 2]], "nheads_k": 2, "headdim": 16,
        "descale": {"q": [2, 2], "k": [2, 1], "v": [1]},
    },
    "a tree for each sequence": {
        "function": "flash_attn_with_kvcache", "lengths": [9, 12], "seqlen_q": 4, "seqlen_new": 4, "rows": 16,
        "tree": 4, "trees": 2, "cache_dtype": "int8", "scales": "tokens",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RARE)
def test_every_smaller_case_of_a_rare_call_is_a_call(name):
    """Sizes that go with another: the factors of float8 with the batch and the heads, the trees with the batch."""
    function = functions()[RARE[name]["function"]]
    for smaller in shrink.candidates({**RARE[name], "seed": 3}):
        outcome = run(function.trimmed(smaller), arrays.Numpy())
        assert outcome.fine, f"{outcome}\n{smaller}"


# ---- the watchdog ----

MISBEHAVES = """
import json, os, signal, sys, time

def say(**message):
    print(json.dumps(message), flush=True)

say(ready="nothing")
for line in sys.stdin:
    number = json.loads(line)["number"]
    say(spec={"function": "flash_attn_func", "seed": number})
    if number == 2:
        time.sleep(1000)
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 4:
        sys.exit("of its own accord")
    kind = {6: "sticky CUDA error", 7: "wrong answer"}.get(number, "passed")
    say(kind=kind, kernel="k", message="", dtype="float32", function="flash_attn_func", seconds=0)
    if number == 6:
        sys.exit(0)
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_hanging_and_dying_workers_are_charged_to_their_case(tmp_path, monkeypatch, workers):
    (tmp_path / "misbehaves.py").write_text(MISBEHAVES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    start = time.monotonic()
    result = campaign.campaign(cases=10, workers=workers, case_seconds=2, shrink_seconds=0, worker="misbehaves")
    assert time.monotonic() - start < 60
    assert result.cases == 10 and sum(result.counts.values()) == 10
    found = {finding["number"]: finding for finding in result.findings}
    kinds = {number: finding["kind"] for number, finding in found.items()}
    assert kinds == {2: function.HANG, 3: function.CRASH, 4: function.CRASH, 6: function.STICKY, 7: function.WRONG}
    assert "SIGSEGV" in found[3]["message"] and "of its own accord" in found[4]["message"]
    assert all(finding["spec"]["seed"] == number for number, finding in found.items())


def test_workers_that_do_not_start(tmp_path, monkeypatch):
    (tmp_path / "misbehaves.py").write_text("raise SystemExit('no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(fa.FlashAttnError, match="workers do not start: .*exit status 1\nno such thing"):
        campaign.campaign(cases=100, workers=2, worker="misbehaves")


def test_a_system_without_an_affinity_of_processes(tmp_path, monkeypatch):
    """macOS has no os.sched_getaffinity: all its cores count."""
    (tmp_path / "misbehaves.py").write_text(MISBEHAVES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert campaign.campaign(cases=2, worker="misbehaves").cases == 2
    assert "3 cores" in report.machine("cpu")


def test_a_finding_is_made_smaller_in_a_process_of_its_own():
    """A case that does not fail alone is left as it is."""
    result = report.Report({"device": "cpu", "seed": 0})
    shrinker = campaign.Shrinker({"device": "cpu", "seed": 0}, 30, time.monotonic() + 60)
    finding = result.add(4, SPEC, {"kind": function.WRONG, "kernel": "", "message": "", "dtype": "", "function": ""})
    assert shrinker.shrunk(finding, 5)["alone"] is False
    spec = {**SPEC, "mutation": ["option", "softcap", 1.0]}  # which is right, and so it is not refused
    finding = result.add(5, spec, {"kind": function.ACCEPTED, "kernel": "", "message": "", "dtype": "", "function": ""})
    try:
        shrunk = shrinker.shrunk(finding, 40)
    finally:
        shrinker.close()
    assert shrunk["alone"] and len(shrunk["shrunk"]) < len(spec)
    result.replace(finding, shrunk)
    outcome = {}
    exec(
        result.call(shrunk).replace("print(", "outcome.update(it=").replace("reproduce; ", "reproduce\n"),
        {"outcome": outcome},
    )
    assert outcome["it"].kind == function.ACCEPTED
    assert "q                float32 (" in result.text()
    for value in (np.inf, np.nan, -np.inf):
        exec(result.call({"spec": {**spec, "mutation": ["option", "softcap", value]}}), {})
        outcome = reproduce(json.loads(json.dumps({**spec, "mutation": ["option", "softcap", value]})))
        assert outcome.kind == function.REJECTED


# ---- the command ----


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "flash_attn_lab", "fuzz", "--device", "cpu", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_command_and_report(tmp_path):
    path = tmp_path / "report.json"
    done = command("--cases", 12, "--seed", 7, "--workers", 2, "--readers", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu, seed 7: 12 cases in" in done.stdout and "0 findings" in done.stdout
    written = json.loads(path.read_text())
    assert sum(row["cases"] for row in written["counts"]) == written["cases"] == 12
    assert set(written["counts"][0]) == {"function", "kernel", "dtype", "outcome", "cases"}
    assert written["findings"] == [] and written["command"].endswith(str(path))
    assert written["readers"]["cases"] == 12 and not written["readers"]["failures"]
    assert {"machine", "date", "commit", "seconds", "library"} <= set(written)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--kernel", "nonesuch"), "--kernel 'nonesuch' is not one of "),
        (("--function", "nonesuch"), "--function 'nonesuch' is not one of 'flash_attn_func'"),
        (("--workers", 0), "--workers: 0 is not positive"),
        (("--cases", "many"), "--cases: 'many' is not a whole number"),
        (("--seconds", "nan"), "--seconds: 'nan' is not a number"),
        (("--json", "/dev/null/x"), "--json /dev/null/x: cannot write there"),
        (("--cases", -1), "--cases: -1 is negative"),
    ],
)
def test_wrong_usage(arguments, says):
    done = command(*arguments)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture
def no_ml_dtypes(tmp_path, monkeypatch):
    """For processes that start now."""
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError('ml_dtypes is not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def test_dtypes_that_numpy_lacks_are_not_drawn(no_ml_dtypes, tmp_path):
    """Several of the 300 cases with this seed would have such dtypes."""
    done = command("--cases", 300, "--seed", 0, "--workers", 2, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout
    said = "no calls with bfloat16 and float8_e4m3fn, which NumPy has with ml_dtypes (pip install ml_dtypes)\n"
    assert done.stdout.count(said) == 1 and "0 findings" in done.stdout
    counts = json.loads((tmp_path / "found.json").read_text())["counts"]
    assert {row["dtype"] for row in counts} == {"float32", "float16"}


def test_a_function_without_its_dtype_is_refused(no_ml_dtypes):
    done = command("--function", "quantize_fp8")
    assert done.returncode == 2
    assert done.stderr == "fuzz: --function quantize_fp8 needs arrays of float8_e4m3fn: pip install ml_dtypes\n"


@pytest.mark.parametrize("programs", [[], ["--programs", 1]])
def test_a_wrong_number_of_threads_is_no_finding(monkeypatch, programs):
    monkeypatch.setenv("FLASH_ATTN_NUM_THREADS", "many")
    done = command("--device", "cpu", "--cases", 5, *programs)
    assert done.returncode == 2 and done.stderr.startswith("fuzz: FLASH_ATTN_NUM_THREADS=many is not a number of")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("programs", [[], ["--programs", "1000000"]])
def test_an_interrupted_command_reports_what_is_known_and_returns_130(programs, number):
    words = [sys.executable, "-u", "-m", "flash_attn_lab", "fuzz", "--device", "cpu", "--workers", "1"]
    running = subprocess.Popen([*words, "--cases", "1000000", *programs], stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline().startswith("[")  # some cases are over
    running.send_signal(number)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 130 and said.endswith(" 0 findings (interrupted)\n")


@pytest.mark.parametrize("module, first", [(campaign, "cases"), (command_of_programs, "programs")])
def test_ctrl_c_while_findings_are_made_smaller_keeps_them(module, first, monkeypatch):
    class Interrupted:
        def __init__(self, *_):
            pass

        def shrunk(self, *_):
            raise KeyboardInterrupt

        def close(self):
            pass

    message = {"kind": function.WRONG, "kernel": "", "message": "off", "dtype": "", "function": ""}
    monkeypatch.setattr(module, "outcomes", lambda *_: iter([(0, SPEC, message)]))
    monkeypatch.setattr(module, "Shrinker" if module is campaign else "ProgramShrinker", Interrupted)
    result = module.campaign(**{first: 1})
    assert len(result.findings) == 1 and result.status == 130


def test_a_broken_case_says_what_broke(monkeypatch):
    try:
        raise ZeroDivisionError("a defect")
    except ZeroDivisionError as error:
        said = function.told(error)
    assert said.startswith("ZeroDivisionError: a defect\nTraceback") and "test_campaign.py" in said


def test_a_number_takes_the_place_of_an_array():
    """cache_leftpad is an int32 array. The fault is an option of this name, which replaces the array."""
    spec = {"function": "flash_attn_with_kvcache", "headdim": 8, "leftpad": True, "seed": 1}
    for kernel in (None, "cpu_naive"):
        outcome = reproduce({**spec, "kernel": kernel, "mutation": ["option", "cache_leftpad", 0]})
        assert outcome.kind == function.REJECTED, outcome


def test_reproduce():
    assert reproduce(SPEC).kind == function.PASSED


def test_dropout_scales_the_noise_of_gradients():
    """With one key, dq is 0: the difference of two sums, both of which dropout scales up."""
    known = functions()["backward"]
    spec = {"function": "backward", "headdim": 144, "headdim_v": 16, "seqlen_q": 3, "seed": 5, "dlse": False}
    one, ten = (known._noise({**spec, **more}, known.values({**spec, **more})) for more in ({}, {"dropout_p": 0.9}))
    assert one["dq"] > 0
    assert {name: ten[name] / one[name] for name in ("dq", "dk")} == pytest.approx({"dq": 10, "dk": 10})
