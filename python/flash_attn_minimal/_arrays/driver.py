"""The CUDA driver, for doors whose frameworks have no streams."""

from __future__ import annotations

import ctypes as ct
import functools

from ..errors import CudaError


@functools.cache
def _driver() -> ct.CDLL:
    """libcuda, which the caller's framework has loaded already; the shared library itself does not link it."""
    try:
        lib = ct.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"an array is said to be on a GPU, but there is no CUDA driver: {error}") from None
    lib.cuDevicePrimaryCtxRetain.argtypes = [ct.POINTER(ct.c_void_p), ct.c_int]
    lib.cuCtxPushCurrent_v2.argtypes = [ct.c_void_p]
    lib.cuCtxPopCurrent_v2.argtypes = [ct.POINTER(ct.c_void_p)]
    lib.cuDevicePrimaryCtxRelease_v2.argtypes = [ct.c_int]
    lib.cuStreamSynchronize.argtypes = [ct.c_void_p]
    lib.cuPointerGetAttribute.argtypes = [ct.c_void_p, ct.c_int, ct.c_uint64]
    return lib


def _check_driver(status: int, what: str) -> None:
    if status:
        raise CudaError(f"{what} returned CUDA driver error {status}")


def synchronize(index: int, stream: int | None) -> None:
    """Waits for a stream of a device, in the device's primary context (the one every framework uses)."""
    driver, context = _driver(), ct.c_void_p()
    _check_driver(driver.cuDevicePrimaryCtxRetain(ct.byref(context), index), "cuDevicePrimaryCtxRetain")
    try:
        _check_driver(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            _check_driver(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
        finally:
            driver.cuCtxPopCurrent_v2(ct.byref(ct.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(index)


def device_of(pointer: int) -> int:
    """The CUDA device that owns an address."""
    ordinal, device_ordinal_attribute = ct.c_int(), 9
    status = _driver().cuPointerGetAttribute(ct.addressof(ordinal), device_ordinal_attribute, pointer)
    _check_driver(status, "cuPointerGetAttribute")
    return ordinal.value
