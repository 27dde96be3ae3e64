"""The public functions as a type checker sees them: `mypy tests/typing/public.py` finds no error. This file never
runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flash_attn_minimal as fa
from flash_attn_minimal.transformer import ops

if TYPE_CHECKING:
    from typing_extensions import assert_type


class Tensor:
    """An array of some framework."""

    shape: tuple[int, ...]


class Dtype:
    """A dtype of some framework."""

    itemsize: int


def attention(x: Tensor, cu: Tensor, flag: bool, dtype: Dtype) -> None:
    assert_type(fa.flash_attn_func(x, x, x), Tensor)
    assert_type(fa.flash_attn_func(x, x, x, 0.0, None, True, (128, 0)), Tensor)
    assert_type(fa.flash_attn_func(x, x, x, causal=True, sinks=x, kernel="minimal"), Tensor)
    assert_type(fa.flash_attn_func(x, x, x, mask=cu, out=x, out_dtype=dtype), Tensor)
    assert_type(fa.flash_attn_func(x, x, x, out_dtype="bfloat16"), Tensor)
    assert_type(fa.flash_attn_func(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fa.flash_attn_func(x, x, x, causal=True, bias=x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fa.flash_attn_func(x, x, x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(fa.flash_attn_varlen_func(x, x, x, cu, cu, 5, 5, causal=True), Tensor)
    assert_type(fa.flash_attn_varlen_func(x, x, x, cu, cu, 5, 5, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fa.flash_attn_func(x, x, x, return_lse=flag, return_max_score=True), tuple[Tensor, ...])
    assert_type(fa.flash_attn_varlen_func(x, x, x, cu, cu, 5, 5, return_max_score=True), tuple[Tensor, ...])
    assert_type(fa.flash_attn_func(x, x, x, causal=True, return_key_sums=True), tuple[Tensor, ...])
    assert_type(fa.merge(x, x, x, x), tuple[Tensor, Tensor])
    assert_type(fa.quantize_fp8(x, hadamard=True), tuple[Tensor, Tensor])
    assert_type(fa.query(x, x, x, causal=True).kernel, str)


def gradients(x: Tensor) -> None:
    assert_type(fa.backward(x, x, x, x, x, x, causal=True), tuple[Tensor, ...])


def cache(x: Tensor) -> None:
    assert_type(fa.flash_attn_with_kvcache(x, x, x, x, x, cache_seqlens=7, causal=True), Tensor)
    assert_type(fa.flash_attn_with_kvcache(x, x, x, block_table=x, return_softmax_lse=True), tuple[Tensor, Tensor])
    assert_type(fa.quantize_kvcache(x, x, "int8"), tuple[Tensor, Tensor, Tensor, Tensor])


def around(x: Tensor) -> None:
    assert_type(ops.rms_norm(x, x), Tensor)
    assert_type(ops.linear(x, x, swiglu=True), Tensor)
    assert_type(ops.linear_chain([{"x": x, "weight": x}]), list[Any])


def wrong(x: Tensor) -> None:
    """Each line has the error that its comment names; mypy reports a comment without one."""
    fa.flash_attn_func(x, x)  # type: ignore[call-overload]
    fa.flash_attn_func([1.0], x, x)  # type: ignore[call-overload]
    fa.flash_attn_func(x, x, x, mask=[True])  # type: ignore[call-overload]
    fa.flash_attn_func(x, x, x, out_dtype=16)  # type: ignore[call-overload]
    fa.flash_attn_varlen_func(x, x, x, [0, 5], x, 5, 5)  # type: ignore[call-overload]
    fa.flash_attn_with_kvcache(x, x, x, cache_seqlens=[3, 4])  # type: ignore[call-overload]
    fa.backward(x, x, x, x, x, x, bias=1.0)  # type: ignore[arg-type]
    fa.query(x, x, x, casual=True)  # type: ignore[call-arg]
    fa.flash_attn_func(x, x, x, casual=True)  # type: ignore[call-overload]
    fa.flash_attn_func(x, x, x, softmax_scale="1")  # type: ignore[call-overload]
    fa.flash_attn_with_kvcache(x, x, x, num_splits=1.5)  # type: ignore[call-overload]
