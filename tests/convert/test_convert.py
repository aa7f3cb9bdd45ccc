"""What stays as it was in a converted model, what comes back, and what is refused."""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bridge
import functional_te as fte
from bridge.convert import plan, swap
from bridge.ops.operation import BasicOperation
from tests.convert.models import CASES, CURRENT, DELAYED, HIDDEN, IDS, WIDTH, data, decoder, gpt2, mlp, run, snr


def _logits(model):
    return model(IDS, use_cache=False).logits


def _rows(model):
    return {row.name: row for row in bridge.conversion_report(model).rows}


# ------------------------------------------------------------------------------------------- what stays


@pytest.mark.parametrize("name", ["llama", "gpt2", "encoder-norm-first", "mlp"])
def test_modules_parameters_and_keys_stay(name):
    model = CASES[name].build()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    buffers, text = [buffer_name for buffer_name, _ in model.named_buffers()], str(model)
    assert bridge.convert(model, DELAYED, inplace=True) is model
    CASES[name].call(model).sum().backward()  # makes quantizer state, which is none of the model's buffers
    assert list(model.state_dict()) == keys
    assert [buffer_name for buffer_name, _ in model.named_buffers()] == buffers
    assert str(model) == text
    for own, module in model.named_modules():
        assert module is modules[own]
        assert type(module).__name__ == swap.base_class(module).__name__
    for own, parameter in model.named_parameters():
        assert parameter is parameters[own]
    bridge.revert(model)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(swap.ATTRIBUTE in module.__dict__ for module in model.modules())


def test_a_deep_copy_is_converted_unless_in_place():
    model = mlp()
    converted = bridge.convert(model)
    assert type(model) is nn.Sequential
    assert converted is not model
    assert not {id(own) for own in model.parameters()} & {id(own) for own in converted.parameters()}


@pytest.mark.parametrize("recipe", [None, DELAYED], ids=["none", "delayed"])
def test_checkpoints_load_both_ways(recipe):
    original, converted = decoder("Llama"), bridge.convert(decoder("Llama"), recipe, inplace=True)
    buffer = io.BytesIO()
    torch.save(converted.state_dict(), buffer)
    buffer.seek(0)
    original.load_state_dict(torch.load(buffer, weights_only=True))
    other = bridge.convert(decoder("Llama"), inplace=True)
    other.load_state_dict(original.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(_logits(other), _logits(original), rtol=1e-4, atol=1e-5)


def test_tied_weights_stay_tied():
    model = decoder("Llama", tie_word_embeddings=True)
    expected = run(model, _logits)
    tied = bridge.convert(model)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    actual = run(tied, _logits)
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(actual.grads[name], expected.grads[name], rtol=1e-4, atol=1e-5)
    low = run(bridge.convert(model, CURRENT), _logits)
    assert snr(expected.grads[name], low.grads[name]) > 14


def test_an_optimizer_made_before_goes_on():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bridge.convert(model, CURRENT, inplace=True)
    before = [own.detach().clone() for own in model.parameters()]
    model(data(2, 8, WIDTH)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(own, old) for own, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
def test_revert_gives_the_behaviour_back_exactly(recipe):
    model = decoder("Gemma")
    expected = run(model, _logits)
    bridge.convert(model, recipe, inplace=True)
    run(model, _logits)
    assert bridge.revert(model) is model
    actual = run(model, _logits)
    assert torch.equal(actual.output, expected.output)
    assert all(torch.equal(actual.grads[own], expected.grads[own]) for own in expected.grads)


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "encoder-norm-last", "decoder-norm-first", "mlp"])
def test_copies_are_converted_and_independent(name, copies):
    model, call = CASES[name].build(), CASES[name].call
    model = bridge.convert(model, DELAYED)
    run(model, call)
    other = copies(model)
    assert str(bridge.conversion_report(other)) == str(bridge.conversion_report(model))
    # the quantizer state was copied too: the next step closes it to the same scales
    first, second = run(model, call), run(other, call)
    assert torch.equal(first.output, second.output)
    assert {id(op) for op in _operations(model)}.isdisjoint({id(op) for op in _operations(other)})
    assert all(source in set(other.modules()) for op in _operations(other) for source in op.sources)
    bridge.revert(other)
    assert not swap.is_converted(other)


