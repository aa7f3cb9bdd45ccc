"""Parts of a transformer layer that rules of several families put together."""

from __future__ import annotations

from typing import Any

import torch

from bridge.convert.borrowed import Borrowed
from bridge.convert.chains import BoundChain, Parts, add, fork, inert, runs_recipe
from bridge.convert.swap import original
from bridge.joining import split

__all__ = ["Projections", "StandIn", "Tail", "run_attention"]


class Given:
    """A projection whose result is known for one input."""

    def __init__(self, part: Any, x: Any, result: Any) -> None:
        self.part, self.x, self.result = part, x, result

    def __call__(self, x: Any) -> Any:
        """The result, if the input is the one it is known for."""
        return self.result if x is self.x else self.part(x)


class StandIn:
    """Stands for an attention module in its own forward, with projections whose results are known.

    So the attention itself, with its masks, caches and kernels, stays what the model's library wrote.
    """

    def __init__(self, module: Any, names: tuple[str, ...], x: Any, results: Any) -> None:
        self._module = module
        for name, result in zip(names, results, strict=True):
            setattr(self, name, Given(module._modules[name], x, result))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Projections:
    """The projections of one input.

    Attributes:
        names: of the linear modules.
        sizes: their numbers of output features.
        ops: one linear in the place of all of them.
        packed: whether that one packs several. Then it runs with a recipe only: it serves to cast the input once and
            costs a copy of the weights, so without a cast there is nothing to gain.
        chain: the chain over ``ops``.
        parts: the modules.
    """

    def __init__(self, module: Any, names: tuple[str, ...], ops: tuple[Borrowed, ...], sizes: tuple[int, ...]) -> None:
        self.names, self.ops, self.sizes = names, ops, sizes
        self.packed = len(names) > 1
        self.chain = BoundChain(*ops)
        self.parts = Parts(*[(module, name, module._modules[name]) for name in names])

    def may_run(self) -> bool:
        """Whether they may run as one in this call."""
        return (not self.packed or runs_recipe(self.ops[0])) and self.parts.intact()

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results one by one: views."""
        return split(y, self.sizes) if self.packed else (y,)


def run_attention(module: Any, *args: Any, _projections: Any = None, **kwargs: Any) -> Any:
    """The forward of an attention whose projections are one linear; a layer may have computed them already."""
    projections: Projections = module._functional_te.data
    x = args[0] if args else kwargs["hidden_states"]
    if _projections is None:
        if not projections.packed or not projections.may_run():
            return original(module, *args, **kwargs)
        _projections = projections.split(projections.chain(x))
    return module._functional_te_base.forward(StandIn(module, projections.names, x, _projections), *args, **kwargs)


class Tail:
    """The second half of a layer: ``s = before(residual + x)``, then ``after(s + mlp(norm(s)))``.

    Args:
        norm: operations of the norm before the MLP; none in a layer whose norms come last.
        up: of the MLP's first linear.
        act: of its activation, or a callable if there is no operation.
        down: of its second linear.
        before: of the norm that follows the first sum.
        after: of the norm that follows the second.
        inner: dropouts between activation and second linear.
        outer: dropouts between MLP and sum.

    Dropout stays torch's, so that the random numbers are the same; where it changes something in a call, it runs
    between two chains.
    """

    def __init__(
        self,
        norm: Any,
        up: Any,
        act: Any,
        down: Any,
        *,
        before: Any = (),
        after: Any = (),
        inner: tuple[Any, ...] = (),
        outer: tuple[Any, ...] = (),
    ) -> None:
        self.inner, self.outer = inner, outer
        self.act = None if isinstance(act, tuple) else act
        known = act if isinstance(act, tuple) else ()
        self.whole = BoundChain(add(None), *before, fork(), *norm, *up, *known, *down, add(), *after)
        self.first = BoundChain(add(None), *before, fork(None), *norm, *up, *known)
        self.second = BoundChain(*down, add(None), *after)
        self.down = BoundChain(*down)
        self.last = BoundChain(add(None), *after)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The output of the layer."""
        closed = inert(self.outer)
        if closed and self.act is None and inert(self.inner):
            whole: torch.Tensor = self.whole(x, residual)
            return whole
        y, residual = self.first(x, residual)
        if self.act is not None:
            y = self.act(y)
        for dropout in self.inner:
            y = dropout(y)
        if closed:
            second: torch.Tensor = self.second(y, residual)
            return second
        y = self.down(y)
        for dropout in self.outer:
            y = dropout(y)
        last: torch.Tensor = self.last(y, residual)
        return last
