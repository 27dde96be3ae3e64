import numpy as np


def round_e4m3(x):
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(np.abs(x))  # |x| = f 2^exponent with f from 0.5 to 1
    step = 2.0 ** (
        np.maximum(exponent - 1, -6) - 3
    )  # eight steps between powers of two, and below 2^-6 as just above it
    return np.clip(np.rint(x / step) * step, -448, 448)  # rint takes ties to even


def quantize(x, block):
    blocks = x.reshape(len(x), -1, block)
    top = np.abs(blocks).max(axis=2)
    factors = np.where(top == 0, 1.0, top / 448)
    return round_e4m3(blocks / factors[..., None]).reshape(x.shape), factors
