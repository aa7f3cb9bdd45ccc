"""Activation functions and their gradients on tiles of float32 values.

The formulas, their constants ``C0, C1, C2`` and their edge cases are those of
:mod:`functional_te.kernels.reference.activation`; only the order of some operations differs. Functions of exponentials
are written with the hardware's power of two, which costs up to 4e-6 of a value where the exponential is tiny, and a
sigmoid below the smallest normal number is 0.

Every formula takes a tile ``x`` and a gradient ``grad`` and gives ``(phi(x), grad * phi'(x))``. A caller that uses one
of the two pays for one only: the other is dead code, and what both have in common is computed once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from functional_te.kernels.triton.rounding import reciprocal

__all__ = ["FORMULAS", "formula"]


@triton.jit
def _sigmoid_of(x):
    """``1 / (1 + exp(-x))``."""
    return reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))  # log2(e)


@triton.jit
def _tanh_of(x):
    """Hyperbolic tangent: an odd polynomial near 0, where the form with an exponential cancels, else that form.

    The polynomial is a least-squares fit weighted for its relative error, 1.3 units in the last place.
    """
    size = tl.abs(x)
    square = x * x
    series = -0.05305290222167969 + square * 0.01725689508020878
    series = -0.33333149552345276 + square * (0.1332598626613617 + square * series)
    large = 1.0 - 2.0 * reciprocal(tl.exp2(size * 2.8853900817779268) + 1.0)  # 2 log2(e)
    return tl.where(size < 0.5, x + x * (square * series), tl.where(x < 0.0, -large, large))


@triton.jit
def _identity(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    return x, grad


@triton.jit
def _gelu(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    # 0.5 (1 + tanh(u)) = sigmoid(2 u) with 2 u = 2 sqrt(2 / pi) (x + 0.044715 x^3). Bounded as in the reference, for
    # the square of a large x would make inf * 0; near the bound the sigmoid is already exactly 0 or 1.
    z = tl.minimum(tl.maximum(x, -100.0), 100.0)
    sigmoid = _sigmoid_of(1.5957691216057308 * (z + 0.044715 * (z * z * z)))
    slope = 1.5957691216057308 * (1.0 + 0.134145 * (z * z))
    z += 0.0 * x  # an infinity makes the formula's NaN
    return x * sigmoid, grad * (sigmoid + z * (sigmoid * (1.0 - sigmoid)) * slope)


@triton.jit
def _erf_gelu(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # the share of a normal distribution
    density = 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)  # log2(e) / 2
    return x * below, grad * (below + x * density)


@triton.jit
def _swish(x, grad, ALPHA: tl.constexpr):
    """``x sigmoid(ALPHA x)``."""
    sigmoid = _sigmoid_of(x * ALPHA)
    return x * sigmoid, grad * (sigmoid + ALPHA * (x * (1.0 - sigmoid) * sigmoid))


@triton.jit
def _silu(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    sigmoid = _sigmoid_of(x)
    return x * sigmoid, grad * sigmoid * (1.0 + x * (1.0 - sigmoid))


@triton.jit
def _qgelu(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    return _swish(x, grad, 1.702)


@triton.jit
def _relu(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, grad)  # NaN is not below 0 and stays


@triton.jit
def _srelu(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    positive = tl.where(x <= 0.0, 0.0, x)
    half = grad * positive
    return positive * positive, half + half


@triton.jit
def _tanh_srelu(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    tanh = _tanh_of(tl.where(x <= 0.0, 0.0, x) / C0)
    bounded = tanh * C0
    half = grad * bounded * (1.0 - tanh * tanh)
    return bounded * bounded, half + half


@triton.jit
def _sigmoid(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    sigmoid = _sigmoid_of(x)
    return sigmoid, grad * (1.0 - sigmoid) * sigmoid


@triton.jit
def _situ(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    tanh, sigmoid = _tanh_of(x / C0), _sigmoid_of(x)
    slope = sigmoid * (1.0 - tanh * tanh) + C0 * (tanh * (1.0 - sigmoid) * sigmoid)
    return tanh * sigmoid * C0, grad * slope


@triton.jit
def _soft_limit(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    tanh = _tanh_of(x / C1)
    return tanh * C1, grad * (1.0 - tanh * tanh)


@triton.jit
def _clamped_gate(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    value, slope = _swish(tl.where(x > C0, C0, x), grad, C1)
    return value, tl.where(x <= C0, slope, 0.0)  # NaN counts as outside


@triton.jit
def _hard_limit(x, grad, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    value = tl.where(x > C0, C0, tl.where(x < -C0, -C0, x)) + C2
    return value, tl.where(tl.abs(x) <= C0, grad, 0.0)


@triton.jit
def formula(x, grad, NAME: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr):
    """``(phi(x), grad * phi'(x))`` of the formula called ``NAME``.

    Args:
        x: float32 tile.
        grad: float32 tile of the same shape.
        NAME: a name that :data:`FORMULAS` uses; the function with an underscore before it.
        C0, C1, C2: constants of the activation; unused ones are 0.
    """
    if NAME == "identity":
        value, slope = _identity(x, grad, C0, C1, C2)
    elif NAME == "gelu":
        value, slope = _gelu(x, grad, C0, C1, C2)
    elif NAME == "erf_gelu":
        value, slope = _erf_gelu(x, grad, C0, C1, C2)
    elif NAME == "silu":
        value, slope = _silu(x, grad, C0, C1, C2)
    elif NAME == "qgelu":
        value, slope = _qgelu(x, grad, C0, C1, C2)
    elif NAME == "relu":
        value, slope = _relu(x, grad, C0, C1, C2)
    elif NAME == "srelu":
        value, slope = _srelu(x, grad, C0, C1, C2)
    elif NAME == "tanh_srelu":
        value, slope = _tanh_srelu(x, grad, C0, C1, C2)
    elif NAME == "sigmoid":
        value, slope = _sigmoid(x, grad, C0, C1, C2)
    elif NAME == "situ":
        value, slope = _situ(x, grad, C0, C1, C2)
    elif NAME == "soft_limit":
        value, slope = _soft_limit(x, grad, C0, C1, C2)
    elif NAME == "clamped_gate":
        value, slope = _clamped_gate(x, grad, C0, C1, C2)
    else:
        tl.static_assert(NAME == "hard_limit")
        value, slope = _hard_limit(x, grad, C0, C1, C2)
    return value, slope


# Formula of the values and, of a gated kind, of the linear half. A new activation is its functions, their branches in
# formula(), and one row here.
FORMULAS: dict[str, tuple[str, str]] = {
    "gelu": ("gelu", ""),
    "erf_gelu": ("erf_gelu", ""),
    "qgelu": ("qgelu", ""),
    "silu": ("silu", ""),
    "relu": ("relu", ""),
    "srelu": ("srelu", ""),
    "tanh_srelu": ("tanh_srelu", ""),
    "glu": ("sigmoid", "identity"),
    "geglu": ("gelu", "identity"),
    "qgeglu": ("qgelu", "identity"),
    "reglu": ("relu", "identity"),
    "sreglu": ("srelu", "identity"),
    "swiglu": ("silu", "identity"),
    "situglu": ("situ", "soft_limit"),
    "clamped_swiglu": ("clamped_gate", "hard_limit"),
}
