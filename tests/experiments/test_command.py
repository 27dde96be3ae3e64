"""The command, end to end on the CPU with --quick: files, schema, exit codes, runs that are cut off."""

import json
import re
import signal

import numpy as np
import pytest
from conftest import ROOT

from flash_attn_lab import experiments
from flash_attn_lab.__main__ import main as command_line
from flash_attn_lab.bench import figure
from flash_attn_lab.experiments import online_softmax, optimisation, report
from flash_attn_lab.experiments.experiment import EXPERIMENTS

needs_matplotlib = pytest.mark.skipif(not figure.available(), reason="matplotlib is not installed")
CPU = ("--device", "cpu", "--framework", "numpy", "--quick")


def run(folder, *argv, code=0):
    """Runs the command. Returns the checked JSON and the text of the page."""
    assert experiments.main([*argv, "--output", str(folder)]) == code
    name = argv[0]
    data = json.loads((folder / f"{name}.json").read_text())
    assert (
        data.keys() >= {"experiment", "machine", "date", "command", "rows", "left_out"} and data["experiment"] == name
    )
    assert data["command"].startswith(f"python -m flash_attn_lab experiment {name}")
    assert "--output" not in data["command"] and "suite" not in data
    text = (folder / f"{name}.md").read_text()
    assert text.startswith(f"# {name}: ") and "## Question" in text and "## Method" in text
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.part"))
    return data, text


WITH_PICTURES = ("test_every_experiment_runs_on_the_cpu", "test_page_and_pictures_can_be_made_again")


@pytest.fixture(autouse=True)
def pictures_where_they_matter(request, monkeypatch):
    if request.node.originalname not in WITH_PICTURES:
        monkeypatch.setattr(figure, "available", lambda: False)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_on_the_cpu(tmp_path, name):
    data, text = run(tmp_path, name, *CPU)
    assert not any(row.get("wrong") for row in data["rows"])
    assert "stopped" not in data
    for row in data["rows"]:
        if "max_err" in row:
            assert row["max_err"] <= row["err_budget"]
    if name == "optimisation":
        assert "Tried and lost" in text and "they are kernels of a GPU" in text
    else:
        assert data["rows"] and "## What one sees" in text
    assert EXPERIMENTS[name].pictures == {} or not data["rows"] or not figure.available() or "![" in text


def test_portable_results_do_not_depend_on_the_run(tmp_path):
    first, _ = run(tmp_path / "a", "online-softmax", *CPU)
    again, _ = run(tmp_path / "b", "online-softmax", *CPU)
    other, _ = run(tmp_path / "c", "online-softmax", *CPU, "--seed", "1")
    assert first["rows"] == again["rows"] != other["rows"]
    assert first["portable"] and (tmp_path / "a/online-softmax.md").read_text().startswith(
        "# online-softmax: any machine"
    )


