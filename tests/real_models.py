"""The folder of the published models, which a checkout may lack."""

import os
from pathlib import Path

import pytest

MODELS = Path(os.environ.get("FLASH_ATTN_TEST_MODELS", Path(__file__).resolve().parents[2] / "shared" / "models"))


def model_file(name):
    if not (MODELS / name).is_file():
        pytest.skip(f"{MODELS / name} is not here; FLASH_ATTN_TEST_MODELS names the folder of the real models")
    return MODELS / name
