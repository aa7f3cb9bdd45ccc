"""Quantized tensors of every format: what they decode to, and what may be done with them. Decoders are float64."""

import dataclasses
import math

import pytest
import torch

import functional_te as fte
from functional_te import pytree
from functional_te.quantization import (
    QUANTIZERS,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8DelayedScalingQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
from tests.every_recipe import a_state, decode64, quantized, rotation, values64
from tests.helpers import assert_same, unchanged

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX = MXFP8Quantizer(dtype=E4M3)
FORMATS = {
    "current": Float8CurrentScalingQuantizer(dtype=E4M3),
    "delayed": Float8DelayedScalingQuantizer(dtype=E5M2, amax_history_len=2),
    "block 1-D": Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1),
    "block 2-D": Float8BlockQuantizer(dtype=E5M2, power_2_scale=False),
    "mxfp8": MX,
    "mxfp8 2-D": MXFP8Quantizer(dtype=E5M2, with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4 rotated": NVFP4Quantizer(with_rht=True),
    "nvfp4 random": NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    "nvfp4 2-D": NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 rows": NVFP4Quantizer(row_scaled=True),
    "nvfp4 4over6": NVFP4Quantizer(four_over_six="MSE", e4m3_max=256),
    "hybrid": HybridQuantizer(rowwise_quantizer=MX, columnwise_quantizer=NVFP4Quantizer(with_rht=True)),
    "hybrid from rows": HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(),
        columnwise_quantizer=Float8BlockQuantizer(dtype=E4M3, block_scaling_dim=1),
        columnwise_source="rowwise_dequantized",
    ),
}
FORMATS = {name: quantizer.with_usage(True, True) for name, quantizer in FORMATS.items()}
# rows and columns of a copy that share a scale, and what a columnwise copy is padded to; None: the whole tensor
TILES = {
    "current": ((None, 1), (None, 1)),
    "delayed": ((None, 1), (None, 1)),
    "block 1-D": ((1, 1), (128, 1)),
    "block 2-D": ((128, 1), (128, 1)),
    "mxfp8": ((1, 1), (32, 1)),
    "mxfp8 2-D": ((32, 1), (32, 1)),
    "nvfp4": ((1, 1), (16, 16)),
    "nvfp4 rotated": ((1, 1), (16, 16)),
    "nvfp4 random": ((1, 1), (16, 16)),
    "nvfp4 2-D": ((16, 1), (16, 16)),
    "nvfp4 rows": ((1, 1), (16, 16)),
    "nvfp4 4over6": ((1, 1), (16, 16)),
    "hybrid": ((1, 1), (16, 16)),
    "hybrid from rows": ((1, 1), (128, 1)),
}
TRANSPOSABLE = {"current", "delayed", "block 2-D", "mxfp8 2-D", "nvfp4 2-D"}
COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
FEATURES = 96
every_format = pytest.mark.parametrize("name", FORMATS)
every_usage = pytest.mark.parametrize("usage", COPIES)


def data(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp(torch.randn(shape, generator=generator))).to(dtype)


def make(name, shape=(40, FEATURES), usage="both", dtype=torch.float32):
    return quantized(data(shape, dtype), FORMATS[name].with_usage(*COPIES[usage]))


def padded(name, tokens):
    multiple = TILES[name][1][1]
    return multiple * math.ceil(tokens / multiple)


def test_every_quantizer_is_here() -> None:
    assert {type(quantizer) for quantizer in FORMATS.values()} == set(QUANTIZERS)


def test_the_rotation_of_the_oracle() -> None:
    """Orthogonal, and all of its elements are +-1/4."""
    matrix = rotation()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    assert (matrix.abs() == 0.25).all()


