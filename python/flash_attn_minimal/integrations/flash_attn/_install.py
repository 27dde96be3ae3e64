"""Puts the stand-ins under the names that programs import."""

from __future__ import annotations

import importlib
import importlib.util
import sys

_HERE = __package__
_MODULES = {
    "flash_attn": _HERE,
    "flash_attn.flash_attn_interface": f"{_HERE}.flash_attn_interface",
    "flash_attn.bert_padding": f"{_HERE}.bert_padding",
    "flash_attn.layers": f"{_HERE}.layers",
    "flash_attn.layers.rotary": f"{_HERE}.layers.rotary",
    "flash_attn_interface": f"{_HERE}.hopper",
}


def install() -> None:
    """Makes `import flash_attn` and `import flash_attn_interface` find the stand-ins, in this process. A second call
    changes nothing. Raises ImportError, and changes nothing, if one of the two is installed or imported."""
    ours = {name: importlib.import_module(place) for name, place in _MODULES.items()}
    for name, module in ours.items():
        if "." in name or sys.modules.get(name) is module:
            continue
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            raise ImportError(f"{name} is installed: the stand-in does not take its place", name=name)
    sys.modules.update(ours)


def uninstall() -> None:
    """Removes the names that `install` has added."""
    for name, place in _MODULES.items():
        if name in sys.modules and sys.modules[name] is sys.modules.get(place):
            del sys.modules[name]
