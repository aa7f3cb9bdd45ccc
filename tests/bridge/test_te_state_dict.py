"""Extra state of te.ops checkpoints: read without running its pickle, and written as te.ops reads it."""

import collections
import io
import os
import pickle
import pickletools
import sys
import types

import pytest
import torch

import bridge
from bridge import ops
from bridge.interop import te_state_dict
from functional_te.recipes import DelayedScaling, Format

from .compiled import CURRENT, assert_same_bits, leaf

RECIPE = DelayedScaling(amax_history_len=4)
SIZE = 16
_FORMAT_LIMITS = {"E4M3": (448, 448), "HYBRID": (448, 57344)}


@pytest.fixture
def te(monkeypatch):
    """Classes where Transformer Engine has its recipes, for the time of the test: what a real checkpoint names."""
    import dataclasses
    import enum
    from typing import NamedTuple

    name = "transformer_engine.common.recipe"
    recipe = types.ModuleType(name)

    class _FormatHelper(NamedTuple):
        max_fwd: float
        max_bwd: float

    class TeFormat(enum.Enum):
        E4M3 = _FormatHelper(*_FORMAT_LIMITS["E4M3"])
        HYBRID = _FormatHelper(*_FORMAT_LIMITS["HYBRID"])

    @dataclasses.dataclass
    class TeDelayedScaling:
        margin: int = 0
        fp8_format: TeFormat = TeFormat.HYBRID
        amax_history_len: int = 1024
        amax_compute_algo: object = "max"
        scaling_factor_compute_algo: object = None

    @dataclasses.dataclass
    class Float8CurrentScaling:
        fp8_format: TeFormat = TeFormat.HYBRID

    for kind, own in (
        (_FormatHelper, "_FormatHelper"),
        (TeFormat, "Format"),
        (TeDelayedScaling, "DelayedScaling"),
        (Float8CurrentScaling, "Float8CurrentScaling"),
    ):
        kind.__module__, kind.__name__, kind.__qualname__ = name, own, own
        setattr(recipe, own, kind)
    for module in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, name, recipe)
    return recipe


def payload(content, protocol=None):
    """A te.ops extra state of this content."""
    return torch.frombuffer(bytearray(pickle.dumps(content, protocol=protocol)), dtype=torch.uint8).clone()


