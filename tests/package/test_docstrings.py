"""The examples in the docstrings run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "flash_attn_minimal",
        "flash_attn_minimal.attention",
        "flash_attn_minimal.distributed.calls",
        "flash_attn_minimal.distributed.groups",
        "flash_attn_minimal.distributed.layouts",
        "flash_attn_minimal.transformer.ops",
        "flash_attn_lab.reference",
    ],
)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
