"""The suite ledger: what --against names, turns, ratios, answers that differ, the history that the file keeps."""

import ast
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bench_run import run

from flash_attn_lab import bench
from flash_attn_lab.bench import ledger
from flash_attn_lab.bench.ledger import rows
from flash_attn_lab.bench.machine import BenchError
from flash_attn_minimal._core import library as _library

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--suite", "ledger", "--device", "cpu", "--quick")


LIBRARY = ledger.Library("this", Path(_library.path()), ROOT / "python")
ABOUT = {"device": "cpu", "bursts": 1, "burst_s": 1e-5}
SMALL_ROW = {"name": "x", "family": "x", "kind": "operation", "op": "swiglu", "shape": (2, 8), "dtype": "float32"}


def _turns(asked, about=ABOUT):
    return ledger.Turns(LIBRARY, LIBRARY, asked, about)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_rows_have_names_of_their_own(device):
    found = rows.ROWS[device]()
    assert len({row["name"] for row in found}) == len(found) >= {"cuda": 60, "cpu": 30}[device]
    assert json.loads(json.dumps(found)) and all(row["family"] in row["name"] for row in found)


def test_every_row_of_the_cpu_runs():
    pytest.importorskip("ml_dtypes")
    small = rows.cpu_rows()
    for row in small:
        if "seqlens" in row:
            row["seqlens"] = tuple(max(1, n // 32) for n in row["seqlens"])
        if "lengths" in row:
            row["lengths"] = [max(1, n // 16) for n in row["lengths"]]
        if row.get("page"):
            row["page"] = 8
    found = _turns(small).round(None)["other"]
    errors = {row["name"]: answer["error"] for row, answer in zip(small, found, strict=True) if "error" in answer}
    assert not errors
    assert all(answer["us"] > 0 and all(map(math.isfinite, answer["answer"])) for answer in found)


def test_two_libraries_in_turns(tmp_path):
    library = str(_library.path())
    first = run(tmp_path, *OPTIONS, "--against", library, "--row", "ops,host", "--rounds", "2")
    mine = first["rows"]
    assert {row["family"] for row in mine} == {"ops", "host"} and len(mine) == 5
    for row in mine:
        assert row["rounds"] == 2 and row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["against"] == library and row["commit"] and row["us"] > 0 and row["other_us"] > 0
    assert "## By family" in (tmp_path / "ledger.md").read_text()

    # An earlier pair stays; the same pair is measured anew.
    for row in first["rows"]:
        row["commit"] = "0123456789ab"
    (tmp_path / "ledger.json").write_text(json.dumps(first))
    second = run(tmp_path, *OPTIONS, "--against", library, "--row", "host")
    assert [row["commit"] == "0123456789ab" for row in second["rows"]] == [True] * 5 + [False] * 3
    third = run(tmp_path, *OPTIONS, "--against", library, "--row", "host")
    assert len(third["rows"]) == 8
    # A row alone: the pair's other rows stay.
    fourth = run(tmp_path, *OPTIONS, "--against", library, "--row", "swiglu")
    assert [row["family"] for row in fourth["rows"][5:]] == ["host"] * 3 + ["ops"]


def test_a_file_that_is_no_ledger_is_kept(tmp_path, capsys):
    (tmp_path / "ledger.json").write_text('{"rows": 7}')
    run(tmp_path, *OPTIONS, "--against", str(_library.path()), "--row", "ops: rms_norm")
    assert (tmp_path / "ledger.json.unread").read_text() == '{"rows": 7}'
    assert "is not a ledger" in capsys.readouterr().err


def test_ratio_and_spread_are_of_rounds_and_answers_are_compared():
    times = ledger.Times({"name": "x"})
    times.us = {
        ("0", "ours"): {0: 10.0, 1: 20.0},
        ("0", "other"): {0: 11.0, 1: 18.0},
        ("1", "ours"): {0: 99.0, 1: 10.0},  # the other side has failed in the first round
        ("1", "other"): {1: 13.0},
    }
    found = times.result()
    assert found.pop("ratio_error") == pytest.approx(1.25 * 0.2 / 3**0.5)
    assert found == {"us": 10.0, "other_us": 13.0, "ratio": 1.1, "ratio_min": 0.9, "ratio_max": 1.3, "rounds": 3}
    assert ledger.Times({"name": "x"}).result() is None
    times.answers = {"ours": [1.0, 2.0, -1.0], "other": [1.0, 2.01, -1.0]}
    assert times.differs() is None
    times.answers["other"] = [1.0, 2.5, -1.0]
    assert "differ by 0.5" in times.differs()
    times.answers["other"] = [float("nan"), 2.0, -1.0]
    assert times.differs()


@pytest.mark.parametrize("ours, other", [(False, True), (True, False), (True, True)])
def test_a_row_that_a_library_does_not_know(tmp_path, monkeypatch, ours, other):
    """In the other library alone, or in both, it is left out; in ours alone it is a failure."""
    known = ledger.Turns.round

    def told(turns, *args):
        found = known(turns, *args)
        for side in [name for name, refuses in (("ours", ours), ("other", other)) if refuses]:
            found[side][0] = {"error": "TypeError: an unexpected keyword"}
        return found

    monkeypatch.setattr(ledger.Turns, "round", told)
    code = 1 if ours and not other else 0
    data = run(tmp_path, *OPTIONS, "--against", str(_library.path()), "--row", "ops", code=code)
    assert [row["row"].split()[1] for row in data["rows"]] == ["swiglu"]
    assert "an unexpected keyword" in data["left_out"][0]["reason"]


def test_a_row_that_ends_or_hangs_the_process_costs_that_row_alone(tmp_path, monkeypatch):
    """An older library may crash where today's does not."""
    worker = tmp_path / "worker.py"
    text = Path(ledger.__file__).with_name("worker.py").read_text()
    worker.write_text(
        text.replace(
            "KINDS = {",
            'KINDS = {"crash": lambda *_: os.abort(), "hang": lambda *_: time.sleep(100),\n'
            '"break": lambda *_: setattr(Cpu, "works", lambda self: False) or 1 / 0, ',
        )
    )
    monkeypatch.setattr(ledger, "HERE", tmp_path / "__init__.py")
    monkeypatch.setattr(ledger, "ROW_S", 4)
    broken = [SMALL_ROW | {"kind": kind} for kind in ("crash", "hang", "break")]
    both = _turns([SMALL_ROW, broken[0], SMALL_ROW, broken[1], SMALL_ROW, broken[2], SMALL_ROW]).round(None)
    assert [["us" in answer for answer in found] for found in both.values()] == [[True, False] * 3 + [True]] * 2
    found = both["ours"]
    assert "process ended" in found[1]["error"] and "no answer after 4 s" in found[3]["error"]
    assert "division by zero" in found[5]["error"] and found[5]["ends"]


def test_ctrl_c_keeps_the_rounds_that_are_complete(tmp_path):
    command = [sys.executable, "-X", "faulthandler", "-m", "flash_attn_lab", "bench", *OPTIONS, "--row", "ops"]
    command += ["--rounds", "2000"]
    process = subprocess.Popen(
        [*command, "--against", str(_library.path()), "--output", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    for line in process.stdout:
        if "round 2" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # says where it hangs
        _, errors = process.communicate(timeout=10)
    assert "interrupted" in errors and process.returncode == 130, errors
    data = json.loads((tmp_path / "ledger_part.json").read_text())
    assert len(data["rows"]) == 2 and all(1 <= row["rounds"] < 2000 for row in data["rows"])


def test_a_loss_is_told_from_noise():
    base = {"suite": "ledger", "system": "ours", "commit": "a", "against": "b", "date": "2026-01-01", "family": "x"}
    base |= {"pass": "fwd", "dtype": "float32", "us": 1.0, "other_us": 1.0, "ratio_min": 0.9, "ratio_max": 1.1}
    places = {"sure": (0.97, 0.009, 4), "noise": (0.98, 0.009, 4), "same": (0.99, 0.001, 4), "few": (0.96, 0.001, 3)}
    rows = [
        base | {"row": name, "ratio": ratio, "ratio_error": error, "rounds": rounds}
        for name, (ratio, error, rounds) in places.items()
    ]
    text = "\n".join(ledger.table({}, rows))
    assert "below 0.985: 3, of which 1 by more than 3 times their error" in text
    assert "**0.970**" in text and all(f"| {ratio} |" in text for ratio in ("0.980", "0.990", "0.960"))
    assert "is 0.005 in the median row: this run can tell a loss of 1.5%" in text
    del rows[0]["ratio_error"]
    rows[0]["rounds"] = 1  # --quick has one round, and no error
    assert "**" not in "\n".join(ledger.table({}, rows))


def test_what_against_names(tmp_path, monkeypatch):
    with pytest.raises(BenchError, match="neither a"):
        ledger.found("no-such-commit-or-file")
    with pytest.raises(BenchError, match="has no build/libflash_attn_minimal.so"):
        ledger.found(str(tmp_path))
    (tmp_path / "build").mkdir()
    library = tmp_path / "build" / "libflash_attn_minimal.so"
    library.write_bytes(b"")
    with pytest.raises(BenchError, match="has no python/flash_attn_minimal"):
        ledger.found(str(tmp_path))
    assert ledger.found(str(library)).python == ROOT / "python"  # today's, where the library is alone
    package = tmp_path / "python" / "flash_attn_minimal"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert ledger.found(str(library)).python == ledger.found(str(tmp_path)).python == tmp_path / "python"


def test_a_commit_is_compiled_once_with_its_own_script(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "python" / "flash_attn_minimal").mkdir(parents=True)
    (checkout / "CMakeLists.txt").write_text("")
    script = checkout / "build_and_run.sh"
    script.write_text(
        '#!/bin/sh\n# --cpu-only --all-kernels\necho "$@" >>"$FLASH_ATTN_BUILD.said"\nmkdir -p "$FLASH_ATTN_BUILD"\n'
        'touch "$FLASH_ATTN_BUILD/libflash_attn_minimal.so"\n'
    )
    script.chmod(0o755)
    git = ["git", "-C", str(checkout), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True, env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull})
    name = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(ledger, "PYTHON", checkout / "python")
    for device in ("cuda", "cpu", "cuda"):
        library = ledger.found("HEAD", device)
        folder = name.strip() + ("-cpu" if device == "cpu" else "")
        assert library.name == name.strip() and library.file.is_file()
        assert library.python == checkout / "build" / "against" / folder / "source" / "python"
    exported = checkout / "exported"  # without a repository of its own: the commit around it is not its own
    for folder in ("build", "python/flash_attn_minimal"):
        (exported / folder).mkdir(parents=True)
    (exported / "build/libflash_attn_minimal.so").write_bytes(b"")
    (exported / "python/flash_attn_minimal/__init__.py").write_text("")
    assert ledger.found(str(exported)).name == "exported"
    against = checkout / "build" / "against"
    assert (against / library.name / "build.said").read_text() == "build --all-kernels\n"  # the second time it is there
    assert (against / f"{library.name}-cpu" / "build.said").read_text() == "build --cpu-only\n"
    with pytest.raises(BenchError, match="nor a commit"):
        ledger.found("nonesuch")
    (against / f"{library.name}-cpu" / "build" / "libflash_attn_minimal.so").unlink()
    (against / f"{library.name}-cpu" / "source" / "build_and_run.sh").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(BenchError, match="--against HEAD: commit .* does not compile here"):
        ledger.found("HEAD", "cpu")


@pytest.mark.parametrize(
    "words, named",
    [
        ([], "needs --against"),
        (["--against", "nowhere.so"], "--against nowhere.so"),
        (["--against", str(_library.path()), "--row", "nonesuch"], "--row nonesuch"),
        (["--against", str(_library.path()), "--seed", "3"], "--seed has no meaning"),
    ],
)
def test_ledger_refuses_by_name(tmp_path, capsys, words, named):
    assert bench.main([*OPTIONS, "--output", str(tmp_path), *words]) == 2
    assert named in capsys.readouterr().err


def test_a_library_that_does_not_load_says_why(tmp_path, capsys):
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library")
    assert bench.main([*OPTIONS, "--output", str(tmp_path), "--against", str(broken), "--row", "ops"]) == 2
    assert str(broken) in capsys.readouterr().err


def test_the_worker_needs_no_module_of_the_bench():
    """It is run with the packages of older commits."""
    tree = ast.parse(Path(ledger.__file__).with_name("worker.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imports and not [node.module for node in imports if node.level or "bench" in (node.module or "")]
