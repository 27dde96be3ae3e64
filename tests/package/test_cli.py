"""python -m flash_attn_minimal: help without imports, info, verify, exit statuses."""

import argparse
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import NO_CUDA

import flash_attn_minimal as fa
from flash_attn_lab import command as lab_command
from flash_attn_lab import reference
from flash_attn_lab.__main__ import COMMANDS
from flash_attn_lab.__main__ import main as lab
from flash_attn_lab.children import python_path
from flash_attn_minimal._commands import cli, info, verify
from flash_attn_minimal._commands import command as _command


def run(*arguments, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-m", "flash_attn_minimal", *arguments], capture_output=True, text=True, env=env
    )


def test_help_lists_the_commands_without_importing_them():
    said = run("--help", FLASH_ATTN_LIBRARY="/nowhere")
    assert said.returncode == 0 and not said.stderr
    for command in ("info", "verify", "generate", "quantize"):
        assert f"\n  {command} " in said.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonesuch",), "'nonesuch' is not a command; `python -m flash_attn_minimal --help` lists the commands\n"),
        (("--nonesuch",), "'--nonesuch' is not an option; `python -m flash_attn_minimal --help` lists the commands\n"),
        (("vreify",), "'vreify' is not a command; did you mean verify?\n"),
    ],
)
def test_wrong_usage(arguments, says):
    said = run(*arguments)
    assert (said.returncode, said.stdout, said.stderr) == (2, "", says)


def test_no_command():
    said = run()
    assert said.returncode == 2 and not said.stdout and "usage: python -m flash_attn_minimal COMMAND" in said.stderr


def test_version():
    said = run("--version", FLASH_ATTN_LIBRARY="/nowhere")
    assert (said.returncode, said.stdout, said.stderr) == (0, f"flash-attn-minimal {fa.__version__}\n", "")


def test_the_installed_script_calls_itself_by_its_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/flash-attn-minimal"])
    assert cli.main(["--help"]) == 0 and "usage: flash-attn-minimal COMMAND" in capsys.readouterr().out
    for command in cli._COMMANDS:
        assert cli.main([command, "--help"]) == 0
        said = capsys.readouterr().out
        assert f"usage: flash-attn-minimal {command}" in said and "python -m" not in said
    assert cli.main(["--nonesuch"]) == 2 and "`flash-attn-minimal --help`" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_a_mistyped_option_is_one_line_and_no_usage(command, capsys):
    needed = ["--weights", "int4", "--out", "x.safetensors"] if command == "quantize" else []
    assert cli.main([command, *needed, "--hepl"]) == 2
    assert capsys.readouterr().err == f"{command}: --hepl is not an option of this command; did you mean --help?\n"
    assert cli.main([command, *needed, "--hel"]) == 2, "options are not abbreviated"


# ---- the laboratory ----


