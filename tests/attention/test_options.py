"""The options of attention are declared once (_core/options.py), and what every function makes of them follows."""

import inspect

import numpy as np
import pytest

import flash_attn_minimal as fa
from flash_attn_minimal import kvcache
from flash_attn_minimal._core import forward
from flash_attn_minimal._core.options import (
    ARRAYS,
    OPTION_ARRAYS,
    AttentionOptions,
    Options,
    PositionalOptions,
    ScoreOptions,
    hints_of,
)

Q = np.ones((1, 4, 2, 16), np.float32)
PACKED, CU = np.ones((4, 2, 16), np.float32), np.array([0, 1, 4], np.int32)
CACHE = np.zeros((1, 8, 2, 16), np.float32)
CALLS = {
    "dense": lambda **options: fa.flash_attn_func(Q, Q, Q, **options),
    "varlen": lambda **options: fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU, CU, 3, 3, **options),
    "kvcache": lambda **options: fa.flash_attn_with_kvcache(Q, CACHE, CACHE, **options),
}


def another(hint, name):
    """A value that is not the default."""
    if hint.startswith("AnyArray"):
        return np.ones(2, np.float32)
    values = {"bool": True, "int": 3, "int | None": 3, "float": 0.25, "float | None": 0.25, "str | None": "cpu_naive"}
    return {**values, "tuple[int, int]": (1, 0), "DType | None": "float16"}[hint]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", hints_of(AttentionOptions))
def test_every_option_decides_whether_a_call_is_a_repeat(call, name, monkeypatch):
    """A call with the option has another key than one without it, or none: it is never taken for a repeat of that."""
    table, keys = kvcache._repeats if call == "kvcache" else forward.repeats, []
    if call == "kvcache" and name not in hints_of(kvcache.CacheOptions):
        pytest.skip("caches have no such option")

    def find(given, arrays, values, *rest):
        keys.append((given, values))
        return None, None

    monkeypatch.setitem(vars(table), "find", find)  # setattr would leave the method on the object afterwards
    CALLS[call]()
    try:
        CALLS[call](**{name: another(hints_of(AttentionOptions)[name], name)})
    except (fa.BadArgument, fa.Unsupported):
        pass  # the key comes first
    assert len(keys) == (1 if name == "dropout_offset" else 2)  # an offset without a seed is not repeated
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", hints_of(AttentionOptions))
def test_defaults_are_those_of_the_signature(name):
    for function in (fa.flash_attn_func, fa.flash_attn_varlen_func):
        parameter = inspect.signature(function).parameters[name]
        assert parameter.default == getattr(Options(), name) and type(parameter.default) is type(
            getattr(Options(), name)
        )
        assert (parameter.kind is parameter.KEYWORD_ONLY) == (name not in hints_of(PositionalOptions))
    if name in hints_of(ScoreOptions):
        assert inspect.signature(fa.flash_attn_with_kvcache).parameters[name].default == getattr(Options(), name)


def test_numbers_and_arrays_are_all_options():
    names = [name for name in Options._fields if name not in ("dropout_seed", "dropout_offset")]
    numbers = Options()._replace(**{name: name for name in names}).numbers()
    assert {*numbers, *ARRAYS} == {*names, False}  # False: there is no seed
    assert Options(dropout_seed=3).numbers() == Options(dropout_seed=4, dropout_offset=5).numbers() != numbers


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_option_is_named(call):
    for name in ("casual", *["dropout_seed"] * (call == "kvcache")):
        with pytest.raises(TypeError, match=rf"flash_attn_\w+\(\) got an unexpected keyword argument '{name}'"):
            CALLS[call](**{name: 1})


def test_every_array_has_a_place_among_the_arguments_of_operators():
    descales = {name for name in ARRAYS if name.endswith("_descale")}
    assert len(OPTION_ARRAYS) == len(set(OPTION_ARRAYS)) and set(OPTION_ARRAYS) == set(ARRAYS) - descales