def _operations(model):
    return [op for module in model.modules() if swap.is_converted(module) for op in module._functional_te.ops]


def test_whole_models_are_saved_and_loaded():
    model = bridge.convert(gpt2(), CURRENT)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(_logits(model), _logits(loaded))


def test_state_moves_with_the_model_and_stays_float32():
    model = bridge.convert(mlp(), DELAYED)
    model(data(2, 8, WIDTH)).sum().backward()
    scales = [state.scale for op in _operations(model) for _, _, state in op.named_states()]
    assert scales
    model.to(torch.bfloat16)
    assert all(state.scale.dtype is torch.float32 for op in _operations(model) for _, _, state in op.named_states())
    model.to("meta")
    assert all(state.scale.is_meta for op in _operations(model) for _, _, state in op.named_states())


# ------------------------------------------------------------------------------------- the recipe


def test_the_recipe_runs_outside_of_any_autocast_and_gives_way_to_one():
    model = decoder("Llama")
    exact = _logits(model)
    low, high = bridge.convert(model, CURRENT), bridge.convert(model)
    assert snr(exact, _logits(low)) < 60
    with bridge.autocast(enabled=False):
        torch.testing.assert_close(_logits(low), exact, rtol=1e-4, atol=1e-5)
    with bridge.autocast(recipe=CURRENT):
        assert torch.equal(_logits(high), _logits(low))
    # a part that is called alone runs it too
    x = data(2, 4, WIDTH)
    torch.testing.assert_close(high.model.layers[0].mlp(x), model.model.layers[0].mlp(x), rtol=1e-4, atol=1e-5)
    assert snr(model.model.layers[0].mlp(x), low.model.layers[0].mlp(x)) < 60


def test_delayed_scaling_of_the_model_is_that_of_an_autocast_around_it():
    torch.manual_seed(0)
    plain = bridge.convert(decoder("Llama"))
    own = bridge.convert(copy.deepcopy(bridge.revert(copy.deepcopy(plain))), DELAYED)
    for _ in range(3):
        with bridge.autocast(recipe=DELAYED):
            expected = _logits(plain)
        expected.sum().backward()
        actual = _logits(own)
        actual.sum().backward()
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=["none", "current", "delayed"])
def test_gradient_checkpointing_recomputes_the_same(recipe, reentrant):
    model = bridge.convert(decoder("Llama"), recipe)
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=reentrant)
    for _ in range(2):
        expected, actual = run(model, _logits), run(other, _logits)
        assert torch.equal(actual.output, expected.output)
        assert all(torch.equal(actual.grads[name], expected.grads[name]) for name in expected.grads)


def test_features_that_a_recipe_cannot_run_are_left_alone():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    recipe = fte.recipes.MXFP8BlockScaling()
    rows = _rows(bridge.convert(model, recipe))
    assert rows["2"].what == "left alone"
    assert "MXFP8BlockScaling" in rows["2"].why
    assert rows["0"].what == "fused"
    assert bridge.convert(model, recipe)(data(4, 64)).shape == (4, 10)
    assert _rows(bridge.convert(model))["2"].what == "fused"


# ------------------------------------------------------------------------------------------ hooks


def test_hooks_on_parts_of_a_chain_are_called():
    model = bridge.convert(decoder("Llama"), CURRENT)
    fused = _logits(model)
    seen = []
    for name in ("input_layernorm", "mlp.gate_proj", "self_attn.k_proj", "post_attention_layernorm", "mlp"):
        part = model.model.layers[0].get_submodule(name)
        handle = part.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
        assert snr(fused, _logits(model)) > 15
        assert seen == [name]
        handle.remove()
        seen.clear()
    assert torch.equal(_logits(model), fused)


