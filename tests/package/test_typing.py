"""Types for type checkers: tests/typing/public.py passes mypy, and the declared options equal those of the
functions."""

import ast
import importlib.util
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flash_attn_minimal as fa
from flash_attn_minimal import distributed, kvcache
from flash_attn_minimal._core import options as _options
from flash_attn_minimal.transformer import ops, quantized

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("examples/story_grammar.py", "examples/train_tiny.py", "examples/context_parallel/train.py")


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_sees_what_the_functions_return(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, "tests/typing", *EXAMPLES],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", [fa, distributed, ops, quantized], ids=lambda module: module.__name__)
def test_public_functions_say_their_types(module):
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    functions = [f for name in names if inspect.isfunction(f := getattr(module, name)) and name in vars(module)]
    functions = [f for f in functions if f.__module__.startswith("flash_attn_minimal")]
    assert len(functions) > 3
    for function in functions:
        signature = inspect.signature(function)
        hints = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
        assert inspect.Parameter.empty not in hints, function.__name__


@pytest.mark.skipif(shutil.which("basedpyright") is None, reason="basedpyright is not installed")
def test_pyright_finds_nothing():
    done = subprocess.run(["basedpyright"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


RETURNS = ("return_lse", "return_softmax_lse", "return_max_score", "return_key_sums")


@pytest.mark.parametrize("function,keyword_only,every,apart", [
    (fa.flash_attn_func, _options.KeywordOptions, _options.AttentionOptions, {"q", "k", "v", "out", *RETURNS}),
    (
        fa.flash_attn_varlen_func, _options.KeywordOptions, _options.AttentionOptions,
        {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "out", *RETURNS},
    ),
    (
        fa.flash_attn_with_kvcache, kvcache.CacheKeywordOptions, kvcache.CacheOptions,
        {"q", "k_cache", "v_cache", "return_lse", "return_softmax_lse"},
    ),
])  # fmt: skip
def test_the_declared_options_are_the_functions(function, keyword_only, every, apart):
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in apart}
    options = {p.name: p.annotation for p in parameters if p.name not in apart}
    for names, declared in ((keywords, keyword_only), (options, every)):
        assert {name: hint.__forward_arg__ for name, hint in declared.__annotations__.items()} == names


def long_calls(source):
    """Lines of the calls with more than twelve positional arguments; one with a star counts as none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and sum(not isinstance(x, ast.Starred) for x in node.args) > 12:
            yield node.lineno


def test_long_argument_lists_go_by_keyword():
    """A type checker does not notice when two flags of an unnamed list are swapped."""
    assert list(long_calls(f"f({'0, ' * 12} *x, y=0)\ng({'0, ' * 13})")) == [2]
    files = sorted((ROOT / "python").rglob("*.py"))
    assert len(files) > 150
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in long_calls(path.read_text())]
    assert not found, f"more than twelve unnamed arguments: {found}"
