"""Memory, streams and recordings for a program: on the CPU, and with PyTorch or CuPy on a GPU."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from flash_attn_minimal._core.recordings import Recording

from ..arrays import Cupy, Torch, backend_for
from ..function import Function

MOST_KEPT = 1 << 30  # bytes of a GPU's memory that a process keeps for its next programs


class Place:
    """The CPU. A handle is a block of bytes, an array of the backend."""

    # The functions that a Recording can record. A weight is packed when it is recorded, not when it is replayed.
    RECORDED = {
        "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "merge", "quantize_fp8", "rms_norm",
        "rope", "swiglu", "linear", "sample", "linear (4 bits)", "linear_chain", "backward",
    }  # fmt: skip

    def __init__(self, backend: Any):
        self.backend, self.graphs = backend, False

    def empty(self, size: int) -> Any:
        return self.backend.empty(size)

    def upload(self, host: np.ndarray) -> Any:
        return self.backend.upload(host)

    def download(self, handle: Any) -> np.ndarray:
        return self.backend.download(handle)

    def copy(self, to: Any, source: Any) -> None:
        """Copies on the current stream."""
        to[:] = source

    def clone(self, array: Any) -> Any:
        return array.clone() if hasattr(array, "clone") else array.copy()

    def address(self, handle: Any) -> int:
        return handle.data_ptr() if hasattr(handle, "data_ptr") else handle.ctypes.data

    def on(self, thread: int) -> Any:
        """A context in which the stream of a thread is current."""
        return contextlib.nullcontext()

    def can_record(self, function: Function) -> bool:
        return function.name in self.RECORDED

    def captured(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """(results of the call, a function that makes the call again on the same memory)."""
        with Recording() as recording:
            results = call()
        return results, recording

    def synchronize(self) -> None:
        """Waits for all work of all threads."""

    def release(self) -> None:
        """Gives back unused memory; called between programs."""


class TorchGpu(Place):
    """A GPU through PyTorch."""

    def __init__(self, backend: Torch, index: int = 0):
        super().__init__(backend)
        self.torch, self.index, self.graphs = backend.torch, index, True
        self.capturing = threading.Lock()
        # PyTorch has 32 streams and gives them out in turn. A new one for every capture would soon be the stream of a
        # thread, whose work would then be captured instead of done.
        self.streams: dict[int, Any] = {}
        self.capture_stream = backend.torch.cuda.Stream(index)

    def empty(self, size):
        return self.torch.empty(size, dtype=self.torch.uint8, device=f"cuda:{self.index}")

    def upload(self, host):
        return self.torch.from_numpy(host).to(f"cuda:{self.index}", copy=True)

    def copy(self, to, source):
        to.copy_(source)

    def on(self, thread):
        """Thread 0 stays on the default stream."""
        if not thread:
            return contextlib.nullcontext()
        if thread not in self.streams:
            self.streams[thread] = self.torch.cuda.Stream(self.index)
        return self.torch.cuda.stream(self.streams[thread])

    def can_record(self, function):
        return function.capturable

    def captured(self, call):
        torch, stream = self.torch, self.capture_stream
        before, graph = torch.cuda.current_stream(self.index), torch.cuda.CUDAGraph()
        with self.capturing:
            stream.wait_stream(before)
            try:
                with torch.cuda.stream(stream):
                    graph.capture_begin(capture_error_mode="thread_local")
                    try:
                        results = call()
                    finally:
                        graph.capture_end()
            finally:
                before.wait_stream(stream)
        return results, graph.replay

    def synchronize(self):
        with self.capturing:  # the device cannot be waited for while a stream of it is captured
            self.torch.cuda.synchronize(self.index)

    def release(self):
        """Frees the cached memory if it is large: PyTorch keeps the memory pool of each graph after the graph is
        gone."""
        if self.torch.cuda.memory_reserved(self.index) > MOST_KEPT:
            self.torch.cuda.empty_cache()


class CupyGpu(Place):
    """A GPU through CuPy, whose memory pool does not know about graphs."""

    def __init__(self, backend: Cupy):
        super().__init__(backend)
        self.cupy = backend.cupy
        self.streams: dict[int, Any] = {}

    def copy(self, to, source):
        self.cupy.copyto(to, source)

    def address(self, handle):
        return handle.data.ptr

    def can_record(self, function):
        return False

    def on(self, thread):
        if not thread:
            return contextlib.nullcontext()
        if thread not in self.streams:
            self.streams[thread] = self.cupy.cuda.Stream(non_blocking=True)
        return self.streams[thread]

    def synchronize(self):
        self.cupy.cuda.Device().synchronize()


class Places:
    """A Place for every device that a program may use: number 0, and with PyTorch also the machine's other GPUs."""

    def __init__(self, device: str, framework: str | None = None):
        if device == "cuda":
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self.backend = backend_for(device, framework)
        if device == "cuda" and isinstance(self.backend, Torch):
            self.all = [TorchGpu(self.backend, i) for i in range(self.backend.torch.cuda.device_count())]
        else:
            self.all = [CupyGpu(self.backend) if isinstance(self.backend, Cupy) else Place(self.backend)]

    def __getitem__(self, index: int) -> Place:
        return self.all[index % len(self.all)]

    def synchronize(self) -> None:
        for place in self.all:
            place.synchronize()

    def release(self) -> None:
        for place in self.all:
            place.release()

    @property
    def graphs(self) -> bool:
        return self.all[0].graphs