def test_hooks_that_were_there_stay():
    model = decoder("Llama")
    seen = []
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append("layer"))
    _logits(bridge.convert(model, CURRENT, inplace=True))
    assert seen == ["layer", (2, 16, WIDTH)]


def test_hooks_on_the_attention_see_a_normalized_input():
    model = bridge.convert(decoder("Llama"), CURRENT)
    layer, seen = model.model.layers[0], []
    layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    _logits(model)
    torch.testing.assert_close(seen[0].square().mean(-1), torch.ones(2, 16), rtol=0.1, atol=0.1)


def test_outputs_that_the_model_records_are_those_of_its_modules():
    model = decoder("Llama")
    converted = bridge.convert(model)
    low = bridge.convert(model, CURRENT)
    for other, least in ((converted, 90), (low, 15)):
        expected = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
        actual = other(IDS, output_hidden_states=True, use_cache=False).hidden_states
        assert len(expected) == len(actual) == 3
        assert all(snr(one, two) > least for one, two in zip(expected, actual, strict=True))


def test_a_replaced_part_is_used():
    model = bridge.convert(decoder("Llama"), CURRENT)
    layer = model.model.layers[0]

    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 8 * self.inner(x)

    before = _logits(model)
    layer.mlp.down_proj = Scaled(layer.mlp.down_proj)
    assert snr(before, _logits(model)) < 15
    sequence = bridge.convert(mlp(), CURRENT)
    sequence.append(nn.Linear(WIDTH, 8))
    assert sequence(data(2, WIDTH)).shape == (2, 8)


def test_generation_with_a_cache():
    model = decoder("Llama").eval()
    kept = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, **kept)
    assert torch.equal(bridge.convert(model).generate(IDS, **kept), expected)
    low = bridge.convert(model, CURRENT)
    with torch.no_grad():
        whole = low(IDS).logits[:, -1]
        first = low(IDS[:, :-1], use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"  # renamed in 5.2x
        rest = low(IDS[:, -1:], **{name: first[name]}).logits[:, -1]
    assert snr(whole, rest) > 15


def test_active_dropout_draws_the_numbers_it_drew():
    model = gpt2(dropout=0.2)
    encoder = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, 0.2, norm_first=True)
    for original, call in ((model, _logits), (encoder, lambda m: m(data(4, 2, WIDTH)))):
        high, low = bridge.convert(original), bridge.convert(original, CURRENT)
        outputs = []
        for one in (original, high, low):
            torch.manual_seed(5)
            outputs.append(call(one))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
        assert 12 < snr(outputs[0], outputs[2]) < 60


# ------------------------------------------------------------------------------------ the selection


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"include": "0"}, {"0"}),
        ({"include": ["1", "4"]}, {"1", "4"}),
        ({"include": nn.Linear}, {"1", "4", "7"}),
        ({"include": nn.Linear, "exclude": "4"}, {"1", "7"}),
        ({"exclude": lambda name, module: not isinstance(module, nn.LayerNorm) and name != ""}, {"0"}),
    ],
    ids=["pattern", "patterns", "type", "both", "predicate"],
)
def test_include_and_exclude(how, names):
    model = bridge.convert(mlp(), fuse=False, **how)
    assert {row.name for row in bridge.conversion_report(model).rows if row.what == "converted"} == names


def test_what_matches_stands_for_what_is_below():
    model = bridge.convert(decoder("Llama"), exclude=["model.layers.0", "lm_head"])
    rows = _rows(model)
    assert rows["model.layers.0.mlp.up_proj"].why == "excluded"
    assert rows["model.layers.1"].what == "fused"
    assert rows["lm_head"].what == "left alone"
    only = _rows(bridge.convert(decoder("Llama"), include="*.mlp"))
    assert only["model.layers.0.mlp"].what == "fused"
    assert only["model.layers.0.self_attn.q_proj"].why == "not included"


