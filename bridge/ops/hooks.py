"""What modules of ops have besides their op: te.ops' hooks, and what its users and tests reach into."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from bridge.ops.builtin_hooks import run_op_backward, run_op_forward
from bridge.ops.custom import HookedOp
from bridge.ops.quantizer_view import QuantizerView
from bridge.recipe_context import active_recipe
from functional_te._errors import value_error
from functional_te.ops import Op

if TYPE_CHECKING:
    from bridge.ops.context import OperationContext

__all__ = ["BasicHooks", "FusedHooks", "is_op_fuser_grouped_tensor_path_supported"]


def is_op_fuser_grouped_tensor_path_supported(recipe: Any = None, dtype: torch.dtype | None = None) -> bool:
    """Whether grouped ops keep their groups in one quantized tensor: never; results do not depend on it."""
    del recipe, dtype
    return False


def _regrouping(init: Any) -> Any:
    """A constructor at whose end the chain of the op alone is made, from all that the constructor registered.

    A call cannot make it: it may be one that is traced.
    """

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is wrapped:
            self.regroup()

    return wrapped


class BasicHooks:
    """The part of :class:`~bridge.ops.BasicOperation` that follows te.ops.

    A subclass defines its math by :meth:`op_forward` and :meth:`op_backward`, or, if it has extra inputs or outputs,
    by :meth:`fuser_forward` and :meth:`fuser_backward`. Hooks run without autograd and get tensors in high precision.
    A subclass of a built-in op may call the hooks of its base, which run in high precision.

    Attributes:
        num_extra_inputs: how many extra inputs the op has.
        num_extra_outputs: how many extra outputs.
    """

    op: Op
    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    is_fused_op: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.has_hooks() and "__init__" in cls.__dict__:
            cls.__init__ = _regrouping(cls.__init__)  # type: ignore[method-assign]

    @classmethod
    def has_hooks(cls) -> bool:
        """Whether the class defines its math by hooks."""
        own = (cls.op_forward, cls.fuser_forward)
        return own != (BasicHooks.op_forward, BasicHooks.fuser_forward)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: QuantizerView | None,
        next_op_input_quantizer: QuantizerView | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The forward of an op without extra tensors.

        Args:
            ctx: keeps what the backward needs.
            input_: the main input.
            prev_op_grad_output_quantizer: None: the op before casts its gradient itself.
            next_op_input_quantizer: the next op's, if it has one; it may be called on the output.
            kwargs: forward kwargs of the caller.

        Returns:
            The output.
        """
        del prev_op_grad_output_quantizer, next_op_input_quantizer
        return run_op_forward(self, self._own_op("op_forward"), self._own_params(), ctx, input_, kwargs)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[Any, Any]:
        """The backward of an op without extra tensors.

        Returns:
            The gradient of the main input, and one gradient or None per parameter in the order of registration.
        """
        return run_op_backward(self, self._own_op("op_backward"), self._own_params(), ctx, grad_output)

    def _own_op(self, hook: str) -> Op:
        """The op whose math a hook that is not overridden runs."""
        if isinstance(self.op, HookedOp):
            raise NotImplementedError(f"{type(self).__name__}: {hook}: the op has no such hook.")
        if self.op.forward_quantizers and active_recipe() is not None:
            raise NotImplementedError(f"{type(self).__name__}: {hook}: a built-in hook runs in high precision only.")
        return self.op

    def _own_params(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.op.param_names}

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Any, ...]],
        prev_op_grad_output_quantizer: QuantizerView | None,
        next_op_input_quantizer: QuantizerView | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[Any]]:
        """The forward over lists of one entry; also for extra tensors.

        Returns:
            The output, and a list with the extra outputs of every basic op.
        """
        self._refuse_extra("fuser_forward")
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[Any],
    ) -> tuple[Any, list[Any], list[Any]]:
        """The backward over lists of one entry; also for extra tensors.

        Returns:
            The gradient of the main input, and for every basic op the gradients of its parameters and of its extra
            inputs.
        """
        self._refuse_extra("fuser_backward")
        results = self.op_backward(basic_op_ctxs[0], grad_output)
        if not isinstance(results, (tuple, list)) or len(results) != 2:
            raise RuntimeError(
                f"{type(self).__name__}: op_backward: expected (input gradient, parameter gradients), got "
                f"a {type(results).__name__}."
            )
        return results[0], [results[1]], [()]

    def _refuse_extra(self, hook: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"{type(self).__name__}: an op with {self.num_extra_inputs} extra inputs and {self.num_extra_outputs} "
                f"extra outputs has to override {hook}."
            )

    # quantizers

    def _quantizer_roles(self, mode: str) -> tuple[str, ...]:
        if mode not in ("forward", "backward"):
            raise value_error(type(self).__name__, "mode", "'forward' or 'backward'", repr(mode))
        return self.op.forward_quantizers if mode == "forward" else self.op.backward_quantizers

    def num_quantizers(self, mode: str) -> int:
        """How many quantizers the op has in ``mode``: ``"forward"`` or ``"backward"``."""
        return len(self._quantizer_roles(mode))

    def get_quantizer(self, mode: str, index: int) -> QuantizerView | None:
        """A quantizer of the recipe that the op runs, or ran last; None without a recipe.

        Forward quantizers are ``[input, weight]`` of every product, backward ones ``[grad_output]``.
        """
        roles = self._quantizer_roles(mode)
        if not 0 <= index < len(roles):
            raise IndexError(f"{type(self).__name__}: quantizer {index} is out of range; {mode} has {len(roles)}.")
        return self._quantizer_view(roles[index])

    def _quantizer_view(self, role: str) -> QuantizerView | None:
        raise NotImplementedError

    def get_input_quantizer(self) -> QuantizerView | None:
        """The quantizer of the main input, or None."""
        return self.get_quantizer("forward", 0) if self.op.forward_quantizers else None

    def get_grad_output_quantizer(self) -> QuantizerView | None:
        """The quantizer of the output's gradient, or None."""
        return self.get_quantizer("backward", 0) if self.op.backward_quantizers else None

    def pre_first_fuser_forward(self) -> None:
        """Called before the first eager call of a chain with the op: gives parameters without storage theirs."""
        raise NotImplementedError


class FusedHooks:
    """The part of :class:`~bridge.ops.FusedOperation` that follows te.ops: hooks of a registered fusion."""

    is_fused_op: ClassVar[bool] = True

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Any, ...]],
        prev_op_grad_output_quantizer: QuantizerView | None,
        next_op_input_quantizer: QuantizerView | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[Any]]:
        """The forward of all basic ops, as :meth:`BasicHooks.fuser_forward`.

        A fusion of the forward alone saves in each context what te.ops' backward of that op reads; see
        :mod:`bridge.ops.te_context`. An extra input that is produced inside of the fused op is None.
        """
        raise NotImplementedError(f"{type(self).__name__}: fuser_forward: the op has no such hook.")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[Any],
    ) -> tuple[Any, list[Any], list[Any]]:
        """The backward of all basic ops, as :meth:`BasicHooks.fuser_backward`."""
        raise NotImplementedError(f"{type(self).__name__}: fuser_backward: the op has no such hook.")
