"""The kernels of a step: products and casts as the ops tell them, and one pass over what these leave.

An op says what it does (:mod:`functional_te.ops.work`). A fusion does what the ops that it covers do, and saves the
traffic between them: its one pass reads what is in its bundle and writes what is in its result, apart from what
products and casts move. After a product the pass reads its result, unless it is folded into the product.
"""

from __future__ import annotations

import math
from typing import Any

from functional_te.graph.tensors import nbytes
from functional_te.graph.trace import Launch
from functional_te.graph.value import Kernel
from functional_te.ops import FwdResult
from functional_te.ops.work import Cast, Product, Work
from functional_te.quantization.quantizers import Float8CurrentScalingQuantizer, Float8DelayedScalingQuantizer
from functional_te.quantization.tensor import QuantizedTensor

__all__ = ["kernels_of", "work_of"]

_NOTHING = Work(flops=0, passes=False)
# which copies the operands of a product are read from: (left columnwise, right columnwise)
_COLUMNWISE = {"nt": (False, False), "nn": (False, True), "tn": (True, True)}
_MATH = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}


def work_of(launch: Launch, direction: str) -> Work:
    """What the op of a launch says that it does; nothing for an inline one, a pass of unknown length by default."""
    step = launch.step
    if step.op.inline_forward if direction == "forward" else step.op.inline_backward:
        return _NOTHING
    says = getattr(step.op, f"{direction}_work")
    return Work() if says is None or launch.specs is None else says(*launch.specs)


def kernels_of(
    launch: Launch, works: list[Work], direction: str, fast: tuple[bool, bool, bool] | None
) -> tuple[Kernel, ...]:
    """The kernels of a launch.

    Args:
        launch: the launch.
        works: what each covered op does, in the order in which the direction runs them.
        direction: ``"forward"`` or ``"backward"``.
        fast: which products (forward, input gradient, weight gradient) accumulate fast; None if none can.
    """
    products = [product for work in works for product in work.products]
    casts = [cast for work in works for cast in work.casts]
    passing = [work for work in works if work.passes and not (work.folds and products)]
    args, result = launch.specs if launch.specs is not None else (launch.args, launch.result)
    main = result.output if isinstance(result, FwdResult) else result.grad_input
    if not products and not casts:
        return (_pass(works, passing, nbytes(args), nbytes(result), _scaling(main)),) if passing else ()
    if not passing and isinstance(main, QuantizedTensor) and all(cast.result is not main for cast in casts):
        source = _main_output(products, main)
        known = {id(cast.result) for cast in casts} | {_key(cast.result) for cast in casts}
        if source is not None and _key(main) not in known:
            casts.append(Cast(source, main))
    found = [_cast(cast) for cast in casts]
    found += [_product(product, fast) for product in products]
    if passing:
        found.append(_rest(works, passing, args, result, (products, casts, main)))
    return tuple(found)


def _rest(works: list[Work], passing: list[Work], args: Any, result: Any, moved: Any) -> Kernel:
    """The pass of a step that has products or casts as well."""
    products, casts, main = moved
    made = {_key(cast.result) for cast in casts}
    operands = [operand for product in products for operand in _operands(product) if _key(operand) not in made]
    reads = _without(_units(args), [*operands, *(cast.source for cast in casts)])
    outputs = [product.output for product in products]
    writes = _without(_units(result), [*(cast.result for cast in casts), *outputs])
    read, written = sum(map(nbytes, reads)), sum(map(nbytes, writes))
    first = next(i for i, work in enumerate(works) if work.products)
    if any(work in passing for work in works[first + 1 :]):
        between = _main_output(products, main)
        if between is not None:
            read += nbytes(between)
            if main is not None and all(unit is not main for unit in writes):
                written += nbytes(main)
    if any(work in passing for work in works[:first]):  # what the pass makes for the product
        written += nbytes(products[0].left)
    scaling = _scaling(main)
    return _pass(works, passing, read, written, "" if scaling and _key(main) in made else scaling)


def _main_output(products: list[Product], main: Any) -> Any:
    """The product whose result goes on along the chain."""
    del main
    return next((product.output for product in products if product.layout != "tn"), None)


