"""Shared by the tests of grouped layers: data, and the same with one plain layer for each group."""

import torch
from hypothesis import strategies as st

import functional_te as fte
from tests.helpers import uniform

ROLES = ("input", "weight", "grad_output")


@st.composite
def sizes_of_groups(draw, groups: int = 3, largest: int = 70):
    """Rows of each group: any, or all in one group, or none at all."""
    kind = draw(st.sampled_from(("any", "any", "one", "none")))
    if kind == "none":
        return (0,) * groups
    if kind == "one":
        owner, count = draw(st.integers(0, groups - 1)), draw(st.integers(1, largest))
        return tuple(count if g == owner else 0 for g in range(groups))
    return tuple(draw(st.integers(0, largest)) for _ in range(groups))


def slices(sizes) -> list[slice]:
    """Where the rows of each group are."""
    ends = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def grouped_params(op: fte.GroupedLinear, dtype: torch.dtype = torch.float32, seed: int = 10):
    """Parameters without structure in [-1, 1)."""
    return {
        name: uniform(tuple(spec.shape), dtype, seed + i)
        for i, (name, spec) in enumerate(op.param_specs(dtype, "cpu").items())
    }


def of_group(op: fte.GroupedLinear, params, kind: str, g: int):
    """The weight or bias of one group."""
    single = op.single_weight if kind == "weight" else op.single_bias
    return params[kind][g] if single else params[f"{kind}{g}"]


def formula(op: fte.GroupedLinear, x, params, sizes, scales=None):
    """The output in plain torch, group by group."""
    outputs = []
    for g, rows in enumerate(slices(sizes)):
        y = (x[rows].unsqueeze(-2) * of_group(op, params, "weight", g)).sum(-1)
        if op.bias:
            bias = of_group(op, params, "bias", g)
            y = y + (bias if scales is None else scales[rows][:, None] * bias)
        outputs.append(y)
    return torch.cat(outputs)


def state_of_group(state, g: int):
    """State of a plain linear layer and bias, from that of a grouped layer."""
    if state is None:
        return None
    return ({role: state[0][f"{role}{g}"] for role in ROLES if f"{role}{g}" in state[0]}, {})


def one_by_one(op: fte.GroupedLinear, params, x, dy, sizes, recipe, state):
    """Output, gradients and states of a plain linear layer for each group: y, dx, [dW], [db], [states]."""
    y, dx, dw, db, states = [], [], [], [], []
    plain = fte.Linear(op.in_features, op.out_features)
    for g, rows in enumerate(slices(sizes)):
        own = (
            {"weight": of_group(op, params, "weight", g)},
            {"bias": of_group(op, params, "bias", g)},
        )
        result, pullback = fte.vjp(
            plain, own, x[rows], recipe=recipe, state=state_of_group(state, g), fusions=fte.Fusions()
        )
        grads = pullback(dy[rows])
        y.append(result.output)
        dx.append(grads.input)
        dw.append(grads.params[0]["weight"])
        db.append(grads.params[1]["bias"])
        states.append(grads.state)
    return torch.cat(y), torch.cat(dx), dw, db, states