def test_list_and_help(capsys):
    assert command_line(["experiment", "--list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(EXPERIMENTS)
    assert command_line(["experiment", "--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(f"  {name} " in help_text for name in EXPERIMENTS) and "--limit" in help_text


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "which experiment"),
        (["nonsense"], "NAME: 'nonsense' is not one of block-size, "),
        (["seqlen", "--limit", "0"], "0 is not positive"),
        (["seqlen", "--seed", "-1"], "-1 is negative"),
        (["seqlen", "--device", "cpu", "--framework", "cupy"], "--framework cupy"),
        (["online-softmax", "--framework", "torch"], "--framework torch: online-softmax runs in NumPy"),
        (["seqlen", "--plot-only", "x.json"], "--plot-only stands alone"),
        (["--plot-only", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_usage(argv, said, capsys):
    assert experiments.main(argv) == 2
    assert said in capsys.readouterr().err


def test_a_run_ends_at_its_limit_and_writes_what_it_has(tmp_path, capsys):
    data, text = run(tmp_path, "online-softmax", *CPU, "--limit", "1e-9")
    assert len(data["rows"]) == 1 and data["stopped"] == "the limit of 1e-09 s"
    assert "The run ended early" in text and "ended early" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["interrupt", "terminate"])
def test_an_interrupted_run_writes_what_it_has(tmp_path, monkeypatch, how):
    one = online_softmax._one

    def stop(run, *job):
        if len(run.outcome.rows) == 2:
            if how == "interrupt":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        return one(run, *job)

    monkeypatch.setattr(online_softmax, "_one", stop)
    before = signal.getsignal(signal.SIGTERM)
    data, _ = run(tmp_path, "online-softmax", *CPU, code=130)
    assert len(data["rows"]) == 2 and data["stopped"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_failing_run_writes_what_it_has(tmp_path, monkeypatch):
    one = online_softmax._one

    def fail(run, *job):
        if run.outcome.rows:
            raise RuntimeError("no more")
        return one(run, *job)

    monkeypatch.setattr(online_softmax, "_one", fail)
    with pytest.raises(RuntimeError, match="no more"):
        experiments.main(["online-softmax", *CPU, "--output", str(tmp_path)])
    data = json.loads((tmp_path / "online-softmax.json").read_text())
    assert len(data["rows"]) == 1 and data["stopped"] == "RuntimeError: no more"


def test_a_long_run_saves_on_the_way(tmp_path, monkeypatch):
    from flash_attn_lab.experiments import experiment

    one, seen = online_softmax._one, []

    def look(run, *job):
        file = tmp_path / "online-softmax.json"
        seen.append(len(json.loads(file.read_text())["rows"]) if file.is_file() else 0)
        return one(run, *job)

    monkeypatch.setattr(experiment, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(online_softmax, "_one", look)
    data, _ = run(tmp_path, "online-softmax", *CPU)
    assert seen == list(range(len(seen))) and "stopped" not in data


@pytest.mark.parametrize("error", [1, np.nan])
def test_wrong_answers_are_shown_and_fail(tmp_path, monkeypatch, capsys, error):
    from flash_attn_lab.experiments import _counted

    v2 = _counted.v2

    def wrong(memory, q, k, v, out, lse, tile):
        v2(memory, q, k, v, out, lse, tile)
        out[3] += error

    monkeypatch.setattr(_counted, "v2", wrong)
    data, text = run(tmp_path, "traffic", *CPU, code=1)
    assert sum(row.get("wrong", False) for row in data["rows"]) == 2
    assert "## Wrong answers" in text and "2 wrong answers" in capsys.readouterr().err


def test_a_nan_is_a_wrong_answer_of_a_block_size(tmp_path, monkeypatch):
    from flash_attn_lab.experiments import block_size

    monkeypatch.setattr(block_size, "SIZES", block_size.SIZES[:1])
    monkeypatch.setattr(block_size, "plain_v2", lambda q, k, v, tile: np.full_like(q, np.nan))
    data, _ = run(tmp_path, "block-size", *CPU, code=1)
    assert [row["max_err"] for row in data["rows"] if row.get("wrong")] == [1e30]


@needs_matplotlib
def test_page_and_pictures_can_be_made_again(tmp_path):
    run(tmp_path, "traffic", *CPU)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"traffic.json", "traffic.md", "traffic.png"}
    for name in ("traffic.md", "traffic.png"):
        (tmp_path / name).unlink()
    assert experiments.main(["--plot-only", str(tmp_path / "traffic.json")]) == 0
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_without_matplotlib_there_is_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "available", lambda: False)
    _, text = run(tmp_path, "traffic", *CPU)
    assert {file.name for file in tmp_path.iterdir()} == {"traffic.json", "traffic.md"} and "![" not in text


@pytest.mark.parametrize(
    "change, said",
    [
        ({"experiment": "nonsense"}, "experiment='nonsense' is not one of"),
        ({"rows": 3}, "not a result"),
        ({"rows": [{"level": "model"}]}, "not a result of `experiment`: it lacks"),
        ({"machine": []}, "not a result"),
        (None, "it has no experiment, machine"),
    ],
)
def test_files_that_are_no_result(tmp_path, change, said, capsys):
    run(tmp_path, "traffic", *CPU)
    file = tmp_path / "traffic.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps({} if change is None else data | {"portable": False} | change))
    assert experiments.main(["--plot-only", str(file)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / "docs" / "experiments").is_dir(), reason="the documents are not beside the tests")
def test_committed_pages_are_those_of_their_rows():
    files = sorted((ROOT / "docs" / "experiments").rglob("*.json"))
    assert {"online-softmax", "traffic", "optimisation"} <= {file.stem for file in files}
    for file in files:
        data = report.read(file)
        pictures = [
            file.with_name(name) for name in re.findall(r"!\[.*?\]\((.*?)\)", file.with_suffix(".md").read_text())
        ]
        assert all(picture.is_file() for picture in pictures)
        assert file.with_suffix(".md").read_text() == report.page(data, pictures), f"--plot-only {file} makes it again"


def test_what_lost_is_complete():
    entries = optimisation.lost()
    assert len(entries) >= 50
    for entry in entries:
        assert tuple(entry) == optimisation.FIELDS and all(entry.values())
        assert re.fullmatch(r"[0-9a-f]{7,}", entry["commit"])
        if entry["source"] != "commit message" and (ROOT / "cuda").is_dir():
            assert (ROOT / entry["source"]).is_file(), entry
    assert len({entry["what"] + entry["kernel"] for entry in entries}) == len(entries)