def test_nothing_is_fused_without_fuse():
    model = bridge.convert(decoder("Llama"), CURRENT, fuse=False)
    assert bridge.conversion_report(model).counts["fused"] == 0
    assert 15 < snr(_logits(bridge.revert(copy.deepcopy(model))), _logits(model)) < 60


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"include": "nothing*"}, ValueError, "include: expected patterns of names of modules, got 'nothing"),
        ({"exclude": 3}, TypeError, "exclude: expected name patterns"),
        ({"include": [int]}, TypeError, "include: expected name patterns"),
        ({"fuse": 1}, TypeError, "fuse: expected a bool"),
        ({"inplace": None}, TypeError, "inplace: expected a bool"),
        ({"recipe": "fp8"}, TypeError, "recipe"),
    ],
    ids=["pattern", "kind", "type", "fuse", "inplace", "recipe"],
)
def test_bad_arguments(arguments, kind, message):
    model = mlp()
    with pytest.raises(kind, match=message):
        bridge.convert(model, **arguments)
    assert type(model) is nn.Sequential


# ------------------------------------------------------------------------------- models in a state


def test_a_second_conversion_does_nothing():
    model = bridge.convert(mlp(), CURRENT, inplace=True)
    record = model._functional_te
    assert bridge.convert(model) is model
    assert bridge.convert(model, CURRENT, inplace=True) is model
    assert model._functional_te is record
    with pytest.raises(ValueError, match="Revert it first"):
        bridge.convert(model, DELAYED)


def test_a_converted_part_of_a_model_stays_as_it_is():
    model = nn.Sequential(mlp(), nn.Linear(WIDTH, WIDTH))
    bridge.convert(model[0], CURRENT, inplace=True)
    whole = bridge.convert(model)
    rows = _rows(whole)
    assert rows["1"].what == "converted"
    assert rows["0.1"].why == "converted before"
    assert whole[0]._functional_te.recipe is CURRENT


def test_conversion_while_something_is_captured_is_an_error(dynamo):
    model = mlp()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def traced(x):
        return bridge.convert(model, inplace=True)(x)

    with pytest.raises(Exception, match="models cannot be converted while a compiler traces"):
        traced(data(2, WIDTH))
    with pytest.raises(RuntimeError, match=r"while a torch\.func transform runs"):
        torch.func.grad(lambda x: bridge.convert(model)(x).sum())(data(2, WIDTH))
    assert type(model) is nn.Sequential
    with pytest.raises(TypeError, match="not compiled yet"):
        bridge.convert(torch.compile(model))
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module"):
        bridge.convert(lambda x: x)
    with pytest.raises(ValueError, match="conversion_report"):
        bridge.conversion_report(model)


def test_a_failure_leaves_nothing_half_converted(monkeypatch):
    model = decoder("Llama")
    kinds = [type(module) for module in model.modules()]
    count = 0
    convert_one = plan._set

    def failing(module, record):
        nonlocal count
        count += 1
        if count == 12:
            raise MemoryError
        convert_one(module, record)

    monkeypatch.setattr(plan, "_set", failing)
    with pytest.raises(MemoryError):
        bridge.convert(model, CURRENT, inplace=True)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(swap.is_converted(module) for module in model.modules())


def test_shared_modules_run_in_every_place():
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.LayerNorm(WIDTH), shared), shared)
    expected = run(model, lambda m: m(data(4, WIDTH)))
    converted = bridge.convert(model)
    assert converted[0][0] is converted[1][1] is converted[2]
    actual = run(converted, lambda m: m(data(4, WIDTH)))
    torch.testing.assert_close(actual.output, expected.output, rtol=1e-5, atol=1e-6)
    for name in expected.grads:
        torch.testing.assert_close(actual.grads[name], expected.grads[name], rtol=1e-4, atol=1e-5)
    for _ in range(2):
        low = run(bridge.convert(model, DELAYED), lambda m: m(data(4, WIDTH)))
    assert snr(expected.output, low.output) > 15
    # excluded under one of its names is excluded
    assert not swap.is_converted(bridge.convert(model, exclude="1.1")[2])