# ---- values ------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("shape", [(40, 96), (1, 32), (2, 3, 7, 160), (0, 32), (130, 288)], ids=str)
def test_decoded_values(name, shape) -> None:
    """Values and factor of both copies are what the format defines, and near the tensor."""
    x = data(shape)
    q = quantized(x, FORMATS[name])
    matrix = x.reshape(-1, shape[-1]).double()
    for columnwise in (False, True):
        values, factor = q.decoded(columnwise)
        assert values.dtype is torch.float32
        own = decode64(q.copy(columnwise), q.quantizer.of(columnwise), columnwise)
        product = values.double() if factor is None else values.double() * factor.double()
        torch.testing.assert_close(product, own, rtol=1e-6, atol=0)
        found = values64(q, columnwise)[: matrix.shape[0]]
        assert found.shape == matrix.shape
        if matrix.numel():
            noise = (found - matrix).norm() / matrix.norm()
            assert 1e-4 < noise < (0.2 if name.startswith(("nvfp4", "hybrid")) else 0.08)


@every_format
@every_usage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantize(name, usage, dtype) -> None:
    """In the nominal dtype unless asked, rounded once; from the rowwise copy if there is one."""
    q = make(name, (2, 20, FEATURES), usage, dtype)
    expected = values64(q, usage == "columnwise")
    found = q.dequantize()
    assert found.dtype is q.dtype is dtype
    assert tuple(found.shape) == q.shape
    exact = q.dequantize(torch.float32)
    torch.testing.assert_close(exact.double().reshape(expected.shape), expected, rtol=1e-6, atol=2e-6)
    assert_same(found, exact.to(dtype))
    assert_same(fte.dequantize(q, torch.bfloat16), exact.bfloat16())


@every_format
@every_usage
def test_shape_device_and_bytes(name, usage) -> None:
    q = make(name, (2, 20, FEATURES), usage)
    tokens = padded(name, 40)
    wanted = (tokens, FEATURES) if usage == "columnwise" else (2, 20, FEATURES)
    assert (q.shape, q.dim(), q.device) == (wanted, len(wanted), torch.device("cpu"))
    expected = 0
    for columnwise, there in zip((False, True), COPIES[usage], strict=True):
        copy = q.copy(columnwise)
        assert (copy is not None) is there
        if not there:
            continue
        own = q.quantizer.of(columnwise)
        rows, cols = (FEATURES, tokens) if columnwise else (40, FEATURES)
        per_block = {"MXFP8Quantizer": 1, "NVFP4Quantizer": 1}.get(type(own).__name__, 4)
        grid = 1 if own.tile is None else math.ceil(rows / own.tile[0]) * math.ceil(cols / own.tile[1])
        amaxes = 0 if type(own) is not NVFP4Quantizer else 40 if own.row_scaled and not columnwise else 1
        assert copy.scale_inv.numel() == grid
        expected += rows * cols // own.packing + per_block * grid + 4 * amaxes
    assert q.nbytes == expected
    assert q.data.shape == (q.rowwise_data.shape if usage != "columnwise" else q.columnwise_data.t().shape)
    assert q.scale_inv is (q.columnwise_scale_inv if usage == "columnwise" else q.rowwise_scale_inv)


@every_format
def test_copies_do_not_depend_on_each_other(name) -> None:
    """A copy has the same bits whether the other one is made or not, and shares no storage with it."""
    both = make(name)
    for usage in ("rowwise", "columnwise"):
        rowwise, columnwise = COPIES[usage]
        assert_same(
            pytree.leaves(make(name, usage=usage)),
            pytree.leaves(both.with_usage(rowwise=rowwise, columnwise=columnwise)),
        )
    storages = [t.untyped_storage().data_ptr() for t in pytree.leaves(both)]
    assert len(set(storages)) == len(storages)
    assert all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in pytree.leaves(both))


