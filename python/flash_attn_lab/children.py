"""Child processes of the laboratory's commands import what their parent imports."""

from __future__ import annotations

import os
from pathlib import Path

import flash_attn_minimal


def python_path() -> str:
    """PYTHONPATH for a child: this process's product, which may be an installed one, then the laboratory."""
    packages = [flash_attn_minimal.__file__, __file__]
    folders = [str(Path(file).resolve().parents[1]) for file in packages]
    return os.pathsep.join(dict.fromkeys([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]))