def test_look_alikes_are_left_alone():
    class Patched(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    class LlamaMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(32, 32) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.gate_proj(x) - self.up_proj(x))

    model = nn.ModuleDict({"patched": Patched(32, 32), "mlp": LlamaMLP(), "own": nn.Linear(32, 32)})
    model["own"].forward = lambda x: x
    model["embedding"] = nn.Embedding(4, 32)
    converted = bridge.convert(model, CURRENT, inplace=True)
    rows = _rows(converted)
    assert rows["patched"].why == "a subclass of Linear with a forward of its own"
    assert "mlp" not in rows  # without parameters or rule of its own
    assert rows["mlp.gate_proj"].what == "converted"
    assert rows["own"].why == "its forward was replaced on the instance"
    assert rows["embedding"].why == "no operation for Embedding"


def test_parametrizations():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    nn.utils.parametrizations.weight_norm(model[0])
    x = data(4, 32)
    expected = run(model, lambda m: m(x))
    actual = run(bridge.convert(model), lambda m: m(x))
    torch.testing.assert_close(actual.output, expected.output)
    for name in expected.grads:
        torch.testing.assert_close(actual.grads[name], expected.grads[name], rtol=1e-4, atol=1e-5)
    late = bridge.convert(nn.Linear(32, 32), CURRENT)
    nn.utils.parametrizations.weight_norm(late)
    late(x).sum().backward()
    assert late.parametrizations.weight.original1.grad is not None
    with pytest.raises(RuntimeError, match="First undo"):
        bridge.revert(late)
    nn.utils.parametrize.remove_parametrizations(late, "weight")
    assert type(bridge.revert(late)) is nn.Linear


def test_norms_without_parameters_and_with_odd_ones():
    model = nn.ModuleList(
        [
            nn.LayerNorm(16, bias=False),
            nn.RMSNorm(16),
            nn.LayerNorm(16, elementwise_affine=False),
            nn.RMSNorm((4, 16), eps=1e-3),
            nn.GELU(),
        ]
    )
    converted = bridge.convert(model)
    rows = _rows(converted)
    assert [rows[str(i)].what for i in range(5)] == ["converted", "converted", "left alone", "converted", "converted"]
    for dtype in (torch.float32, torch.bfloat16):
        x = data(2, 4, 16).to(dtype)
        for one, two in zip(model.to(dtype), converted.to(dtype), strict=True):
            rtol = 1e-5 if dtype is torch.float32 else 1.6e-2
            torch.testing.assert_close(two(x), one(x), rtol=rtol, atol=1e-6)


# ------------------------------------------------------------------------------------------ report


def test_the_report_as_text_html_and_values():
    model = bridge.convert(gpt2())
    report = bridge.conversion_report(model)
    values = report.to_dict()
    assert values["counts"] == report.counts == {"converted": 4, "fused": 18, "left alone": 2}
    assert len(values["rows"]) == len(report.rows) == sum(report.counts.values())
    row = next(row for row in report.rows if row.name == "transformer.h.1.mlp")
    assert (row.module, row.what, row.rule) == ("GPT2MLP", "fused", "mlp")
    text = str(report).splitlines()
    assert len(text) == len(report.rows) + 3
    assert text[-1] == "4 converted, 18 fused, 2 left alone"
    page = report._repr_html_()
    assert page.count("<tr>") == len(report.rows) + 1
    assert "<td>transformer.h.1.mlp</td>" in page


def test_conversion_draws_no_random_numbers():
    model = decoder("Llama")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    bridge.convert(model, DELAYED)
    assert torch.equal(torch.rand(3), expected)
    assert not any(isinstance(module, BasicOperation) for module in model.modules())
