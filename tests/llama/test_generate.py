"""The command line: text on standard output; one line of error and status 2 for any wrong argument."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_models import MODELS

import flash_attn_minimal
from flash_attn_lab.models import synthetic
from flash_attn_lab.models.synthetic import write_checkpoint, write_tokenizer
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.generate import main
from flash_attn_minimal.llama.weights import load_checkpoint

CONFIG = Config(dim=32, hidden_dim=40, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=400, seq_len=48)
COMMAND = [sys.executable, "-m", "flash_attn_minimal.llama.generate"]
PACKAGE = str(Path(flash_attn_minimal.__file__).parents[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder / "model.bin", CONFIG, seed=2)
    write_checkpoint(folder / "model_v1.bin", CONFIG, version=1, seed=2)
    write_tokenizer(folder / "tok400.bin", 400)
    write_tokenizer(folder / "tok401.bin", 401)
    data = (folder / "model.bin").read_bytes()
    (folder / "truncated.bin").write_bytes(data[:-8])
    (folder / "trailing.bin").write_bytes(data + b"\0\0\0")
    (folder / "foreign.bin").write_text("a text file of more than twenty-eight bytes")
    (folder / "tok_truncated.bin").write_bytes((folder / "tok400.bin").read_bytes()[:-1])
    return folder


@pytest.fixture
def cli(folder, capsys, monkeypatch):
    """A function that calls main() inside the folder and returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(folder)

    def call(*argv):
        words = [str(argument) for argument in argv]
        status = main(words if "--device" in words else [*words, "--device", "cpu"])
        return status, *capsys.readouterr()

    return call