def saved(content):
    """The same as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).clone()


def _content(te, margin=3, forward="HYBRID", length=4):
    generator = torch.Generator().manual_seed(1)
    recipe = te.DelayedScaling(margin=margin, fp8_format=te.Format[forward], amax_history_len=length)
    return {
        "forward": {
            "recipe": recipe,
            "scale_fwd": torch.tensor([2.0, 3.0]),
            "amax_history_fwd": torch.rand(length, 2, generator=generator),
            "extra_fp8_variables": {"fp8_checkpoint": True},
        },
        "backward": {
            "recipe": recipe,
            "scale_bwd": torch.tensor([5.0]),
            "amax_history_bwd": torch.rand(length, 1, generator=generator),
            "extra_fp8_variables": {},
        },
    }


def _check_loaded(linear, content, margin=3, gradients=torch.float8_e5m2):
    loaded = {role: (quantizer, state) for role, quantizer, state in linear.named_states()}
    forward, grads = content["forward"], content["backward"]
    for slot, role in enumerate(("input", "weight")):
        quantizer, state = loaded[role]
        assert (quantizer.dtype, quantizer.margin) == (torch.float8_e4m3fn, margin)
        assert_same_bits(state.scale, forward["scale_fwd"][slot : slot + 1])
        assert_same_bits(state.amax_history, forward["amax_history_fwd"][:, slot])
        assert state.scale._base is None
        assert state.amax_history._base is None
    quantizer, state = loaded["grad_output"]
    assert (quantizer.dtype, quantizer.margin) == (gradients, margin)
    assert_same_bits([state.scale, state.amax_history], [grads["scale_bwd"], grads["amax_history_bwd"][:, 0]])


# ---------------------------------------------------------------------------- reading


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(("fp8", "gradients"), [("HYBRID", torch.float8_e5m2), ("E4M3", torch.float8_e4m3fn)])
def test_reading(te, monkeypatch, protocol, fp8, gradients):
    content = _content(te, forward=fp8)
    data = payload(content, protocol)
    for name in list(sys.modules):
        if name.startswith("transformer_engine"):
            monkeypatch.delitem(sys.modules, name)  # Transformer Engine is not there when we read
    linear = ops.BasicLinear(SIZE, SIZE)
    linear.set_extra_state(data)
    _check_loaded(linear, content, gradients=gradients)


def test_reading_what_torch_save_wrote(te):
    content = _content(te)
    linear = ops.BasicLinear(SIZE, SIZE)
    linear.set_extra_state(saved(content))
    _check_loaded(linear, content)
    for own in content.values():
        del own["recipe"]  # then it loads with weights_only, and the settings are the defaults
    linear.set_extra_state(saved(content))
    _check_loaded(linear, content, margin=0)


def test_reading_other_layouts(te):
    content = _content(te)
    flat = {"recipe": content["forward"]["recipe"]}
    for own in content.values():
        flat |= {name: value for name, value in own.items() if name.startswith(("scale", "amax"))}
    short = {
        mode: {
            "recipe": own["recipe"],
            "scale": own[f"scale_{suffix}"],
            "amax_history": own[f"amax_history_{suffix}"],
        }
        for (mode, own), suffix in zip(content.items(), ("fwd", "bwd"), strict=True)
    }
    for other in (flat, short, collections.OrderedDict(content)):
        linear = ops.BasicLinear(SIZE, SIZE)
        linear.set_extra_state(payload(other))
        _check_loaded(linear, content)


def test_a_whole_checkpoint_continues_a_training(te):
    model = ops.Sequential(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE, bias=False))
    checkpoint = {
        "0.basic_ops.0.weight": torch.full((SIZE, SIZE), 0.25),
        "0.basic_ops.0._extra_state": payload(_content(te, margin=0)),
        "0.basic_ops.1.bias": torch.ones(SIZE),
        "0.basic_ops.1._extra_state": torch.empty(0, dtype=torch.uint8),
        "1._extra_state": torch.empty(0, dtype=torch.uint8),
        "2.basic_ops.0.weight": torch.full((SIZE, SIZE), 0.5),
        "2.basic_ops.0._extra_state": payload({}),
    }
    assert set(checkpoint) == set(model.state_dict())
    model.load_state_dict(checkpoint)
    x = leaf(SIZE, SIZE)
    with bridge.autocast(recipe=RECIPE):
        model(x).sum().backward()
    scale = model[0].basic_ops[0].get_quantizer("forward", 0).scale
    history = _content(te)["forward"]["amax_history_fwd"][:, 0]
    # entering the context closed the step that was saved
    torch.testing.assert_close(scale, 448 / history.max()[None])


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "nothing"])
def test_states_without_delayed_scaling_are_ignored(te, recipe):
    linear = ops.BasicLinear(SIZE, SIZE)
    mode = {} if recipe == "nothing" else {"forward": {"recipe": te.Float8CurrentScaling(), "extra_fp8_variables": {}}}
    linear.set_extra_state(payload(mode))
    assert linear.named_states() == []
    with bridge.autocast(recipe=CURRENT):
        linear(leaf(SIZE, SIZE)).sum().backward()


# ---------------------------------------------------------------------------- what is refused


class _Runs:
    """Unpickled as it is meant to be, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class _Calls:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def _function():
    """Named by a pickle."""


def _attack_state():
    """BUILD on a function: its attributes would be set."""
    return b"".join(
        (
            pickle.PROTO + b"\x02",
            pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n",
            pickle.EMPTY_DICT + pickle.BINUNICODE + b"\x04\x00\x00\x00evil" + pickle.NEWTRUE + pickle.SETITEM,
            pickle.BUILD + pickle.STOP,
        )
    )


