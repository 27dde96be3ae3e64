"""The exceptions of this package."""

from __future__ import annotations


class FlashAttnError(Exception):
    """The base of all exceptions that this package defines."""


class BadArgument(FlashAttnError, ValueError):
    """An argument is wrong for every kernel; the text names it and quotes its value."""


class Unsupported(FlashAttnError, NotImplementedError):
    """A legal call that no kernel here (or not the forced one) serves; the text says why."""


class WorkspaceTooSmall(FlashAttnError, ValueError):
    """The workspace given to a launch is smaller than the size that the query returned."""


class CudaError(FlashAttnError, RuntimeError):
    """The CUDA runtime reported an error: no device, a failed launch, or an earlier asynchronous fault."""


class OutOfMemory(FlashAttnError, MemoryError):
    """The host has no memory left for threads, workspace or a result."""


class RankLost(FlashAttnError, RuntimeError):
    """Another rank of the group is late, has ended, or broke off. The group is unusable; see distributed."""


class LibraryNotFound(FlashAttnError, ImportError):
    """There is no shared library to load, or it does not load."""