def subprocess_env(**changes):
    path = os.pathsep.join([PACKAGE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **changes}


# ---- text ----


@pytest.mark.parametrize("name", ["stories260K.bin", "stories260K_v1.bin"])
@pytest.mark.parametrize("tokenizer", [None, "tok512.bin", "tok512.model"])
def test_golden_text(capsys, name, tokenizer):
    if not (MODELS / name).is_file():
        pytest.skip(f"{MODELS / name} is not here; FLASH_ATTN_TEST_MODELS names the folder of the real models")
    case = json.loads((MODELS / "stories260K_greedy.json").read_text())["cases"][-1]
    argv = [str(MODELS / name), "--prompt", case["prompt"], "--device", "cpu"]
    argv += ["--steps", str(len(case["token_ids"]) - len(case["prompt_ids"]))]
    argv += ["--tokenizer", str(MODELS / tokenizer)] if tokenizer else []
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out == case["text"] + "\n"
    assert re.search(r"prefill +7 tokens in \d+\.\d\d ms", err)
    assert re.search(r"decode +93 steps in \d+\.\d+ s, \d+\.\d steps/s", err)
    assert re.search(r"memory +weights (1\.0 MiB|\d+\.\d KiB), KV cache 126\.2 KiB \(101 positions\)", err)
    assert "run      float32, cpu, greedy" in err and "stopped" not in err


def test_every_way_gives_the_same_text(cli):
    texts = {
        cli(name, "--steps", 20, "--prompt", "hello", *options)[1]
        for name in ("model.bin", "model_v1.bin")
        for options in ((), ("--page-size", 5))
    }
    assert len(texts) == 1 and texts.pop().startswith("hello")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(cli, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed")
    status, out, err = cli("model.bin", "--dtype", dtype, "--steps", 5, "--prompt", "hello")
    assert status == 0 and out.startswith("hello") and f"run      float32 with q, k, v in {dtype}" in err


def test_the_seed_repeats_a_text(cli):
    sampled = ["model.bin", "--temperature", 1.2, "--top-p", 0.95, "--steps", 30]
    first, again, other = cli(*sampled, "--seed", 5), cli(*sampled, "--seed", 5), cli(*sampled, "--seed", 6)
    assert first[0] == 0 and first[1] == again[1] != other[1]
    assert "temperature 1.2, top-p 0.95, seed 5" in first[2]


def test_a_fresh_seed_is_shown_and_repeats_the_text(cli):
    sampled = ["model.bin", "--temperature", 1.2, "--steps", 30]
    _, text, err = cli(*sampled)
    seed = re.search(r"seed (\d+)", err)[1]
    assert cli(*sampled, "--seed", seed)[1] == text


def test_stops_where_the_context_ends(cli):
    status, _, err = cli("model.bin", "--steps", 1000, "--temperature", 2, "--top-p", 1, "--seed", 1)
    assert status == 0
    assert "stopped  after 48 of 1000 new tokens: the context of 48 tokens is full" in err


def test_no_steps_print_the_prompt(cli):
    status, out, err = cli("model.bin", "--steps", 0, "--prompt", "hello")
    assert (status, out) == (0, "hello\n") and "decode   0 steps" in err


def test_a_prompt_that_fills_the_context(cli):
    status, out, err = cli("model.bin", "--steps", 9, "--prompt", "!" * 46)
    assert status == 0 and "prefill  48 tokens" in err and "stopped  after 1 of 9" in err


def test_prompt_beyond_ascii(cli):
    assert cli("model.bin", "--steps", 0, "--prompt", "\u4f60\u597d \U0001f600")[1] == "\u4f60\u597d \U0001f600\n"


def test_several_texts(cli):
    alone = [cli("model.bin", "--prompt", text, "--steps", 12)[1] for text in ("hello", "you")]
    for options in ((), ("--page-size", 5)):
        status, out, err = cli("model.bin", "--prompt", "hello", "--prompt", "you", "--steps", 12, *options)
        assert (status, out) == (0, "\n".join(alone)) and "greedy, 2 at once" in err and "tokens/s" in err
    assert cli("model.bin", "--prompt", "hello", "--steps", 12, "--batch", 2)[1] == "\n".join([alone[0]] * 2)


def test_a_paged_cache(cli):
    status, out, err = cli("model.bin", "--prompt", "hello", "--steps", 12, "--page-size", 5)
    assert (status, out) == (0, cli("model.bin", "--prompt", "hello", "--steps", 12)[1])
    assert "pages of 5 positions" in err


def test_a_hugging_face_folder(cli, tmp_path):
    pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    assert synthetic.main(["tiny", str(tmp_path / "tiny"), "--dtype", "float32", "--shards", "2"]) == 0
    texts = set()
    for options in ((), ("--page-size", 5)):
        status, out, err = cli(tmp_path / "tiny", "--prompt", "hello", "--steps", 12, *options)
        assert status == 0 and out.startswith("hello") and "tiny: Hugging Face LlamaForCausalLM, dim 64" in err
        texts.add(out)
    assert len(texts) == 1


# ---- errors ----


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nowhere.bin"], r"checkpoint 'nowhere.bin': No such file"),
        (["."], r"checkpoint '.' is a folder without config.json"),
        (["model.bin", "--prompt", "a", "--prompt", "!" * 47], r"prompt has 49 tokens"),
        (["model.bin", "--batch", "0"], r"--batch: 0 is not positive"),
        (["model.bin", "--page-size", "-1"], r"--page-size: -1 is not positive"),
        (["model.bin", "--top-k", "-1"], r"--top-k: -1 is negative"),
        (["truncated.bin"], r"checkpoint 'truncated.bin' is truncated: \d+ bytes where its header"),
        (["trailing.bin"], r"checkpoint 'trailing.bin' has 3 trailing bytes"),
        (["foreign.bin"], r"checkpoint 'foreign.bin' is no llama2.c checkpoint: its header says dim=\d+"),
        (["tok400.bin"], r"checkpoint 'tok400.bin' is no llama2.c checkpoint"),
        (["model.bin", "--tokenizer", "nowhere.model"], r"tokenizer 'nowhere.model': No such file"),
        (
            ["model.bin", "--tokenizer", "tok401.bin"],
            r"tokenizer 'tok401.bin' has 401 tokens, but the checkpoint's vocab_size is 400",
        ),
        (
            ["model.bin", "--tokenizer", "tok_truncated.bin"],
            r"tokenizer 'tok_truncated.bin': truncated inside token 399",
        ),
        (["model.bin", "--tokenizer", "foreign.bin"], r"tokenizer 'foreign.bin': it is neither"),
        (["model.bin", "--prompt", "!" * 47], r"prompt has 49 tokens, more than the model's context of 48"),
        (["model.bin", "--steps", "-3"], r"--steps: -3 is negative"),
        (["model.bin", "--steps", "many"], r"--steps: 'many' is not a whole number"),
        (["model.bin", "--temperature", "-0.5"], r"--temperature: -0.5 is negative"),
        (["model.bin", "--temperature", "nan"], r"--temperature: 'nan' is not a number"),
        (["model.bin", "--top-p", "0"], r"--top-p: 0 is not positive"),
        (["model.bin", "--top-p", "1.01"], r"--top-p: 1.01 is above 1"),
        (["model.bin", "--top-p", "nan"], r"--top-p: 'nan' is not a number"),
        (["model.bin", "--seed", "-1"], r"--seed: -1 is negative"),
        (["model.bin", "--dtype", "float64"], r"--dtype: 'float64' is not one of auto, "),
        (["model.bin", "--device", "tpu"], r"--device: 'tpu' is not one of auto, cpu, cuda"),
        (
            ["model.bin", "--temprature", "1"],
            r"--temprature is not an option of this command; did you mean --temperature\?",
        ),
    ],
)
def test_bad_input(cli, argv, message):
    status, out, err = cli(*argv)
    assert (status, out) == (2, "")
    assert re.search(message, err) and err.startswith("generate: ") and err.count("\n") == 1