def _zip_of(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


ATTACKS = {
    "a call": lambda path: pickle.dumps({"forward": _Runs(path)}),
    "a call, archived": lambda path: _zip_of({"forward": _Runs(path)}),
    "a call in a storage": lambda path: pickle.dumps(_Calls(torch.storage._load_from_bytes, _zip_of(_Runs(path)))),
    "getattr of a tensor": lambda path: pickle.dumps(_Calls(getattr, torch.ones(1), "data_ptr")),
    "a function": lambda path: pickle.dumps({"forward": {"recipe": _function}}),
    "eval": lambda path: pickle.dumps(_Calls(eval, f"__import__('os').mkdir({path!r})")),
    "torch.load": lambda path: pickle.dumps(_Calls(torch.load, path)),
    "another module of te": lambda path: (
        pickle.PROTO + b"\x02" + pickle.GLOBAL + b"transformer_engine.pytorch\nLinear\n" + pickle.STOP
    ),
    "attributes of a function": lambda path: _attack_state(),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_is_refused(attack, tmp_path):
    path = str(tmp_path / "made")
    data = ATTACKS[attack](path)
    linear = ops.BasicLinear(SIZE, SIZE)
    with pytest.raises(ValueError, match="BasicLinear: extra state: expected"):
        linear.set_extra_state(torch.frombuffer(bytearray(data), dtype=torch.uint8).clone())
    assert not os.path.exists(path)
    assert linear.named_states() == []
    assert not hasattr(torch._utils._rebuild_tensor_v2, "evil")


def _changed(te, mode, name, value):
    content = _content(te)
    content[mode][name] = value
    return content


BAD_CONTENT = {
    "slots": ("forward", "scale_fwd", torch.ones(3)),
    "columns": ("forward", "amax_history_fwd", torch.ones(4, 1)),
    "length": ("backward", "amax_history_bwd", torch.ones(0, 1)),
    "dtype": ("backward", "scale_bwd", torch.ones(1, dtype=torch.float64)),
    "no tensor": ("forward", "scale_fwd", [1.0, 1.0]),
}


@pytest.mark.parametrize("bad", BAD_CONTENT)
def test_states_that_do_not_fit_are_refused(te, bad):
    linear = ops.BasicLinear(SIZE, SIZE)
    with pytest.raises((ValueError, TypeError), match=f"extra state '{BAD_CONTENT[bad][0]}'"):
        linear.set_extra_state(payload(_changed(te, *BAD_CONTENT[bad])))
    assert linear.named_states() == []
    with pytest.raises((ValueError, TypeError), match="BasicLinear: extra state 'forward'"):
        linear.set_extra_state(payload({"forward": 3}))
    with pytest.raises(ValueError, match="GELU: extra state"):
        ops.GELU().set_extra_state(payload(_content(te)))


# ---------------------------------------------------------------------------- writing


def _trained(recipe=RECIPE, steps=3):
    model = ops.Sequential(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE, bias=False))
    for seed in range(steps):
        with bridge.autocast(recipe=recipe):
            model(leaf(SIZE, SIZE, seed=seed)).square().sum().backward()
    return model


@pytest.mark.parametrize("fp8", [Format.HYBRID, Format.E4M3], ids=lambda f: f.name)
def test_writing(te, fp8):
    model = _trained(DelayedScaling(amax_history_len=4, margin=2, fp8_format=fp8, amax_compute_algo="most_recent"))
    written = te_state_dict(model)
    assert list(written) == list(model.state_dict())
    assert written["1._extra_state"].numel() == 0
    raw = bytes(written["0.basic_ops.0._extra_state"].numpy())
    content = pickle.loads(raw)  # as te.ops does
    states = {role: state for role, _, state in model[0].basic_ops[0].named_states()}
    assert_same_bits(content["forward"]["scale_fwd"], torch.cat([states["input"].scale, states["weight"].scale]))
    assert_same_bits(content["backward"]["amax_history_bwd"][:, 0], states["grad_output"].amax_history)
    assert content["forward"]["amax_history_fwd"].shape == (4, 2)
    recipe = content["backward"]["recipe"]
    assert type(recipe) is te.DelayedScaling
    assert (recipe.fp8_format, recipe.margin, recipe.amax_history_len) == (te.Format[fp8.name], 2, 4)
    assert recipe.amax_compute_algo == "most_recent"
    named = {arg for op, arg, _ in pickletools.genops(raw) if op.name == "GLOBAL"}
    assert not any("bridge" in name for name in named)
    assert "transformer_engine.common.recipe DelayedScaling" in named


def test_written_states_are_read_back():
    model = _trained()
    other = ops.Sequential(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE, bias=False))
    other.load_state_dict(te_state_dict(model))
    for mine, theirs in zip(model, other, strict=True):
        for a, b in zip(mine.basic_operations(), theirs.basic_operations(), strict=True):
            assert_same_bits([s for *_, s in a.named_states()], [s for *_, s in b.named_states()])
            assert [q for _, q, _ in a.named_states()] == [q for _, q, _ in b.named_states()]
    x = leaf(SIZE, SIZE, seed=9)
    with bridge.autocast(recipe=RECIPE):
        assert_same_bits(other(x).detach(), model(x).detach())


def test_writing_without_delayed_scaling():
    model = torch.nn.Sequential(_trained(CURRENT), torch.nn.Linear(SIZE, SIZE))
    written = te_state_dict(model)
    assert all(value.numel() == 0 for name, value in written.items() if name.endswith("_extra_state"))
    assert_same_bits(written["1.weight"], model[1].weight.detach())