@every_format
@every_usage
def test_what_serves_which_products(name, usage) -> None:
    q = make(name, usage=usage)
    for columnwise, there in zip((False, True), COPIES[usage], strict=True):
        assert q.serves(columnwise) is (there or name in TRANSPOSABLE)
        if q.serves(columnwise):
            values, factor = q.decoded(columnwise)
            product = values.double() if factor is None else values.double() * factor.double()
            expected = values64(q, columnwise)
            if columnwise and q.quantizer.rotates:
                expected = (expected.t().reshape(FEATURES, -1, 16) @ rotation()).reshape(FEATURES, -1).t()
            torch.testing.assert_close(product.t() if columnwise else product, expected, rtol=1e-6, atol=1e-6)
            continue
        wanted = "columnwise" if columnwise else "rowwise"
        with pytest.raises(ValueError, match=f"QuantizedTensor: copies: expected a {wanted} copy, got none"):
            q.decoded(columnwise)


# ---- other copies ------------------------------------------------------------------------------------------------


def parts(q, columnwise):
    """The tensors of a copy by identity, or None."""
    copy = q.copy(columnwise)
    return None if copy is None else [id(tensor) for tensor in copy]


@every_format
def test_with_usage(name) -> None:
    """Copies are dropped; nothing is computed."""
    q = make(name)
    for rowwise, columnwise in COPIES.values():
        found = q.with_usage(rowwise=rowwise, columnwise=columnwise)
        assert parts(found, False) == (parts(q, False) if rowwise else None)
        assert parts(found, True) == (parts(q, True) if columnwise else None)
        assert (found.quantizer, found.dtype) == (q.quantizer, q.dtype)
    for usage, missing in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        rowwise, columnwise = COPIES[usage]
        only = q.with_usage(rowwise=rowwise, columnwise=columnwise)
        for wanted in ((True, True), (not rowwise, not columnwise)):
            with pytest.raises(
                ValueError, match=f"QuantizedTensor: {missing}: expected a copy that is there, got none"
            ):
                only.with_usage(rowwise=wanted[0], columnwise=wanted[1])
    with pytest.raises(ValueError, match="QuantizedTensor: with_usage: expected at least one copy, got none"):
        q.with_usage(rowwise=False, columnwise=False)


@every_format
@every_usage
def test_requantize(name, usage) -> None:
    """By default to both copies of the same format, of the values as rounded before."""
    q = make(name, usage=usage)
    quantizer = q.quantizer
    if quantizer.stateful:
        with pytest.raises(ValueError, match="quantize: state: expected the state of"):
            q.requantize()
        again, after = q.requantize(state=a_state(quantizer))
        assert after.amax_history[0] > 0
    else:
        again = q.requantize()
    assert again.quantizer == quantizer.with_usage(True, True)
    assert again.copy(False) is not None
    assert again.copy(True) is not None
    assert again.dtype is q.dtype
    assert_same(again, quantized(q.dequantize(), quantizer.with_usage(True, True)))
    with unchanged(q):
        mx = q.requantize(MX)
    assert_same(mx, fte.quantize(q.dequantize(), MX))


@every_format
def test_moved_to_another_device(name) -> None:
    q = make(name)
    moved = q.to("meta")
    assert moved.device == torch.device("meta")
    assert all(t.is_meta for t in pytree.leaves(moved))
    assert (moved.shape, moved.dtype, moved.quantizer, moved.nbytes) == (q.shape, q.dtype, q.quantizer, q.nbytes)
    assert_same(q.to("cpu"), q)


# ---- reshape -----------------------------------------------------------------------------------------------------


@every_format
def test_reshape(name) -> None:
    """Leading dimensions only: the columnwise copy and all scales stay as they are."""
    q = make(name, (2, 20, FEATURES))
    for wanted, shape in (
        ((40, FEATURES), (40, FEATURES)),
        ((4, 5, 2, FEATURES), (4, 5, 2, FEATURES)),
        ((-1, FEATURES), (40, FEATURES)),
        ((8, -1, FEATURES), (8, 5, FEATURES)),
        ((40, -1), (40, FEATURES)),
        ((1, 40, 1, FEATURES), (1, 40, 1, FEATURES)),
    ):
        for given in (wanted, (wanted,), (list(wanted),)):
            found = q.reshape(*given)
            assert found.shape == shape
            assert_same(found.dequantize(), q.dequantize().reshape(shape))
            assert parts(found, True) == parts(q, True)
            assert found.rowwise_scale_inv is q.rowwise_scale_inv
    columns = make(name, (2, 20, FEATURES), "columnwise")
    assert_same(columns.reshape(-1, FEATURES), columns)