def test_no_tokenizer_beside_the_checkpoint(cli, folder, tmp_path):
    (tmp_path / "model.bin").write_bytes((folder / "model.bin").read_bytes())
    status, out, err = cli(tmp_path / "model.bin")
    assert (status, out) == (2, "") and "none of tok400.bin, tok400.model, tokenizer.bin, tokenizer.model" in err
    write_tokenizer(tmp_path / "tokenizer.bin", 400)
    assert cli(tmp_path / "model.bin", "--steps", 1)[0] == 0


@pytest.mark.parametrize(
    "module, argv, message",
    [
        ("cupy", ["--device", "cuda"], "device='cuda' needs CuPy"),
        ("ml_dtypes", ["--dtype", "bfloat16"], "bfloat16 needs the ml_dtypes package"),
    ],
)
def test_missing_packages(cli, monkeypatch, module, argv, message):
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    status, out, err = cli("model.bin", *argv)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1


def test_out_of_memory(cli, monkeypatch):
    def refuse(*_):
        raise MemoryError("Unable to allocate 7 TiB")

    monkeypatch.setattr("flash_attn_minimal.llama.cache.KVCache.__init__", refuse)
    assert cli("model.bin") == (1, "", "generate: out of memory: Unable to allocate 7 TiB\n")


def test_interrupted(cli, monkeypatch):
    """Ctrl-C during the text: the text so far, the timings, and status 130."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("flash_attn_minimal.llama.sampling.Sampler.draw", interrupt)
    status, out, err = cli("model.bin", "--prompt", "hello")
    assert (status, out) == (130, "hello\n") and "decode   0 steps" in err


def test_a_missing_library_is_one_line(folder):
    env = subprocess_env(FLASH_ATTN_LIBRARY=str(folder / "nowhere.so"))
    argv = [*COMMAND, "model.bin", "--steps", "2", "--device", "cpu"]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and "nowhere.so" in done.stderr


def test_a_reader_that_leaves(folder):
    """`generate ... | head -c 1`: no traceback."""
    argv = [*COMMAND, "model.bin", "--steps", "40"]
    process = subprocess.Popen(argv, cwd=folder, env=subprocess_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0
    process.stderr.close()


def test_a_terminal_that_lacks_the_characters(folder):
    argv = [*COMMAND, "model.bin", "--steps", "0", "--prompt", "caf\u00e9"]
    done = subprocess.run(argv, cwd=folder, env=subprocess_env(PYTHONIOENCODING="ascii"), capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"caf?\n")


def test_help_names_every_option(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for option in (
        "tokenizer",
        "prompt",
        "steps",
        "temperature",
        "top-k",
        "top-p",
        "seed",
        "device",
        "dtype",
        "batch",
        "page-size",
    ):
        assert f"--{option}" in out
    assert "examples:" in out and "exit status:" in out


# ---- the writer of synthetic checkpoints ----


def test_synthetic_command(tmp_path, capsys):
    argv = [
        "stories260K",
        str(tmp_path / "model.bin"),
        "--version",
        "1",
        "--untied",
        "--tokenizer",
        str(tmp_path / "tok512.bin"),
    ]
    assert synthetic.main(argv) == 0
    checkpoint = load_checkpoint(tmp_path / "model.bin")
    assert checkpoint.format == "llama2.c v1" and not checkpoint.tied
    assert checkpoint.config == synthetic.SHAPES["stories260K"]
    assert main([str(tmp_path / "model.bin"), "--steps", "3"]) == 0
    assert synthetic.main(["stories260K", str(tmp_path / "nowhere" / "model.bin")]) == 2
    assert "nowhere" in capsys.readouterr().err
