"""GroupedLinear as a module, with te.ops' name, constructor signature and buffers of the caller."""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import torch

import functional_te as fte
from bridge.call import Takeover
from bridge.main_grad import main_grad_of
from bridge.ops.operation import BasicOperation
from functional_te import pytree
from functional_te._errors import type_error, value_error

__all__ = ["GroupedLinear"]


def _check_buffer(name: str, buffer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    where = "GroupedLinear"
    if not isinstance(buffer, torch.Tensor):
        raise type_error(where, name, "a tensor", type(buffer).__name__)
    if tuple(buffer.shape) != shape:
        raise value_error(where, name, f"shape {shape}", f"shape {tuple(buffer.shape)}")
    if buffer.dtype is not dtype:
        raise value_error(where, name, f"dtype {dtype}", buffer.dtype)
    if buffer.device != device:
        raise value_error(where, name, f"device {device}", f"device {buffer.device}")
    if not buffer.is_contiguous():
        raise value_error(where, name, "a contiguous tensor", f"strides {buffer.stride()}")
    if buffer.requires_grad:
        raise value_error(where, name, "a tensor that requires no gradient", "one that does")


class GroupedLinear(BasicOperation):
    """One linear layer for each group of rows. See :class:`functional_te.GroupedLinear`.

    Called with the rows, the number of rows of each group and, with ``scale_bias``, one factor per row. Forward
    kwargs in eager mode: ``output``, a buffer that takes the output and is what goes on, and ``grad_input``, a buffer
    that takes the gradient of the rows. Both have the shape, dtype and device of what they take, are contiguous and
    require no gradient.

    Args:
        num_groups: number of groups.
        in_features: size of the last input dimension.
        out_features: size of the last output dimension.
        bias: whether there are biases.
        device: None is the current CUDA device if there is one.
        dtype: of the parameters; None is torch's default.
        rng_state_tracker_function: gives an object with a context manager ``fork()``, inside of which the weights are
            drawn.
        accumulate_into_main_grad: see :mod:`bridge.main_grad`.
        single_grouped_weight: one parameter ``weight [num_groups, out_features, in_features]``.
        single_grouped_bias: one parameter ``bias [num_groups, out_features]``.
        delay_wgrad_compute: leave gradients of weights to :meth:`backward_dw`, which a pipeline schedule calls later.
            Eager mode only.
        scale_bias: whether biases are scaled per row.

    Raises:
        ValueError: a size that is not positive.
    """

    may_take_over: ClassVar[bool] = True

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        op = fte.GroupedLinear(
            num_groups, in_features, out_features, bias, scale_bias, single_grouped_weight, single_grouped_bias
        )
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        # weight gradients that wait, one entry per backward, oldest first; and what is called when some are there
        self._waiting: collections.deque[Any] = collections.deque()
        self._wgrad_hooks: list[Any] = []
        self._rng_state_tracker_function = rng_state_tracker_function
        super().__init__(op, device=device, dtype=dtype)
        if not bias:  # as te.ops: the names exist
            for name in ("bias",) if single_grouped_bias else [f"bias{g}" for g in range(num_groups)]:
                self.register_parameter(name, None)

    def _weight_names(self) -> list[str]:
        return [name for name in self.op.param_names if name.startswith("weight")]

    def _mark_weights(self) -> None:
        # as te.ops does: their hooks after a backward have to wait too
        for name in self._weight_names():
            getattr(self, name).skip_backward_post_hook = True

    def _init_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        super()._init_parameters(device, dtype)
        if self.delay_wgrad_compute:
            self._mark_weights()

    def takeover(self, kwargs: dict[str, Any]) -> tuple[Takeover | None, dict[str, Any]]:
        """Weight gradients that wait, and the caller's buffers ``output`` and ``grad_input``."""
        output, grad_input = kwargs.get("output"), kwargs.get("grad_input")
        if output is None and grad_input is None and not self.delay_wgrad_compute:
            return None, kwargs
        if torch.compiler.is_compiling():
            name = "delay_wgrad_compute" if self.delay_wgrad_compute else "output or grad_input"
            raise NotImplementedError(f"GroupedLinear: {name}: not supported in a compiled call.")

        def forward(op: Any, args: Any) -> Any:
            x = args.input_
            if grad_input is not None:
                _check_buffer("grad_input", grad_input, tuple(x.shape), x.dtype, x.device)
            if output is None:
                return op.forward_impl(args)
            _check_buffer("output", output, (*x.shape[:-1], self.out_features), args.dtype, x.device)
            result = op.forward_impl(args)
            return result._replace(output=output.copy_(result.output))

        def backward(op: Any, args: Any) -> Any:
            result = self._put_off(op, args) if self.delay_wgrad_compute else op.backward_impl(args)
            if grad_input is None or result.grad_input is None:
                return result
            return result._replace(grad_input=grad_input.copy_(result.grad_input))

        rest = {name: value for name, value in kwargs.items() if name not in ("output", "grad_input")}
        return Takeover(forward, backward), rest

    def _put_off(self, op: Any, args: Any) -> Any:
        """Run a backward without the gradients of the weights, which wait for :meth:`backward_dw`."""
        if args.input_ is None:
            return op.backward_impl(args)
        count = len(args.wants_weights)
        if not args.weights:  # all that the product of the weights leaves are observations: make both now
            result = op.backward_impl(args)
            self._waiting.append(lambda: result.grad_params[:count])
            return result._replace(grad_params=(*(None,) * count, *result.grad_params[count:]))
        later = pytree.replace(args, weights=(), biases=(), scales=None, wants_biases=())
        self._waiting.append(lambda: op.backward_impl(later).grad_params)
        return op.backward_impl(pytree.replace(args, input_=None))

    def need_backward_dw(self) -> bool:
        """Whether gradients of weights wait for calls of :meth:`backward_dw`."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """Have ``hook()`` called at the end of every :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward that waits; add them to ``.grad`` or ``main_grad``.

        Raises:
            RuntimeError: no backward waits.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._waiting:
            raise RuntimeError("GroupedLinear: backward_dw: expected a backward that waits for it, got none.")
        grads = self._waiting.popleft()()
        for position, (name, grad) in enumerate(zip(self._weight_names(), grads, strict=True)):
            weight = getattr(self, name)
            if grad is None:
                continue
            if self.accumulate_into_main_grad:
                own = main_grad_of(0, position, name, weight, type(self).__name__)
                grad = own.add(own.target, grad)
                if grad is None:
                    continue
            grad = grad.to(weight.dtype)
            weight.grad = grad if weight.grad is None else weight.grad + grad
        for hook in self._wgrad_hooks:
            hook()

    def __getstate__(self) -> dict[str, Any]:
        """Without what waits: it belongs to this very module."""
        return {**super().__getstate__(), "_waiting": collections.deque()}