@every_format
def test_reshapes_that_are_refused(name) -> None:
    q = make(name, (2, 20, FEATURES))
    for shape in ((FEATURES, 40), (20, 2, 48, 2), (40 * FEATURES,), (20, 2 * FEATURES), ()):
        with pytest.raises(
            ValueError, match=rf"QuantizedTensor: reshape: expected last dimension {FEATURES}, got shape"
        ):
            q.reshape(*shape)
    for shape in (
        (41, FEATURES),
        (3, -1, FEATURES),
        (0, -1, FEATURES),
        (39, -1),
        (FEATURES,),
        (-1,),
        (-1, -1, FEATURES),
    ):
        with pytest.raises(ValueError, match=rf"QuantizedTensor: reshape: expected 40 rows of {FEATURES}, got shape"):
            q.reshape(*shape)
    columns = make(name, (2, 20, FEATURES), "columnwise")
    rows = padded(name, 40)
    with pytest.raises(ValueError, match="QuantizedTensor: reshape: expected two dimensions without a rowwise copy"):
        columns.reshape(2, rows // 2, FEATURES)


# ---- slicing -----------------------------------------------------------------------------------------------------


def step_of(name, usage):
    """Rows between legal bounds."""
    sizes = [size or 1 for (size, _), there in zip(TILES[name], COPIES[usage], strict=True) if there]
    if name in ("current", "delayed"):
        return 1
    return math.lcm(*sizes)


@every_format
@every_usage
def test_slices(name, usage) -> None:
    """Values of the rows, without a copy; on bounds of blocks, and up to the end."""
    step, tokens = step_of(name, usage), 300
    q = make(name, (tokens, FEATURES), usage)
    rows = q.shape[0]  # padded, without a rowwise copy
    expected = q.dequantize()
    for start, stop in ((0, step), (step, 2 * step), (step, None), (None, None), (2 * step, rows)):
        part = q[start:stop]
        wanted = expected[start:stop]
        assert part.shape == tuple(wanted.shape)
        assert_same(part.dequantize(), wanted)
        for columnwise, there in zip((False, True), COPIES[usage], strict=True):
            if there:
                found, own = values64(part, columnwise), values64(q, columnwise)[start or 0 :]
                own = own[: found.shape[0]]  # the end of a copy is padded
                assert found.shape[0] >= part.shape[0]
                torch.testing.assert_close(found, own, rtol=0, atol=0)
                shared = part.copy(columnwise).data.untyped_storage().data_ptr()
                assert shared == q.copy(columnwise).data.untyped_storage().data_ptr()
    assert (part.quantizer, part.dtype) == (q.quantizer, q.dtype)
    assert_same(q[step - rows :], q[step:])


@every_format
@every_usage
def test_empty_slices(name, usage) -> None:
    q = make(name, (300, FEATURES), usage)
    for part in (q[0:0], q[: -q.shape[0]], q[256:128]):
        check_empty(part, usage)


@every_format
@every_usage
def test_empty_slices_at_the_end(name, usage) -> None:
    q = make(name, (300, FEATURES), usage)
    check_empty(q[q.shape[0] :], usage)


def check_empty(part, usage):
    assert part.shape == (0, FEATURES)
    assert part.dequantize().shape == (0, FEATURES)
    for columnwise, there in zip((False, True), COPIES[usage], strict=True):
        assert not there or values64(part, columnwise).shape == (0, FEATURES)


@every_format
def test_a_slice_multiplies_like_its_rows(name) -> None:
    """Products of a slice are rows of the product, and its part of the sum over tokens."""
    q = make(name, (256, FEATURES))
    block, recipe = fte.BasicLinear(FEATURES, 32), fte.recipes.MXFP8BlockScaling()
    params, dy = ({"weight": data((32, FEATURES), seed=1)},), data((256, 32), seed=2)

    def run(part, gradient):
        result, pullback = fte.vjp(block, params, part, recipe=recipe, requires_grad=(False, ((True,),), ()))
        return result.output, pullback(gradient).params[0]["weight"]

    whole, first, second = run(q, dy), run(q[:128], dy[:128]), run(q[128:], dy[128:])
    torch.testing.assert_close(torch.cat((first[0], second[0])), whole[0])
    torch.testing.assert_close(first[1] + second[1], whole[1], rtol=1e-4, atol=1e-4)


@every_format
def test_slices_of_more_dimensions(name) -> None:
    """An index of the first dimension stands for several rows."""
    step = step_of(name, "both")
    q = make(name, (4, step, 3, FEATURES))
    for start, stop in ((1, 3), (0, 4), (3, None), (None, 1)):
        part = q[start:stop]
        assert_same(part.dequantize(), q.dequantize()[start:stop])
        torch.testing.assert_close(
            values64(part, True),
            values64(q, True).reshape(4, step * 3, FEATURES)[start:stop].reshape(-1, FEATURES),
            rtol=0,
            atol=0,
        )


@every_format
@every_usage
def test_slices_that_are_refused(name, usage) -> None:
    q = make(name, (300, FEATURES), usage)
    step = step_of(name, usage)
    with pytest.raises(ValueError, match="QuantizedTensor: index: expected step 1, got 2"):
        q[0:256:2]
    for index in (0, ..., (slice(0, 128), slice(0, 32)), None, torch.tensor([1])):
        with pytest.raises(TypeError, match="QuantizedTensor: index: expected a slice of the first dimension, got"):
            q[index]
    if step > 1:
        for bad in (slice(1, step), slice(0, step + 1), slice(step, -1)):
            with pytest.raises(ValueError, match=r"QuantizedTensor: index: expected bounds at multiples of \d+ rows"):
                q[bad]


def test_a_slice_of_one_dimension_is_refused() -> None:
    q = fte.quantize(data((64,)), MX)
    with pytest.raises(ValueError, match="QuantizedTensor: index: expected at least two dimensions to slice the first"):
        q[:32]


# ---- as a value --------------------------------------------------------------------------------------------------


@every_format
@every_usage
def test_it_is_a_tree(name, usage) -> None:
    q = make(name, usage=usage)
    leaves, spec = pytree.tree_flatten(q)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    rebuilt = pytree.tree_unflatten(spec, leaves)
    assert type(rebuilt) is QuantizedTensor
    assert_same(rebuilt, q)
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.rowwise_data = None


@every_format
def test_zero_dimensions_and_one(name) -> None:
    """One dimension is one row; none is a matrix of one element, where the format can hold it."""
    x = data((64,))
    q = quantized(x, FORMATS[name])
    row = quantized(x[None], FORMATS[name])
    assert q.shape == (64,)
    assert_same(q.dequantize(), row.dequantize()[0])
    assert_same(q.copy(True), row.copy(True))
    scalar = torch.tensor(0.7)
    if q.quantizer.of(False).feature_multiple == q.quantizer.of(True).feature_multiple == 1:
        one = quantized(scalar, FORMATS[name])
        assert one.shape == one.dequantize().shape == ()
        torch.testing.assert_close(one.dequantize(), scalar, rtol=0.15, atol=0)
    else:
        with pytest.raises(ValueError, match=r"quantize: x: expected a last dimension .*, got shape \(\)"):
            quantized(scalar, FORMATS[name])
