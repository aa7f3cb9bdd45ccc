"""Activation functions and their gradients in plain PyTorch, in float32.

Formulas: Transformer Engine 2.20.2 ``te.ops`` (activation, swiglu). GELU: Hendrycks & Gimpel 2016 (tanh form; also the
exact form with erf, which te.ops lacks).
SiLU: Elfwing et al. 2017. Squared ReLU: So et al. 2021 (Primer). GLU: Dauphin et al. 2016; GEGLU, ReGLU and
SwiGLU: Shazeer 2020. Gated forms split the last dimension in two halves ``[a | b]`` and put the non-linearity on the
*first* (``torch.nn.functional.glu`` puts it on the second): ``y = phi(a) * lam(b)``, where ``lam`` is the identity
unless a row of `ACTIVATIONS` says otherwise.

What the code is shaped by: eagerly every ATen call costs 1 to 4 microseconds whatever its size, and one with a Python
scalar operand costs twice one between tensors. So ``alpha=`` arguments and fused ATen backwards are preferred,
and what a value and its derivative have in common is computed once (``prepare``).

Infinities and NaNs come out where the formulas, evaluated literally, give them; a finite input overflows only where its
result (or ``dy * b`` on the way to a gated gradient) does not fit float32. But the exact GELU is PyTorch's kernel,
which overflows beyond half of the largest number, and makes infinity NaN, on CPUs with AVX-512. As in PyTorch's own
gradients, a place where a derivative is defined to be zero (ReLU below zero, a clamp outside its limits) gives zero
whatever ``dy`` holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_te.kernels.reference.precision import float32

Config = tuple[float, ...]
Shared = tuple[Tensor, ...]

QGELU_ALPHA = 1.702
# Beyond this magnitude the float32 derivative of GELU is exactly 0 or 1.
_GELU_SATURATED = 100.0

# Resolved once: looking an overload up on every call is not free. The first two are the bindings that
# torch.nn.functional.gelu and silu end in; through torch.ops each costs a microsecond more.
_gelu_forward = torch._C._nn.gelu
_silu_forward = torch._C._nn.silu
_gelu_backward = torch.ops.aten.gelu_backward.default
_sigmoid_backward = torch.ops.aten.sigmoid_backward.default
_silu_backward = torch.ops.aten.silu_backward.default
_tanh_backward = torch.ops.aten.tanh_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.default


# ---- The pieces: value(x, shared, config) and derivative(grad, x, shared, config) = grad * phi'(x) ----


def _nothing(x: Tensor, config: Config) -> Shared:
    return ()


def _gelu(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _gelu_forward(x, approximate="tanh")


def _gelu_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    # ATen squares x, and inf * (1 - tanh^2) = inf * 0 would be NaN for large finite x. The clamp keeps those finite;
    # adding 0 * x leaves finite values alone and lets the formula's NaN at infinity through again.
    bounded = torch.add(x.clamp(-_GELU_SATURATED, _GELU_SATURATED), x, alpha=0)
    return _gelu_backward(grad, bounded, approximate="tanh")


def _erf_gelu(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _gelu_forward(x, approximate="none")


def _erf_gelu_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _gelu_backward(grad, x, approximate="none")  # exp(-inf) is 0: nothing to bound


def _silu(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _silu_forward(x)


def _silu_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _silu_backward(grad, x)


def _relu(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return x.relu()


def _relu_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _threshold_backward(grad, x, 0)


def _srelu_prepare(x: Tensor, config: Config) -> Shared:
    return (x.relu(),)


def _srelu(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return shared[0] * shared[0]


def _srelu_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    # Doubling last, as a sum: 2 * relu(x) could overflow on its own, and a scalar factor costs twice as much.
    half = grad * shared[0]
    return half + half


# Squared ReLU bounded by tanh, config (s,): (s tanh(relu(x) / s))^2


def _tanh_srelu_prepare(x: Tensor, config: Config) -> Shared:
    tanh = (x.relu() / config[0]).tanh()
    return tanh, tanh * config[0]


def _tanh_srelu(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return shared[1] * shared[1]


def _tanh_srelu_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    # 2 b (1 - t^2) with b = s t
    tanh, bounded = shared
    half = _tanh_backward(grad * bounded, tanh)
    return half + half


def _sigmoid_prepare(x: Tensor, config: Config) -> Shared:
    return (x.sigmoid(),)


def _sigmoid(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return shared[0]


def _sigmoid_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _sigmoid_backward(grad, shared[0])


def _swish_derivative(grad: Tensor, x: Tensor, sigmoid: Tensor, alpha: float) -> Tensor:
    """``grad * d/dx [x sigmoid(alpha x)]``, given ``sigmoid(alpha x)``.

    Not ``silu_backward(grad, alpha * x)``: for large finite x that product overflows, and inf * 0 is NaN.
    """
    return grad * torch.add(sigmoid, _sigmoid_backward(x, sigmoid), alpha=alpha)


def _qgelu_prepare(x: Tensor, config: Config) -> Shared:
    return ((x * QGELU_ALPHA).sigmoid(),)


def _qgelu(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return x * shared[0]


def _qgelu_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _swish_derivative(grad, x, shared[0], QGELU_ALPHA)


# SiTU-GLU, config (beta1, beta2): beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)


def _situ_prepare(x: Tensor, config: Config) -> Shared:
    return (x / config[0]).tanh(), x.sigmoid()


def _situ(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return shared[0] * shared[1] * config[0]


def _situ_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    tanh, sigmoid = shared
    # (1 - t^2) s + beta t s (1 - s)
    return grad * torch.add(_tanh_backward(sigmoid, tanh), _sigmoid_backward(tanh, sigmoid), alpha=config[0])


def _soft_limit_prepare(x: Tensor, config: Config) -> Shared:
    return ((x / config[1]).tanh(),)


def _soft_limit(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return shared[0] * config[1]


def _soft_limit_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    return _tanh_backward(grad, shared[0])


# Clamped SwiGLU, config (limit, alpha, glu_linear_offset). A value is inside its limits exactly when clamping left it
# as it was; the boundary itself counts as inside, and NaN (never equal to itself) as outside.


def _clamped_gate_prepare(x: Tensor, config: Config) -> Shared:
    clamped = x.clamp_max(config[0])  # from above only
    return clamped, (clamped * config[1]).sigmoid()


def _clamped_gate(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return shared[0] * shared[1]


def _clamped_gate_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    clamped, sigmoid = shared
    return _swish_derivative(grad, clamped, sigmoid, config[1]).masked_fill(clamped != x, 0.0)


def _hard_limit_prepare(x: Tensor, config: Config) -> Shared:
    return (x.clamp(-config[0], config[0]),)


def _hard_limit(x: Tensor, shared: Shared, config: Config) -> Tensor:
    return shared[0] + config[2]


def _hard_limit_derivative(grad: Tensor, x: Tensor, shared: Shared, config: Config) -> Tensor:
    return grad.masked_fill(shared[0] != x, 0.0)


# ---- The table ----


@dataclass(frozen=True)
class Activation:
    """One activation as module-level functions of float32 tensors.

    ``prepare(x, config)`` computes what value and derivative share; ``value(x, shared, config)`` is phi(x) and
    ``derivative(grad, x, shared, config)`` is ``grad * phi'(x)``. In a gated activation these act on the first half;
    ``linear`` acts on the second (None: the identity). ``defaults`` is the config used where none is given.
    """

    name: str
    gated: bool
    value: Callable[[Tensor, Shared, Config], Tensor]
    derivative: Callable[[Tensor, Tensor, Shared, Config], Tensor]
    prepare: Callable[[Tensor, Config], Shared] = _nothing
    linear: Activation | None = None
    defaults: Config = ()


_SOFT_LIMIT = Activation("soft_limit", False, _soft_limit, _soft_limit_derivative, _soft_limit_prepare)
_HARD_LIMIT = Activation("hard_limit", False, _hard_limit, _hard_limit_derivative, _hard_limit_prepare)

# A new activation is its functions above and one row here.
_TABLE: tuple[Activation, ...] = (
    Activation("gelu", False, _gelu, _gelu_derivative),
    Activation("erf_gelu", False, _erf_gelu, _erf_gelu_derivative),
    Activation("qgelu", False, _qgelu, _qgelu_derivative, _qgelu_prepare),
    Activation("silu", False, _silu, _silu_derivative),
    Activation("relu", False, _relu, _relu_derivative),
    Activation("srelu", False, _srelu, _srelu_derivative, _srelu_prepare),
    Activation("tanh_srelu", False, _tanh_srelu, _tanh_srelu_derivative, _tanh_srelu_prepare, defaults=(1.0,)),
    Activation("glu", True, _sigmoid, _sigmoid_derivative, _sigmoid_prepare),
    Activation("geglu", True, _gelu, _gelu_derivative),
    Activation("qgeglu", True, _qgelu, _qgelu_derivative, _qgelu_prepare),
    Activation("reglu", True, _relu, _relu_derivative),
    Activation("sreglu", True, _srelu, _srelu_derivative, _srelu_prepare),
    Activation("swiglu", True, _silu, _silu_derivative),
    Activation("situglu", True, _situ, _situ_derivative, _situ_prepare, _SOFT_LIMIT, (4.0, 25.0)),
    Activation(
        "clamped_swiglu",
        True,
        _clamped_gate,
        _clamped_gate_derivative,
        _clamped_gate_prepare,
        _HARD_LIMIT,
        (7.0, 1.702, 1.0),
    ),
)
ACTIVATIONS: dict[str, Activation] = {activation.name: activation for activation in _TABLE}


# ---- Layout of the last dimension ----


def deinterleave(x: Tensor, s: int) -> Tensor:
    """``[a0 .. a(s-1), b0 .. b(s-1), as .., bs .., ...]`` to ``[a | b]`` along the last dim; any dtype, ``s > 0``.

    ``2 * s`` divides the last dim. Undoes `interleave`. The result may share storage with ``x``.
    """
    return _blocks(x, s).transpose(-3, -2).flatten(-3)


def interleave(x: Tensor, s: int) -> Tensor:
    """``[a | b]`` to ``[a0 .. a(s-1), b0 .. b(s-1), as .., bs .., ...]`` along the last dim; any dtype, ``s > 0``.

    ``2 * s`` divides the last dim. Undoes `deinterleave`. The result may share storage with ``x``.
    """
    blocks = x.view((*x.shape[:-1], 2, x.shape[-1] // (2 * s), s))
    return blocks.transpose(-3, -2).flatten(-3)


def _blocks(x: Tensor, s: int) -> Tensor:
    """View the interleaved last dim as (block, gate or linear, position in the block)."""
    return x.view((*x.shape[:-1], x.shape[-1] // (2 * s), 2, s))


def _halves(x: Tensor, s: int) -> tuple[Tensor, ...]:
    """Gate and linear part as views; interleaved ones keep (block, position) as their last two dims."""
    return _blocks(x, s).unbind(-2) if s else x.chunk(2, -1)


# ---- Entry points ----


def is_gated(kind: str) -> bool:
    """Whether ``kind`` halves the last dimension."""
    return ACTIVATIONS[kind].gated


def activation_forward(x: Tensor, kind: str, config: Config = (), interleave: int = 0) -> Tensor:
    """``phi(x)``, or ``phi(a) * lam(b)`` for a gated ``kind``; the formulas are in the table of this module.

    Args:
        x: any float dtype, shape (..., n); n is even for a gated kind.
        kind: a key of `ACTIVATIONS`.
        config: (beta1, beta2) for "situglu", (limit, alpha, glu_linear_offset) for "clamped_swiglu", (s,) for
            "tanh_srelu", else empty; empty means the defaults.
        interleave: 0 when the last dim is ``[a | b]``, or the block size s of the layout of `interleave`.

    Returns:
        A new float32 tensor, unrounded: (..., n), or (..., n / 2) for a gated kind.
    """
    activation = ACTIVATIONS[kind]
    config = config or activation.defaults
    x = float32(x)
    if not activation.gated:
        return activation.value(x, activation.prepare(x, config), config)
    gate, lin = _halves(x, interleave)
    y = activation.value(gate, activation.prepare(gate, config), config)
    linear = activation.linear
    y = y * (lin if linear is None else linear.value(lin, linear.prepare(lin, config), config))
    return y.flatten(-2) if interleave else y


def activation_backward(dy: Tensor, x: Tensor, kind: str, config: Config = (), interleave: int = 0) -> Tensor:
    """Gradient of `activation_forward` with respect to ``x``.

    ``dx = dy * phi'(x)``; gated: ``da = dy * lam(b) * phi'(a)`` and ``db = dy * phi(a) * lam'(b)``, in the layout of x.

    Args:
        dy: gradient of the output: its shape, any float dtype.
        x, kind, config, interleave: as given to `activation_forward`.

    Returns:
        A new float32 tensor of x's shape, unrounded.
    """
    activation = ACTIVATIONS[kind]
    config = config or activation.defaults
    dy, x = float32(dy), float32(x)
    if not activation.gated:
        return activation.derivative(dy, x, activation.prepare(x, config), config)
    if interleave:
        dy = dy.view((*dy.shape[:-1], dy.shape[-1] // interleave, interleave))
    gate, lin = _halves(x, interleave)
    shared = activation.prepare(gate, config)
    dlin = dy * activation.value(gate, shared, config)
    linear = activation.linear
    if linear is None:
        dgate = dy * lin
    else:
        linear_shared = linear.prepare(lin, config)
        dgate = dy * linear.value(lin, linear_shared, config)
        dlin = linear.derivative(dlin, lin, linear_shared, config)
    dgate = activation.derivative(dgate, gate, shared, config)
    return torch.stack((dgate, dlin), -2).flatten(-3) if interleave else torch.cat((dgate, dlin), -1)
