"""The tiles of our kernels for plain 16-bit calls on Hopper, for models and waves. They are copied from
cuda/attention/forward/wgmma_sm90/plan.h, cuda/attention/common/tiles_mma_sm80.h and cuda/flash_attn_minimal.cu."""

from __future__ import annotations

from ._traffic import Tile

BLOCKS_PER_SM = {"mma_sm80": 2, "minimal": 2, "wgmma_sm90": 1}
WGMMA = {64: (Tile(128, 128), Tile(192, 128)), 128: (Tile(128, 128), Tile(192, 80))}  # short calls, long calls
MMA = {64: Tile(128, 128), 128: Tile(128, 64)}


def tile_of(kernel: str, headdim: int, seqlen: int, causal: bool) -> Tile | None:
    """The tile of a self-attention call that fills the GPU; None if it is not known here."""
    if kernel == "minimal":
        return Tile(64, 64)
    if kernel == "mma_sm80":
        return MMA.get(headdim)
    if kernel == "wgmma_sm90" and headdim in WGMMA:
        if headdim == 64:
            long = seqlen > (2048 if causal else 1024)
        else:
            long = seqlen >= (8192 if causal else 2048)
        return WGMMA[headdim][long]
    return None


def multiprocessors(machine) -> int:
    """The number of SMs of a bench machine's GPU."""
    if machine.framework == "torch":
        return machine.torch.cuda.get_device_properties(machine.torch.cuda.current_device()).multi_processor_count
    return machine.cupy.cuda.Device().attributes["MultiProcessorCount"]