def _scaling(made: Any) -> str:
    """How what a kernel makes is cast: see :attr:`Kernel.scaling`."""
    if not isinstance(made, QuantizedTensor):
        return ""
    quantizer = made.quantizer.of(made.copy(False) is None)
    if isinstance(quantizer, Float8DelayedScalingQuantizer):
        return "delayed"
    if isinstance(quantizer, Float8CurrentScalingQuantizer) or quantizer.tile is None:
        return "current"
    return "tiles" if min(quantizer.tile) > 1 else "blocks"


def _pass(works: list[Work], passing: list[Work], read: int, written: int, scaling: str) -> Kernel:
    counts = [work.flops for work in works if not work.products or work in passing]
    flops = None if None in counts else sum(count or 0 for count in counts)
    kind = "rows" if any(work.kind == "rows" for work in passing) else "elementwise"
    return Kernel(kind, flops, read, written, scaling=scaling)


def _cast(cast: Cast) -> Kernel:
    # one multiplication and one rounding for each element
    flops, scaling = 2 * math.prod(cast.source.shape), _scaling(cast.result)
    return Kernel("cast", flops, nbytes(cast.source), nbytes(cast.result), scaling=scaling)


def _product(product: Product, fast: tuple[bool, bool, bool] | None) -> Kernel:
    kind = _math(product)
    layouts = ("nt", "nn", "tn")
    columnwise = _COLUMNWISE[product.layout]
    read = sum(
        _copy_bytes(operand, side)
        for operands, side in zip((product.left, product.right), columnwise, strict=True)
        for operand in (operands if isinstance(operands, tuple) else (operands,))
    )
    return Kernel(
        "product",
        product.flops,
        read,
        nbytes(product.output),
        sizes=product.sizes,
        layout=product.layout,
        math=kind,
        fast=kind == "fp8" and fast is not None and fast[layouts.index(product.layout)],
        groups=product.groups,
    )


def _operands(product: Product) -> list[Any]:
    pair = (product.left, product.right)
    return [operand for side in pair for operand in (side if isinstance(side, tuple) else (side,))]


def _copy_bytes(operand: Any, columnwise: bool) -> int:
    """Bytes of what a product reads: one copy."""
    if not isinstance(operand, QuantizedTensor):
        return nbytes(operand)
    copy = operand.copy(columnwise) or operand.copy(not columnwise)
    return nbytes([part for part in copy if part is not None]) if copy is not None else 0


def _math(product: Product) -> str:
    """What the operands are multiplied as: low precision if both are, in the same way, else their nominal dtype."""
    kinds = []
    for operands, columnwise in zip((product.left, product.right), _COLUMNWISE[product.layout], strict=True):
        operand = operands[0] if isinstance(operands, tuple) else operands
        if not isinstance(operand, QuantizedTensor):
            return _MATH.get(str(operand.dtype).removeprefix("torch."), "fp32")
        quantizer = operand.quantizer.of(columnwise)
        if quantizer.packing == 2:
            kinds.append("fp4")
        elif quantizer.tile is None:
            kinds.append("fp8")
        else:
            kinds.append("mxfp8" if quantizer.tile == (1, 32) else "fp8-block")
    if kinds[0] == kinds[1]:
        return kinds[0]
    return _MATH.get(str(product.output.dtype).removeprefix("torch."), "fp32")


def _units(tree: Any) -> list[Any]:
    """Tensors and quantized tensors of a bundle, each quantized tensor as one."""
    if isinstance(tree, QuantizedTensor):
        return [tree]
    names = getattr(type(tree), "_tree_children", None)
    if names is not None:
        return [unit for name in names for unit in _units(getattr(tree, name))]
    if isinstance(tree, (tuple, list)):
        return [unit for child in tree for unit in _units(child)]
    return [tree] if hasattr(tree, "shape") else []


def _key(unit: Any) -> tuple[Any, ...]:
    shape = tuple(unit.shape)
    return math.prod(shape[:-1]), shape[-1] if shape else 1, unit.dtype, isinstance(unit, QuantizedTensor)


def _without(units: list[Any], moved: list[Any]) -> list[Any]:
    """The units that are not among ``moved``, told apart by shape and dtype, each as often as it is there."""
    counts: dict[Any, int] = {}
    for unit in moved:
        counts[_key(unit)] = counts.get(_key(unit), 0) + 1
    rest = []
    for unit in units:
        if counts.get(_key(unit), 0) > 0:
            counts[_key(unit)] -= 1
        else:
            rest.append(unit)
    return rest
