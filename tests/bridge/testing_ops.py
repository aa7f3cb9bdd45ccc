"""Ops of the tests' own, written against the public contract: small formulas with known gradients."""

import dataclasses
from typing import Any, ClassVar

import numpy
import torch

import functional_te as fte
from functional_te import pytree

TensorOrQuantized = torch.Tensor | fte.QuantizedTensor


@pytree.node
class GainForwardArgs:
    input_: torch.Tensor
    gain: torch.Tensor
    offset: TensorOrQuantized | None = None
    temperature: torch.Tensor | None = None
    factor: float = pytree.static(default=1.0)
    power: int = pytree.static(default=1)


@pytree.node
class GainSaved:
    input_: torch.Tensor
    gain: torch.Tensor
    temperature: torch.Tensor | None = None
    factor: float = pytree.static(default=1.0)


@pytree.node
class GainBackwardArgs:
    grad_output: torch.Tensor
    input_: torch.Tensor
    gain: torch.Tensor
    temperature: torch.Tensor | None = None
    factor: float = pytree.static(default=1.0)


def _gain(args):
    y = args.input_ * args.gain * args.factor
    if args.temperature is not None:
        y = y * args.temperature
    if args.offset is not None:
        offset = args.offset
        y = y + (offset.dequantize() if isinstance(offset, fte.QuantizedTensor) else offset)
    y = y + args.power
    return y, None


def _gain_fake(args):
    return args.input_, None


def _gain_setup(args, aux):
    del aux
    return GainSaved(input_=args.input_, gain=args.gain, temperature=args.temperature, factor=args.factor)


def _gain_backward(args):
    dy = args.grad_output * args.factor
    if args.temperature is not None:
        dy = dy * args.temperature
    return dy * args.gain, (dy * args.input_).reshape(-1, args.gain.shape[0]).sum(0)


def _gain_backward_fake(args):
    return args.grad_output, args.gain


@dataclasses.dataclass(frozen=True, eq=False)
class Gain(fte.Op):
    """``y = factor * temperature * gain * x + offset + power``; only ``x`` and ``gain`` are differentiated."""

    size: int

    param_names: ClassVar[tuple[str, ...]] = ("gain",)
    fwd_args_type: ClassVar[type[Any]] = GainForwardArgs
    bwd_args_type: ClassVar[type[Any]] = GainBackwardArgs

    forward_impl = staticmethod(_gain)
    forward_fake = staticmethod(_gain_fake)
    backward_impl = staticmethod(_gain_backward)
    backward_fake = staticmethod(_gain_backward_fake)
    setup_context = staticmethod(_gain_setup)

    def param_specs(self, dtype, device):
        return {"gain": fte.TensorSpec((self.size,), dtype, device)}

    def init_params(self, generator, dtype, device):
        return {"gain": torch.randn(self.size, generator=generator).to(device=device, dtype=dtype)}

    def resolve_fwd_args(
        self, input_, *, params, state, requires_grad, offset=None, temperature=None, factor=1.0, power=1
    ):
        del state, requires_grad
        return GainForwardArgs(
            input_=input_, gain=params["gain"], offset=offset, temperature=temperature, factor=factor, power=power
        )

    def resolve_bwd_args(self, ctx, grad_output):
        kept = ctx.saved
        return GainBackwardArgs(
            grad_output=grad_output,
            input_=kept.input_,
            gain=kept.gain,
            temperature=kept.temperature,
            factor=kept.factor,
        )


@pytree.node
class OneTensor:
    input_: torch.Tensor


@pytree.node
class TwoTensors:
    grad_output: torch.Tensor
    input_: torch.Tensor


class _Pointwise(fte.Op):
    """What the pointwise test ops share: the input is kept, the backward gets it."""

    @staticmethod
    def setup_context(args, aux):
        del aux
        return args.input_

    def resolve_fwd_args(self, input_, *, params, state, requires_grad):
        del params, state, requires_grad
        return OneTensor(input_=input_)

    def resolve_bwd_args(self, ctx, grad_output):
        return TwoTensors(grad_output=grad_output, input_=ctx.saved)


def _like_input(args):
    return args.input_, None


def _like_grad(args):
    return (args.grad_output,)


@dataclasses.dataclass(frozen=True, eq=False)
class Cube(_Pointwise):
    """``y = x**3``."""

    fwd_args_type: ClassVar[type[Any]] = OneTensor
    bwd_args_type: ClassVar[type[Any]] = TwoTensors

    forward_impl = staticmethod(lambda args: (args.input_ * args.input_ * args.input_, None))
    forward_fake = staticmethod(_like_input)
    backward_impl = staticmethod(lambda args: (args.grad_output * 3.0 * args.input_ * args.input_,))
    backward_fake = staticmethod(_like_grad)


@dataclasses.dataclass(frozen=True, eq=False)
class Sine(_Pointwise):
    """``y = sin(x)``, without bundles declared and without fakes: has no custom op."""

    forward_impl = staticmethod(lambda args: (torch.sin(args.input_), None))
    backward_impl = staticmethod(lambda args: (args.grad_output * torch.cos(args.input_),))


def _numpy_tanh(args):
    return torch.from_numpy(numpy.tanh(args.input_.detach().numpy())), None


def _numpy_tanh_backward(args):
    y = numpy.tanh(args.input_.detach().numpy())
    return (torch.from_numpy(args.grad_output.detach().numpy() * (1.0 - y * y)),)


@dataclasses.dataclass(frozen=True, eq=False)
class NumpyTanh(_Pointwise):
    """``y = tanh(x)`` computed by NumPy: a body that no tracer can look into."""

    opaque: ClassVar[bool] = True
    fwd_args_type: ClassVar[type[Any]] = OneTensor
    bwd_args_type: ClassVar[type[Any]] = TwoTensors

    forward_impl = staticmethod(_numpy_tanh)
    forward_fake = staticmethod(_like_input)
    backward_impl = staticmethod(_numpy_tanh_backward)
    backward_fake = staticmethod(_like_grad)


@pytree.node
class GainCubeBackwardArgs:
    gain: GainBackwardArgs
    cube_input: torch.Tensor


def _gain_cube_backward(args):
    dy = args.gain.grad_output * 3.0 * args.cube_input * args.cube_input
    dx, dgain = _gain_backward(pytree.replace(args.gain, grad_output=dy))
    return fte.BwdResult(dx, ((dgain,), ()), ((), ()))


def _gain_cube_backward_fake(args):
    return fte.BwdResult(args.gain.grad_output, ((args.gain.gain,), ()), ((), ()))


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardGainCube(fte.FusedOp):
    """Backward of Gain, Cube in one step."""

    bwd_args_type: ClassVar[type[Any]] = GainCubeBackwardArgs

    backward_impl = staticmethod(_gain_cube_backward)
    backward_fake = staticmethod(_gain_cube_backward_fake)

    def resolve_bwd_args(self, ctxs, grad_output):
        gain, cube = ctxs
        return GainCubeBackwardArgs(gain=self.ops[0].resolve_bwd_args(gain, grad_output), cube_input=cube.saved)


def _build(ops):
    return BackwardGainCube(ops)


BACKWARD_GAIN_CUBE = fte.FusionRule(
    name="backward_gain_cube", pattern=(fte.Slot((Gain,)), fte.Slot((Cube,))), build=_build
)
