"""What a launch costs: the products, casts and passes over memory of one direction of an op, from its bundle of specs.

An op says this next to its fakes: ``forward_work`` and ``backward_work`` are static functions from the bundle and the
result of the fake, both over :class:`TensorSpec`, to a :class:`Work`. An op without them is taken for one pass that
reads its bundle and writes its result, with an unknown number of operations. Only :mod:`functional_te.graph` asks.

Operations are counted as is usual for rooflines: a product of ``[m, k]`` and ``[k, n]`` is ``2 m n k``; of everything
else each addition, multiplication, comparison and transcendental function is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from functional_te.ops.op import FwdResult

__all__ = ["Cast", "Product", "Work", "per_element"]


class Product(NamedTuple):
    """One matrix product, or one for each of several groups of rows.

    Attributes:
        layout: ``"nt"`` (``a @ b.T``, forward), ``"nn"`` (input gradient) or ``"tn"`` (weight gradient).
        left: first operand, a spec or a quantized tensor of specs.
        right: second operand, likewise.
        output: spec of the result ``[..., n]``, with ``m`` rows in all.
        reduced: the size that is summed over, of all groups together.
        groups: number of products that share the rows.
    """

    layout: str
    left: Any
    right: Any
    output: Any
    reduced: int
    groups: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows and columns of the result, and the size that is summed over."""
        return math.prod(self.output.shape[:-1]), self.output.shape[-1], self.reduced

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * math.prod(self.sizes)


class Cast(NamedTuple):
    """A cast that is a kernel of its own, such as that of a weight.

    Attributes:
        source: spec of what is cast.
        result: the quantized tensor of specs.
    """

    source: Any
    result: Any


class Work(NamedTuple):
    """What one direction of an op does.

    Attributes:
        products: matrix products.
        casts: casts apart from the pass.
        flops: operations of the pass; None if nobody said.
        passes: whether there is a pass: a kernel that reads what no product or cast reads, and writes the rest.
        kind: of the pass: ``"elementwise"``, or ``"rows"`` if it reduces over rows first.
        folds: whether a fusion with a product before it makes the pass part of the product.
    """

    products: tuple[Product, ...] = ()
    casts: tuple[Cast, ...] = ()
    flops: int | None = None
    passes: bool = True
    kind: str = "elementwise"
    folds: bool = False


def per_element(count: int, *, kind: str = "elementwise", folds: bool = False) -> Callable[[Any, Any], Work]:
    """The work of a pass that does ``count`` operations for each element of its main result.

    Args:
        count: operations per element.
        kind: see :class:`Work`.
        folds: see :class:`Work`.
    """

    def work(args: Any, result: Any) -> Work:
        return Work(flops=count * elements(args, result), kind=kind, folds=folds)

    return work


def elements(args: Any, result: Any) -> int:
    """Number of elements of the main result, or of the gradient that is passed on."""
    main = result.output if isinstance(result, FwdResult) else result.grad_input
    if main is None:
        main = args.grad_output if hasattr(args, "grad_output") else args.input_
    return math.prod(main.shape)
