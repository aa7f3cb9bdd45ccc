"""A Hugging Face Llama trains converted as it does unconverted: the same curve in high precision, nearly so in FP8."""

import pytest
import torch

import bridge
from bridge.demo.data import VOCABULARY, load_corpus
from bridge.demo.settings import Settings
from tests.convert.models import CURRENT, DELAYED, transformers

CONTEXT = 64


def _model(width, layers):
    library = transformers()
    config = library.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    torch.manual_seed(0)
    return library.LlamaForCausalLM(config)


def train(model, steps, batch):
    """Losses of training on the demo's text with AdamW; every call sees the same windows."""
    corpus = load_corpus(Settings(context=CONTEXT))
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        tokens = corpus.sample(batch, CONTEXT, generator)[:, :-1]
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def _curves(width, layers, steps, batch):
    original = train(_model(width, layers), steps, batch)
    curves = {"original": original}
    for name, recipe in (("high precision", None), ("delayed", DELAYED), ("current", CURRENT)):
        converted = bridge.convert(_model(width, layers), recipe, exclude="lm_head", inplace=True)
        curves[name] = train(converted, steps, batch)
    return curves


def _check(curves, fp8):
    original = curves["original"]
    torch.testing.assert_close(curves["high precision"], original, rtol=2e-3, atol=0)
    assert original[-1] < original[0] - 0.2
    for name in ("delayed", "current"):
        assert not torch.equal(curves[name], original)
        assert (curves[name][-5:].mean() - original[-5:].mean()).abs() < fp8 * original[-5:].mean()


def test_a_few_steps():
    _check(_curves(64, 1, 10, 2), 0.02)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_steps_of_ten_million_parameters(capsys):
    count = sum(own.numel() for own in _model(256, 10).parameters())
    assert 9e6 < count < 11e6
    curves = _curves(256, 10, 100, 4)
    with capsys.disabled():
        ends = {name: round(float(curve[-5:].mean()), 4) for name, curve in curves.items()}
        print(f"\n{count / 1e6:.1f}M parameters, mean loss of the last 5 of 100 steps: {ends}")
    _check(curves, 0.06)