def test_the_laboratory_has_its_own_commands():
    env = {**os.environ, "FLASH_ATTN_LIBRARY": "/nowhere", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "flash_attn_lab"]
    said = subprocess.run([*command, "--help"], capture_output=True, text=True, env=env)
    assert said.returncode == 0 and not said.stderr and "usage: python -m flash_attn_lab COMMAND" in said.stdout
    assert all(f"\n  {name} " in said.stdout for name in COMMANDS)
    said = subprocess.run([*command, "bnech"], capture_output=True, text=True, env=env)
    assert (said.returncode, said.stdout, said.stderr) == (2, "", "'bnech' is not a command; did you mean bench?\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_mistyped_options_of_the_laboratory(command, capsys):
    assert lab([command, "--help"]) == 0
    assert f"usage: python -m flash_attn_lab {command}" in capsys.readouterr().out
    assert lab([command, *(["tiny", "x"] if command == "synthetic" else []), "--hepl"]) == 2
    assert capsys.readouterr().err == f"{command}: --hepl is not an option of this command; did you mean --help?\n"


@pytest.mark.parametrize("command", ["bench", "context-parallel", "experiment", "fuzz", "synthetic"])
def test_the_old_word_of_a_command_says_where_it_is(command, monkeypatch, capsys):
    """In a checkout, and where a wheel is installed, which has no laboratory."""
    assert cli.main([command, "--help"]) == 2
    assert capsys.readouterr() == ("", f"'{command}' is now `python -m flash_attn_lab {command}`\n")
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main([command]) == 2
    where = f"in a checkout, `PYTHONPATH=python python -m flash_attn_lab {command}` runs it"
    assert capsys.readouterr() == ("", f"'{command}' is not in the installed package; {where}\n")


# ---- exit statuses and options ----


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (fa.BadArgument("--a 1\n is bad"), 2, "info: --a 1 is bad\n"),
        (fa.Unsupported("no"), 2, "info: no\n"),
        (fa.CudaError("a launch failed"), 1, "info: a launch failed\n"),
        (MemoryError("7 TiB"), 1, "info: out of memory: 7 TiB\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "info: [Errno 2] No such file: 'x'\n"),
        (OSError(28, "No space left"), 1, "info: [Errno 28] No space left\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_statuses(error, status, says, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(info, "load", fail)
    assert cli.main(["info"]) == status
    assert capsys.readouterr() == ("", says)


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (_command.integer(), "7", ["0", "-1", "x", "", "1.5", "99999999999"]),
        (_command.integer(0), "0", ["-1"]),
        (_command.any_seed, "9223372036854775807", ["-1", "9223372036854775808"]),
        (lab_command.integers, "1,2", ["1,", "0,1", "1;2"]),
        (_command.real(), "0", ["-0.1", "nan", "x"]),
        (_command.real(above=True), "1e-9", ["0"]),
        (_command.real(most=1), "1", ["1.1", "inf"]),
        (lab_command.some_of(("a", "b")), "a,b", ["a,c", ""]),
        (_command.one_of(("a", "b"))["type"], "a", ["c"]),
    ],
)
def test_values_of_options(make, good, bad):
    make(good)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is not|is negative|is below|is above"):
            make(text)


def test_the_arguments_without_those_that_say_where_results_go():
    words = ["--a", "1", "--output", "x", "--json=y", "--b", "--output=z", "--c"]
    assert lab_command.without(words, "--output", "--json") == ["--a", "1", "--b", "--c"]


def test_files_and_folders_are_checked_without_a_trace(tmp_path):
    (tmp_path / "file").write_text("as it was")
    _command.check_file("--x", tmp_path / "file")
    _command.check_file("--x", tmp_path / "new")
    _command.check_file("--x", None)
    lab_command.check_folder("--x", tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "as it was"
    for check, name in (
        (_command.check_file, "nowhere/x"),
        (_command.check_file, ""),
        (_command.check_file, "file/x"),
        (lab_command.check_folder, "file/x"),
        (lab_command.check_folder, "file"),
    ):
        with pytest.raises(_command.UsageError, match="^--x .*: cannot write there: "):
            check("--x", f"{tmp_path}/{name}")


@pytest.mark.parametrize("command", ["info", "verify"])
def test_help_of_a_command(command):
    said = run(command, "--help")
    assert said.returncode == 0 and f"usage: python -m flash_attn_minimal {command}" in said.stdout
    assert run(command, "--nonesuch").returncode == 2


def test_info():
    said = run("info")
    assert said.returncode == 0, said.stderr
    assert fa.__version__ in said.stdout and str(fa._core.library.path()) in said.stdout
    for kernel in fa.kernels():
        assert kernel["name"] in said.stdout
    assert "(4, 4096x4096, 32/8, 128)" in said.stdout
    q = np.zeros((1, 2, 1, 64), np.float32)
    for kernel in fa.kernels():
        if kernel["device"] == "cpu" and "lacks the instruction set" in fa.query(q, q, q, kernel=kernel["name"]).error:
            before, found, after = said.stdout.partition("\n  cannot run here: this processor, or this build, lacks")
            assert found and f" {kernel['name']} " not in before and f" {kernel['name']} " in after
    assert NO_CUDA == "" or "none found" in said.stdout or "GPU" in said.stdout
    lacks = not any(kernel["name"].startswith("mma_") for kernel in fa.kernels()) and "naive" in said.stdout.split()
    assert ("--all-kernels builds them" in said.stdout) == lacks


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_info_breaks_its_lines_between_words(columns):
    whole, narrow = run("info"), run("info", COLUMNS=str(columns))
    assert narrow.returncode == 0 and narrow.stdout.split() == whole.stdout.split()
    assert all(len(line) <= columns or len(line.split()) == 1 for line in narrow.stdout.splitlines())


def test_missing_library():
    said = run("info", FLASH_ATTN_LIBRARY="/nowhere.so")
    assert (
        said.returncode == 1
        and "FLASH_ATTN_LIBRARY=/nowhere.so: no such file" in said.stderr
        and "Traceback" not in said.stderr
    )


def test_verify_quick():
    said = run("verify", "--quick", "--device", "cpu")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "0 failed" in said.stdout and said.stdout.count("\nok") >= 2
    assert said.stderr.count("/4] ") == 4, "one line of progress per case when no one watches"


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": True, "top_left": True}, {"causal": True, "window_size": (20, 0)},
    {"window_size": (5, 3)}, {"softcap": 20.0, "causal": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("seqlen_q", [1, 33, 90])
def test_the_formula_of_verify_is_the_reference(options, seqlen_q):
    rng = np.random.default_rng(seqlen_q)
    q, k, v = (rng.standard_normal((1, n, h, d)) for n, h, d in ((seqlen_q, 6, 16), (90, 3, 16), (90, 3, 8)))
    found, exact = verify.formula(q, k, v, rows=16, **options), reference.standard_attention(q, k, v, **options)
    for mine, its in zip(found, exact, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-12, atol=1e-14)


def test_verify_reports_failure(monkeypatch, capsys):
    """A wrong answer is a FAIL line and exit status 1."""

    def wrong(q, k, v, **options):
        out, lse = fa.flash_attn_func(q, k, v, **options)
        out[0, -1, 0, 0] += 0.1
        return out, lse

    monkeypatch.setattr(verify, "flash_attn_func", wrong)
    monkeypatch.setattr(verify, "_QUICK", verify._QUICK[:1])
    assert cli.main(["verify", "--quick", "--device", "cpu"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_verify_fails_for_a_nan_in_lse(monkeypatch, capsys):
    attend = verify.flash_attn_func

    def wrong(*arrays, **options):
        out, lse = attend(*arrays, **options)
        lse[0, 0, -1] = float("nan")
        return out, lse

    monkeypatch.setattr(verify, "flash_attn_func", wrong)
    monkeypatch.setattr(verify, "_QUICK", verify._QUICK[:1])
    assert cli.main(["verify", "--quick", "--device", "cpu"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_verify_cuda_without_cuda():
    if not NO_CUDA:
        pytest.skip("there is a CUDA device")
    said = run("verify", "--quick", "--device", "cuda")
    assert said.returncode == 2 and "--device cuda" in said.stderr and "Traceback" not in said.stderr


def test_an_interrupted_verify_reports_what_it_has(monkeypatch, capsys):
    check, seen = verify.check, []

    def stop(*given):
        if seen:
            raise KeyboardInterrupt
        seen.append(given)
        return check(*given)

    monkeypatch.setattr(verify, "check", stop)
    assert cli.main(["verify", "--quick", "--device", "cpu"]) == 130
    said = capsys.readouterr().out
    assert said.startswith("ok ") and "1 of 4 passed, 0 failed, 0 skipped, 3 not run: interrupted" in said
