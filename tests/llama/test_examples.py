"""The examples run, and the model in the package is the one that the example wrote."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.llama2c import save_checkpoint, tensor_shapes
from flash_attn_minimal.llama.tokenizer import load_tokenizer
from flash_attn_minimal.llama.weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))


def test_stories_follow_from_their_seed():
    from story_grammar import story

    stories = [story(seed) for seed in range(300)]
    assert stories == [story(seed) for seed in range(300)]
    assert len(set(stories)) == 300
    assert all(text.isascii() and 150 < len(text) < 1500 and "  " not in text for text in stories)


def test_training_runs_and_its_model_tells(tmp_path):
    pytest.importorskip("torch")
    for module in ("rich", "matplotlib"):
        pytest.importorskip(module)
    command = [sys.executable, ROOT / "examples/train_tiny.py", "--device", "cpu", "--steps", "4", "--compare"]
    done = subprocess.run([*command, "--out", tmp_path], text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "losses.json").read_text())
    ours, theirs = (run["losses"] for run in report["runs"])
    assert len(ours) == 4 and 5 < ours[0] < 7
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert (tmp_path / "held_out.txt").read_text() == DEFAULT_CHECKPOINT.with_name("held_out.txt").read_text()
    assert (tmp_path / "losses.png").stat().st_size > 1000
    checkpoint = load_checkpoint(tmp_path / "stories.bin")
    assert find_tokenizer(checkpoint).decode(find_tokenizer(checkpoint).encode("Ada met a fox.")) == "Ada met a fox."


def test_no_letter_of_the_training_text_is_lost():
    pytest.importorskip("torch")
    pytest.importorskip("rich")
    from story_grammar import story
    from train_tiny import tokens_of

    tokenizer = load_tokenizer(DEFAULT_CHECKPOINT.with_name("tokenizer.bin"))
    for seed in range(50):
        text = story(seed)
        tokens = tokens_of([text], tokenizer).tolist()
        assert tokenizer.decode(tokens) == text
        assert tokens == tokenizer.encode(text)


def test_a_bad_step_count_is_refused():
    pytest.importorskip("torch")
    pytest.importorskip("rich")
    command = [sys.executable, ROOT / "examples/train_tiny.py", "--steps", "0"]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 2 and "--steps 0 is below 1" in done.stderr


@pytest.mark.parametrize("prompt", ["", "One day, a girl named Cora"])
def test_the_model_in_the_package_tells_a_story(prompt):
    command = [sys.executable, "-m", "flash_attn_minimal", "generate", "--prompt", prompt]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt)
    words = done.stdout.split()
    assert len(words) > 40 and len(set(words)) > 25  # a story, and not a stutter
    assert DEFAULT_CHECKPOINT.stat().st_size < 3 << 20


def test_saved_checkpoints_are_read_back(tmp_path):
    config = Config(16, 24, 2, 4, 2, 300, 32)
    for version, tied in ((0, True), (0, False), (1, True), (1, False)):
        shapes = tensor_shapes(config, version, tied)
        tensors = {name: np.random.default_rng(len(name)).random(shape, np.float32) for name, shape in shapes.items()}
        path = tmp_path / f"{version}{tied}.bin"
        save_checkpoint(path, config, tensors, version, tied)
        read = load_checkpoint(path)
        assert (read.format, read.tied, read.config) == (f"llama2.c v{version}", tied, config)
        assert all(np.array_equal(read[name], tensors[name]) for name in shapes)
    wrong = {**tensors, "wq": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"wq has shape \(3,\): expected \(2, 16, 16\)"):
        save_checkpoint(path, config, wrong, 1, False)
    assert load_checkpoint(path).config == config  # the older file is still there, whole
    del wrong["wq"]
    with pytest.raises(ValueError, match="tensors lacks wq"):
        save_checkpoint(path, config, wrong, 1, False)
    assert not list(tmp_path.glob("*.part"))
