"""The parts of flash_attn.layers that programs import on their own."""

from . import rotary

__all__ = ["rotary"]
