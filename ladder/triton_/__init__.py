"""Attention in Triton and in Gluon, as rungs of the ladder. README.md says how they differ from CUDA."""

from __future__ import annotations

from ..rung import Calls, Rung, Unavailable

HERE = "ladder/triton_/"
SIXTEEN = ("float16", "bfloat16")


def _gpu() -> tuple[int, int]:
    """The compute capability of the GPU. Raises Unavailable without PyTorch, Triton or a GPU."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed") from None
    if not torch.cuda.is_available():
        raise Unavailable("no GPU")
    return torch.cuda.get_device_capability()


def _triton() -> Calls:
    _gpu()
    try:
        from . import flash_attention
    except ImportError as error:
        raise Unavailable(f"this Triton is too old: {error}") from None
    return Calls(flash_attention.forward, flash_attention.backward)


def gluon_refusal() -> str | None:
    """The reason not to run, or None. Gluon is an experimental part of Triton, and changes from release to release."""
    import triton

    here = triton.__version__
    return None if here.startswith("3.6.") else f"written for the Gluon of Triton 3.6, and this is Triton {here}"


def _gluon() -> Calls:
    if (arch := _gpu())[0] != 9:
        raise Unavailable(f"wgmma is an instruction of Hopper, and this GPU is sm_{arch[0]}{arch[1]}")
    if reason := gluon_refusal():
        raise Unavailable(reason)
    from . import gluon_flash_attention

    return Calls(gluon_flash_attention.forward)


RUNGS = (
    Rung(
        name="triton",
        language="Triton",
        about="a program for a tile; the compiler lays out threads, memory and copies",
        device="cuda",
        files=(HERE + "flash_attention.py",),
        load=_triton,
        dtypes=("float32", *SIXTEEN),
        headdims=(32, 64, 128, 256),
    ),
    Rung(
        name="gluon_sm90",
        language="Gluon",
        about="Triton's compiler, with layouts, barriers and roles written down",
        device="cuda",
        files=(HERE + "gluon_flash_attention.py",),
        load=_gluon,
        dtypes=SIXTEEN,
    ),
)
