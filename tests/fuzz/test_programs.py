"""Programs of calls: faults that the campaign must notice when one call affects another, and its command."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import NO_CUDA, SEED, torch

import flash_attn_minimal as fa
from flash_attn_lab.fuzz import function
from flash_attn_lab.fuzz.function import World
from flash_attn_lab.fuzz.judge import Wrong
from flash_attn_lab.fuzz.programs import command, exact, places, reproduce, shrink, steps
from flash_attn_lab.fuzz.programs.answers import Answer, difference
from flash_attn_lab.fuzz.programs.children import in_child
from flash_attn_lab.fuzz.programs.draw import generate
from flash_attn_lab.fuzz.programs.places import Places
from flash_attn_lab.fuzz.programs.steps import prepare
from flash_attn_lab.fuzz.programs.worker import Judge
from flash_attn_minimal import attention, distributed, kvcache
from flash_attn_minimal._core import launch as _launch
from flash_attn_minimal._core import recordings, repeats

EXAMPLES = int(os.environ.get("FLASH_ATTN_TEST_EXAMPLES", "40")) // 3
A_FEW_HUNDRED = 300
PLANTED = 1  # the seed of the programs that look for planted faults: with a drawn one, some faults need hundreds

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a program runs in a forked process")


@pytest.fixture(scope="module")
def judge():
    exact.install()
    with Judge("cpu", seconds=60) as judge:
        yield judge


def outcomes(judge, seed, count=A_FEW_HUNDRED, ranks=False, name=None):
    world = World(judge.places.backend, function=name)
    for number in range(count):
        program = generate(seed, number, world, ranks)
        yield program, judge.outcome(program)


def first_finding(judge, seed=PLANTED, **about):
    for program, outcome in outcomes(judge, seed, **about):
        if not outcome.fine:
            return program, outcome
    return None, None


# ---- right programs ----


@pytest.mark.parametrize("ranks", [False, True])
def test_random_programs(judge, ranks):
    """FLASH_ATTN_TEST_SEED=n repeats a run; a program that fails prints itself."""
    for program, outcome in outcomes(judge, SEED, EXAMPLES, ranks):
        assert outcome.fine, f"seed {SEED}: {outcome}\nreproduce({program!r})"


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
def test_random_programs_of_pytorch():
    with Judge("cpu", "torch", seconds=60) as judge:
        for program, outcome in outcomes(judge, SEED, EXAMPLES // 2):
            assert outcome.fine, f"seed {SEED}: {outcome}\nreproduce({program!r}, 'cpu', 'torch')"


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
def test_pytorch_copies_in_forked_processes():
    """PyTorch copies with its OpenMP threads. A forked process lacks those of its parent, and must not wait for them:
    neither the process of a program nor the process of a step that forks."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        to, source = torch.zeros(200_000, dtype=torch.uint8), torch.ones(200_000, dtype=torch.uint8)

        def copied():
            return int(to.zero_().copy_(source).sum(dtype=torch.int64))

        assert copied() == 200_000  # starts the threads
        assert in_child(lambda: (copied(), in_child(copied, 5)), 10) == ("done", (200_000, ("done", 200_000)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(NO_CUDA != "", reason=NO_CUDA)
@pytest.mark.parametrize("more", [(), ("--ranks",)])
def test_random_programs_on_a_gpu(more):
    if more and torch is None:
        pytest.skip("no PyTorch here")
    done = run("--device", "cuda", "--programs", 3 * EXAMPLES, "--workers", 2, "--seed", SEED, *more)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_program_follows_from_its_seed_and_number(judge):
    world = World(judge.places.backend)
    programs = [generate(5, number, world) for number in range(60)]
    assert programs == [generate(5, number, world) for number in range(60)]
    assert repr(json.loads(json.dumps(programs))) == repr(programs)
    steps = [step for program in programs for step in program["steps"]]
    assert all(4 < len(program["steps"]) <= 51 for program in programs)
    for name in ("thread", "beside", "memory", "times", "keep", "replay", "session", "env"):
        assert any(name in step for step in steps), name
    assert {"exact", "record", "fork"} <= {step.get("way") for step in steps}
    over_ranks = [step for n in range(30) for step in generate(5, n, world, True)["steps"]]
    assert any("leave" in step for step in over_ranks)


# ---- programs that failed ----

ACROSS = {
    "function": "distributed_backward", "headdim": 8, "headdim_v": 256, "group": 6, "causal": True, "num_threads": 1,
    "lens": [[3, 9], [3, 5], [1, 8], [2, 1]], "deterministic": True, "given": ["dv"], "dlse": True, "ranks": 5,
    "cut": "contiguous", "pieces": 3,
}  # fmt: skip
APPENDED = {
    "function": "flash_attn_with_kvcache", "dtype": "bfloat16", "headdim": 128, "nheads_k": 4, "rows": 64, "pages": 1,
    "causal": True, "out": True, "seqlen_new": 1,
}  # fmt: skip
KERNEL = "FLASH_ATTN_BACKWARD_KERNEL"
FAILED = {
    # The size of a workspace was kept with the call, but another kernel needs more.
    "another kernel across ranks": [
        {"env": {KERNEL: "cpu_naive"}}, {"spec": {**ACROSS, "seed": 1}}, {"env": {KERNEL: "cpu_portable"}},
        {"spec": {**ACROSS, "seed": 2}},
    ],
    # A repeated call was made inside a recording, and was not recorded.
    "a recording of a call like those before": [
        *({"spec": {**APPENDED, "lengths": [n], "seed": n}, "session": 0} for n in range(3)),
        {"spec": {**APPENDED, "lengths": [3], "seed": 3}, "session": 0, "way": "record"},
    ],
    "a recording of gradients": [
        {"spec": {"function": "backward", "headdim": 1, "seed": 1, "given": ["dq"]}, "way": "record"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("name", FAILED)
def test_programs_that_failed(name, framework):
    if framework == "torch" and torch is None:
        pytest.skip("no PyTorch here")
    outcome = reproduce({"function": "program", "steps": FAILED[name]}, "cpu", framework)
    assert outcome.fine, outcome


def test_the_contents_of_a_workspace_are_no_answer(judge):
    """A workspace is drawn for a call that then gets a different workspace, between guards."""
    spec = {"function": "linear (4 bits)", "format": "int4", "k": 256, "n": 64, "lead": [40], "workspace": True}
    outcome = judge.outcome({"function": "program", "steps": [{"spec": spec, "way": "exact"}]})
    assert outcome.fine, outcome
    prepared = prepare({"spec": spec}, {})
    fresh, got = (Answer(memory=prepared.before.copy()) for _ in range(2))
    prepared.layout.stored(got.memory, "workspace")[:] = 3
    assert difference(prepared, got, fresh, "cpu") is None
    place = prepared.layout.places["workspace"]
    for at in (place.start - 1, place.end):
        changed = Answer(memory=got.memory.copy())
        changed.memory[at] ^= 1
        assert "1 bytes are not what they are" in difference(prepared, changed, fresh, "cpu")[1]


def test_gradients_of_a_forward_pass_in_tf32():
    """The backward pass multiplies in float32, but its out and lse come from products in tf32."""
    known = steps.functions()["autograd backward"]
    for spec in (
        {"headdim": 33, "nheads_k": 2, "group": 3, "seqlen_q": 21, "seqlen_k": 40, "seed": 1},
        {"headdim": 102, "seqlen_q": 2, "seqlen_k": 252, "spread": 30.0, "seed": 2},
        {"headdim": 64, "seqlen_q": 5, "seqlen_k": 1, "seed": 3},
    ):
        spec = {"function": known.name, "allow_tf32": True, **spec}
        values = known.values(spec)
        gradients = known._gradients(spec, values, known._plain(spec))
        results = {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
        known.judge(spec, values, {}, results)
        with pytest.raises(Wrong):
            known.judge({**spec, "allow_tf32": False}, values, {}, results)
        with pytest.raises(Wrong):
            known.judge(spec, values, {}, {name: -x for name, x in results.items()})


def test_rows_of_no_sequence_beside_a_dout_that_repeats():
    """Rows of no sequence are set to 0. If dout has one row for all rows, that would set every row to 0."""
    known = steps.functions()["autograd backward"]
    spec = {"function": known.name, "lens": [[4, 5], [3, 3]], "extra": [2, 0], "seed": 1}
    assert not known.values(spec)["dout"][7:].any()
    repeated = known.values({**spec, "layouts": {"dout": {"repeat": [0]}}})["dout"]
    assert repeated.any() and (repeated == repeated[0]).all()


def test_a_session_has_the_pages_of_all_its_steps(judge):
    """The table of a session is that of its first step. Where it lacked the pages of later keys, a CPU refused the
    calls, and a GPU, which clamps such pages, read keys that another sequence was adding."""
    world = World(judge.places.backend, function="flash_attn_with_kvcache")
    tables = 0
    for number in range(60):
        for step in generate(PLANTED, number, world)["steps"]:
            if "session" in step and step["spec"].get("pages"):
                prepared = prepare(step, {})
                table = prepared.cache.values(prepared.cache_before, "block_table")
                assert table.min() >= 0
                own = table[:, step["spec"].get("common_pages", 0) :]  # those before are the same for all sequences
                for row in table:
                    assert len(set(row)) == len(row)
                assert len(set(own.flatten())) == own.size
                tables += 1
    assert tables > 20


def test_a_dout_that_nobody_has_written():
    """PyTorch casts a dout of another dtype. The campaign takes one from memory that nobody has written, so the
    gradients are not those of the same call alone."""
    spec = {"function": "autograd backward", "dtype": "bfloat16", "headdim": 8, "deterministic": True}
    prepared = prepare({"spec": spec | {"mutation": ["dtype", "dout"]}}, {})
    one, other = (Answer(memory=prepared.before, results={"dq": np.full(8, x, np.float32)}) for x in (0.0, np.nan))
    assert difference(prepared, one, other, "cpu") is None
    prepared = prepare({"spec": spec}, {})
    assert difference(prepared, one, other, "cpu") is not None


def test_wrong_calls_are_not_begun_and_ended_later():
    """The forward pass of a wrong call may be right, and its fault may only show in the gradients."""
    world = World(Places("cpu").backend)
    for number in range(200):
        for step in generate(SEED, number, world)["steps"]:
            assert step.get("way") != "later" or "mutation" not in step["spec"]


def test_errors_that_name_an_address():
    """A workspace that does not exist yet has no address in a query's error."""
    prepared = prepare({"spec": {"function": "flash_attn_func", "seed": 1}}, {})
    said = "Unsupported: q of 33 columns, data={}, strides (198, 33)"
    assert (
        difference(
            prepared,
            Answer(said.format("0x7fbf"), prepared.before),
            Answer(said.format("(nil)"), prepared.before),
            "cpu",
        )
        is None
    )
    assert difference(prepared, Answer(said.format("0x7fbf"), prepared.before), Answer("", prepared.before), "cpu")


def test_either_rank_may_be_the_first_to_refuse():
    """One rank has an array of a wrong dtype, and no rank can make the call in this mode."""
    spec = {"function": "distributed_forward", "lens": [[9, 9]], "ranks": 3, "kernel": "ulysses", "seed": 1}
    refusals = [Answer("BadArgument: k is float64", b""), Answer("Unsupported: mode=ulysses: nheads=2", b"")]
    wrong, right = (prepare({"spec": more}, {}) for more in (spec | {"mutation": ["dtype", "k1"]}, spec))
    for answer in refusals:
        answer.memory = wrong.before
    assert difference(wrong, *refusals, "cpu") is None
    assert difference(right, *refusals, "cpu")
    assert difference(wrong, refusals[0], Answer("CudaError: an illegal address", wrong.before), "cpu")


@pytest.mark.skipif(NO_CUDA != "" or torch is None, reason=NO_CUDA or "no PyTorch here")
def test_a_replay_of_what_was_refused():
    """The call was refused under the variables of the recording, so there is nothing to replay under the new ones."""
    spec = {"function": "flash_attn_func", "dtype": "bfloat16", "headdim": 64, "seed": 1}
    program = [
        {"env": {"FLASH_ATTN_KERNEL": "decode_mla_sm90"}},
        {"spec": spec, "keep": 0},
        {"env": {"FLASH_ATTN_KERNEL": None}},
    ]
    assert reproduce({"function": "program", "steps": [*program, {"spec": spec, "replay": 0}]}, "cuda", "torch").fine


@pytest.mark.skipif(NO_CUDA != "" or torch is None, reason=NO_CUDA or "no PyTorch here")
def test_no_stream_of_a_thread_is_captured():
    """PyTorch gives out its 32 streams in turn. Work of a thread on a stream that is being captured goes into the
    graph."""
    place = Places("cuda", "torch")[0]
    before, threads = place.upload(np.arange(64, dtype=np.uint8)), set()
    for thread in (1, 2, 3):
        with place.on(thread):
            threads.add(torch.cuda.current_stream().cuda_stream)
    for _ in range(40):
        handle = place.empty(64)

        def call(handle=handle):
            assert torch.cuda.current_stream().cuda_stream not in threads
            place.copy(handle, before)
            return {}

        _, replay = place.captured(call)
        replay()
        assert np.array_equal(place.download(handle), np.arange(64))


@pytest.mark.skipif(NO_CUDA != "" or torch is None, reason=NO_CUDA or "no PyTorch here")
def test_the_memory_of_past_graphs_is_given_back(monkeypatch):
    place = Places("cuda", "torch")[0]
    for _ in range(3):
        place.captured(lambda: {"out": place.empty(32 << 20)})[1]()
    place.synchronize()
    kept = torch.cuda.memory_reserved()
    monkeypatch.setattr(places, "MOST_KEPT", kept)
    place.release()
    assert torch.cuda.memory_reserved() == kept
    monkeypatch.setattr(places, "MOST_KEPT", 0)
    place.release()
    assert torch.cuda.memory_reserved() <= kept - (96 << 20)


# ---- planted faults ----


def test_a_repeat_whose_key_lacks_an_option(monkeypatch, judge):
    """causal and softmax_scale are left out of the key that decides whether a call repeats an earlier one."""
    find = repeats.Repeats.find

    def finds(self, given, arrays, values, window_size, *more):
        if self is attention.repeats:
            values = tuple(None if isinstance(x, (bool, float)) else x for x in values)
        return find(self, given, arrays, values, window_size, *more)

    monkeypatch.setattr(repeats.Repeats, "find", finds)
    attention.repeats.clear()
    _, outcome = first_finding(judge, name="flash_attn_func")
    attention.repeats.clear()
    assert outcome and outcome.kind in (function.WRONG, function.EXCEPTION, function.CRASH), outcome


def test_grants_that_another_thread_lowers(monkeypatch, judge):
    """Shared memory granted to a GPU function is state of all threads. Code that remembers it per thread finds less."""
    run, granted, grant = recordings.run, threading.local(), [0]

    def launch(lib, name, args, stream, views):
        if name == "attention_forward":
            if args.seqlen_k > getattr(granted, "bytes", 0):
                granted.bytes = grant[0] = args.seqlen_k
            if args.seqlen_k > grant[0]:
                raise fa.CudaError("invalid argument")
        return run(lib, name, args, stream, views)

    monkeypatch.setattr(recordings, "run", launch)
    attention.repeats.clear()
    program, outcome = first_finding(judge, name="flash_attn_func")
    assert outcome and outcome.kind == function.EXCEPTION and "invalid argument" in outcome.message
    assert len({step.get("thread") for step in program["steps"]}) > 1


def test_a_workspace_of_the_size_of_an_earlier_call(monkeypatch, judge):
    """The query is made once, and its answer is used for calls of other sizes."""
    query_of, known = _launch.query_of, {}

    def keeps(name):
        def asks(call, plan):
            status = query_of(name)(call, plan)
            plan.workspace_bytes = known.setdefault(call.attention.contents.headdim, plan.workspace_bytes)
            return status

        return asks if name == "kvcache_attention" else query_of(name)

    monkeypatch.setattr(_launch, "query_of", keeps)
    kvcache._repeats.clear()
    monkeypatch.setattr(_launch._scratch, "place", recordings.Scratch.place)
    _, outcome = first_finding(judge, name="flash_attn_with_kvcache")
    assert outcome and "WorkspaceTooSmall" in outcome.message, outcome


def test_a_write_behind_a_workspace(monkeypatch, judge):
    """Writes one byte more than the size that the query returns."""
    import ctypes

    for name in ("fa_attention_forward", "fa_kvcache_attention"):
        real = exact._real[name]

        def writes(args, stream, real=real, name=name):
            inner = args.attention.contents if name == "fa_kvcache_attention" else args
            if inner.workspace:
                ctypes.memset(inner.workspace + inner.workspace_bytes, 1, 1)
            return real(args, stream)

        monkeypatch.setitem(exact._real, name, writes)
    spec = {"function": "flash_attn_with_kvcache", "headdim": 64, "rows": 64, "lengths": [40], "seed": 1}
    outcome = judge.outcome({"function": "program", "steps": [{"spec": spec, "way": "exact"}]})
    assert outcome.kind == function.WRONG and "bytes changed around its workspace" in outcome.message
    assert "0 bytes behind" in outcome.message


def test_an_output_that_keeps_what_was_there(monkeypatch, judge):
    """A row that is not written keeps the array's old contents; in memory that is used again, the answer then
    differs."""
    forward = attention.flash_attn_func
    times = []

    def skips(q, k, v, out=None, **options):
        times.append(1)
        if out is None or len(times) < 3 or not out.size:
            return forward(q, k, v, out=out, **options)
        row = out[0, 0].copy()
        got = forward(q, k, v, out=out, **options)
        out[0, 0] = row
        return got

    monkeypatch.setattr(attention, "flash_attn_func", skips)
    _, outcome = first_finding(judge, name="flash_attn_func")
    assert outcome and outcome.kind == function.WRONG


def test_a_rank_that_is_not_told(monkeypatch, judge):
    """When one rank leaves, another rank goes on as if nothing had happened."""
    forward = distributed.forward

    def goes_on(group, q, *arrays, **options):
        try:
            return forward(group, q, *arrays, **options)
        except fa.RankLost:
            return q

    monkeypatch.setattr(distributed, "forward", goes_on)
    outcome = judge.outcome({"function": "program", "steps": [{"leave": 1, "ranks": 3}]})
    assert outcome.kind == function.WRONG and "did not get RankLost" in outcome.message


def test_hangs_and_crashes(monkeypatch):
    import time

    program = {"function": "program", "steps": [{"spec": {"function": "rms_norm", "dim": 8, "seed": 1}}]}
    from flash_attn_lab.fuzz.case import functions

    small = functions()["rms_norm"]
    with Judge("cpu", seconds=3) as judge:
        assert judge.outcome(program).kind == function.PASSED
        monkeypatch.setattr(small, "function", lambda *a, **b: time.sleep(60), raising=False)
        assert judge.outcome(program).kind == function.HANG
        monkeypatch.setattr(small, "function", lambda *a, **b: os.kill(os.getpid(), 11), raising=False)
        outcome = judge.outcome(program)
        assert outcome.kind == function.CRASH and "SIGSEGV" in outcome.message


# ---- smaller programs ----


def test_shrinking_leaves_the_steps_that_matter(judge):
    program = next(
        p for n in range(100) if len((p := generate(7, n, World(judge.places.backend)))["steps"]) > 12
        and sum(step.get("memory") == 1 for step in p["steps"]) > 2
    )  # fmt: skip

    def fails(smaller):
        return sum(step.get("memory") == 1 for step in smaller["steps"]) > 1

    smallest = shrink.shrink(program, fails, tries=2000)
    assert len(smallest["steps"]) == 2 and all(set(step) == {"spec", "memory"} for step in smallest["steps"])
    for smaller in list(shrink.candidates(generate(8, 3, World(judge.places.backend))))[::61]:
        assert judge.outcome(smaller).fine, smaller


def test_every_function_of_a_program_has_smaller_calls():
    for name in ("autograd backward", "distributed_decode", "distributed_forward"):
        spec = {"function": name, "lens": [[4, 4]], "headdim": 16, "seed": 1}
        assert any(True for _ in shrink.candidates({"function": "program", "steps": [{"spec": spec}]})), name


def test_a_finding_is_a_program_that_can_be_pasted(monkeypatch):
    result = command.ProgramReport({"device": "cpu", "seed": 0, "framework": None})
    program = {"function": "program", "steps": [{"spec": {"function": "swiglu", "dim": 3, "seed": 2}, "times": 2}]}
    about = {"kind": function.WRONG, "kernel": "", "message": "x", "dtype": "", "function": "program"}
    finding = result.add(4, program, about)
    outcome = {}
    exec(result.call(finding).replace("print(", "outcome.update(it="), {"outcome": outcome})
    assert outcome["it"].kind == function.PASSED == reproduce(json.loads(json.dumps(program))).kind


# ---- the command ----


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "flash_attn_lab", "fuzz", *map(str, arguments)], capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip


def test_command_and_report(tmp_path):
    path = tmp_path / "report.json"
    done = run("--device", "cpu", "--programs", 6, "--seed", 7, "--workers", 2, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu, seed 7: 6 programs of" in done.stdout and "0 findings" in done.stdout
    written = json.loads(path.read_text())
    assert written["programs"] == 6 and sum(written["calls"].values()) > 20 and written["findings"] == []
    assert np.sum([row["cases"] for row in written["counts"]]) == 6


def test_wrong_usage():
    done = run("--device", "cpu", "--ranks")
    assert done.returncode == 2 and "--ranks is for --programs" in done.stderr
