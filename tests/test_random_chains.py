"""Random chains of every op, with random branches, against a float64 interpreter and autograd of it."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import bridge
import functional_te as fte
from functional_te import pytree
from tests import oracles
from tests.helpers import assert_same, random_params, uniform
from tests.test_chain import compare

# in dB; norms of norms amplify the rounding of float32
FLOOR = 60.0
ADD, FORK = fte.AddExtraInput, fte.MakeExtraOutput
POINTWISE = (
    fte.GELU(), fte.QGELU(), fte.SiLU(), fte.SReLU(), fte.ConstantScale(-0.75), fte.Identity(), fte.Dropout(0.0),
    fte.Quantize(), fte.Quantize(forward=True, backward=True), fte.AllReduce("", 1), fte.AllGather("", 1),
)  # fmt: skip
GATED = (fte.GLU(), fte.GEGLU(), fte.QGEGLU(), fte.SReGLU(), fte.SwiGLU(), fte.SwiGLU(glu_interleave_size=2),
         fte.SiTUGLU(), fte.ClampedSwiGLU(limit=3.0))  # fmt: skip
SCALED_GATED = (fte.ScaledSwiGLU(), fte.ScaledSiTUGLU(), fte.ScaledClampedQGeGLU(limit=3.0))
SCALED = (fte.ScaledSReLU(), fte.ScaledTanhSReLU(tanh_clamp_scale=2.0))
KINDS = (
    "linear", "bias", "norm", "pointwise", "gated", "scaled", "adaptive", "grouped", "add", "fork", "channel",
    "consume", "consume", "reshape",
)  # fmt: skip


class _Builder:
    """A chain in the making: its ops, the shape of what flows, its extra inputs, and the open channels."""

    def __init__(self, draw, shape):
        self.draw = draw
        self.shape = shape
        self.ops: list[fte.Op] = []
        self.extras: list[torch.Tensor] = []
        self.channels: dict[str, tuple[int, ...]] = {}

    def extra(self, shape):
        self.extras.append(uniform(shape, seed=60 + len(self.extras)))

    def add(self, kind):
        width = self.shape[-1]
        getattr(self, f"_{kind}")(width)

    def _linear(self, width):
        out = self.draw(st.sampled_from([4, 8, 16]))
        self.ops.append(fte.BasicLinear(width, out))
        self.shape = (*self.shape[:-1], out)

    def _bias(self, width):
        self.ops.append(fte.Bias(width))

    def _norm(self, width):
        norms = [fte.RMSNorm(width, eps=0.1), fte.LayerNorm(width, eps=0.1), fte.L2Normalization(eps=0.1)]
        self.ops.append(self.draw(st.sampled_from(norms)))

    def _pointwise(self, width):
        self.ops.append(self.draw(st.sampled_from(POINTWISE)) if len(self.shape) > 1 else fte.SiLU())

    def _gated(self, width):
        if width >= 8:
            self.ops.append(self.draw(st.sampled_from(GATED)))
            self.shape = (*self.shape[:-1], width // 2)

    def _scaled(self, width):
        gated = width >= 8 and self.draw(st.booleans())
        self.ops.append(self.draw(st.sampled_from(SCALED_GATED if gated else SCALED)))
        self.extra(self.shape[:-1])
        self.shape = (*self.shape[:-1], width // 2 if gated else width)

    def _adaptive(self, width):
        if len(self.shape) < 2:
            return
        dim = self.draw(st.integers(0, len(self.shape) - 2))
        self.ops.append(fte.AdaptiveLayerNorm(width, eps=0.1, batch_dim=dim))
        for _ in range(2):
            self.extra((self.shape[dim], width))

    def _grouped(self, width):
        if len(self.shape) != 2:
            return
        rows = self.shape[0]
        first = self.draw(st.integers(0, rows))
        options = {"bias": self.draw(st.booleans()), "scale_bias": self.draw(st.booleans())}
        options["single_weight"] = self.draw(st.booleans())
        self.ops.append(fte.GroupedLinear(3, width, 8, **options))
        self.extras.append(torch.tensor([first, 0, rows - first]))
        if options["bias"] and options["scale_bias"]:
            self.extra((rows,))
        self.shape = (rows, 8)

    def _add(self, width):
        self.ops.append(ADD())
        self.extra(self.shape)

    def _fork(self, width):
        self.ops.append(FORK())

    def _channel(self, width):
        name = f"c{len(self.channels)}"
        self.ops.append(FORK(channel=name, output_to_caller=self.draw(st.booleans())))
        self.channels[name] = self.shape

    def _consume(self, width):
        open_ = [name for name, shape in self.channels.items() if shape == self.shape]
        if open_:
            self.ops.append(ADD(channel=self.draw(st.sampled_from(open_))))

    def _reshape(self, width):
        target = (-1, 4) if width % 4 == 0 else (1, -1)
        self.ops.append(fte.Reshape(target))
        self.shape = tuple(torch.empty(self.shape).reshape(target).shape)


@st.composite
def random_chains(draw):
    """A chain of 1 to 12 ops, its input shape, and its extra inputs."""
    start = (*draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 2)])), draw(st.sampled_from([4, 8])))
    builder = _Builder(draw, start)
    length = draw(st.integers(1, 12))
    while len(builder.ops) < length:
        builder.add(draw(st.sampled_from(KINDS)))
    return fte.chain(*builder.ops), start, tuple(builder.extras)


def _doubled(tree):
    return pytree.tree_map(lambda t: t.detach().double().requires_grad_() if t.is_floating_point() else t.clone(), tree)


def _floating(tree):
    return [leaf for leaf in pytree.leaves(tree) if leaf.is_floating_point()]


def _fits_float32(block, params, x, extras, cotangents) -> bool:
    """Whether plain torch computes the chain in float32 without overflow: squares of squares grow fast."""
    own = pytree.tree_map(lambda t: t.clone().requires_grad_(t.is_floating_point()), (params, x, extras))
    made = oracles.run(block, *own)
    grads = torch.autograd.grad(made, _floating(own), cotangents)
    return all(bool(tensor.isfinite().all()) for tensor in (*made, *grads))


@settings(max_examples=300, print_blob=False)
@given(sample=random_chains(), fused=st.booleans())
def test_random_chains_match_the_interpreter(sample, fused) -> None:
    """Outputs and all gradients, functional and through autograd, with and without fusions."""
    block, shape, extras = sample
    fusions = None if fused else fte.Fusions()
    params, x = random_params(block), uniform(shape)
    params64, x64, extras64 = _doubled((params, x, extras))
    want = oracles.run(block, params64, x64, extras64)
    cotangents = [uniform(out.shape, seed=40 + i) for i, out in enumerate(want)]
    leaves64 = _floating((x64, params64, extras64))
    wanted = torch.autograd.grad(want, leaves64, [c.double() for c in cotangents])
    assume(_fits_float32(block, params, x, extras, cotangents))

    result, pullback = fte.vjp(block, params, x, *extras, fusions=fusions)
    grads = pullback(*cotangents)
    outputs = (result.output, *result.extra_outputs)
    compare(outputs, want, FLOOR)
    compare(_floating((grads.input, grads.params, grads.extra_inputs)), wanted, FLOOR)

    leaves = pytree.tree_map(lambda t: t.clone().requires_grad_(t.is_floating_point()), (params, x, extras))
    params, x, extras = leaves
    found, _ = bridge.apply(block, params, x, *extras, fusions=fusions)
    found = found if isinstance(found, tuple) else (found,)
    assert_same(tuple(out.detach() for out in found), outputs)
    torch.autograd.backward(found, cotangents)
    compare([leaf.grad for leaf in _floating((x, params, extras))], wanted, FLOOR)
