"""Tiny models with random weights, each with a call that gives one tensor; and comparisons of runs."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import functional_te as fte

DELAYED = fte.recipes.DelayedScaling(amax_history_len=4)
CURRENT = fte.recipes.Float8CurrentScaling()
WIDTH, HIDDEN, VOCABULARY, TOKENS = 64, 128, 64, 16


class Case(NamedTuple):
    """A model.

    Attributes:
        build: makes the model, in training mode and without active dropout.
        call: runs it.
    """

    build: Callable[[], nn.Module]
    call: Callable[[Any], Tensor]


def transformers() -> Any:
    """The library, or a skipped test."""
    return pytest.importorskip("transformers", reason="needs transformers (the `dev` extra)")


IDS = torch.randint(1, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def decoder(family: str, **options: Any) -> nn.Module:
    """A Hugging Face decoder of a family with RMSNorms and a gated MLP."""
    library = transformers()
    config = getattr(library, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=options.pop("num_hidden_layers", 2),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return getattr(library, f"{family}ForCausalLM")(config).train()


def gpt2(dropout: float = 0.0) -> nn.Module:
    library = transformers()
    config = library.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
    )
    return library.GPT2LMHeadModel(config).train()


def _sizes(act: str) -> dict[str, Any]:
    names = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": HIDDEN}
    return {**names, "hidden_act": act, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(act: str = "gelu") -> nn.Module:
    library = transformers()
    config = library.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **_sizes(act))
    return library.BertModel(config).train()


def vit(act: str = "gelu") -> nn.Module:
    library = transformers()
    return library.ViTModel(library.ViTConfig(image_size=32, patch_size=8, **_sizes(act))).train()


def encoder(norm_first: bool, activation: Any, batch_first: bool = True, dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, HIDDEN, dropout, activation, batch_first=batch_first, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def torch_decoder(norm_first: bool) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, HIDDEN, 0.0, norm_first=norm_first), 2)


def mlp() -> nn.Module:
    """The shape of torchvision's MLP heads: runs of linears, norms and activations with dropout between them."""
    return nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(0.0),
        nn.Linear(HIDDEN, HIDDEN, bias=False),
        nn.SiLU(),
        nn.RMSNorm(HIDDEN, eps=1e-6),
        nn.Linear(HIDDEN, WIDTH),
        nn.GELU(approximate="tanh"),
    )


# made before anything is traced
_PIXELS, _FEATURES, _MEMORY = data(2, 3, 32, 32), data(2, TOKENS, WIDTH), data(12, 2, WIDTH)


def _lm(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits


def _hidden(model: Any) -> Tensor:
    return model(IDS).last_hidden_state


def _image(model: Any) -> Tensor:
    return model(_PIXELS.to(next(model.parameters()).dtype)).last_hidden_state


def _sequence(model: Any) -> Tensor:
    return model(_FEATURES.to(next(model.parameters()).dtype))


def _two_sequences(model: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(_FEATURES.transpose(0, 1).to(dtype), _MEMORY.to(dtype))


CASES = {
    "llama": Case(lambda: decoder("Llama"), _lm),
    "mistral": Case(lambda: decoder("Mistral"), _lm),
    "qwen2": Case(lambda: decoder("Qwen2"), _lm),
    "qwen3": Case(lambda: decoder("Qwen3"), _lm),
    "gemma": Case(lambda: decoder("Gemma"), _lm),
    "gpt2": Case(gpt2, _lm),
    "bert": Case(bert, _hidden),
    "vit": Case(vit, _image),
    "vit-tanh": Case(lambda: vit("gelu_pytorch_tanh"), _image),
    "encoder-norm-first": Case(lambda: encoder(True, "relu"), _sequence),
    "bert-relu": Case(lambda: bert("relu"), _hidden),
    "encoder-norm-last": Case(lambda: encoder(False, "gelu", batch_first=False), _sequence),
    "encoder-gelu-module": Case(lambda: encoder(True, nn.GELU()), _sequence),
    "decoder-norm-first": Case(lambda: torch_decoder(True), _two_sequences),
    "decoder-norm-last": Case(lambda: torch_decoder(False), _two_sequences),
    "mlp": Case(mlp, _sequence),
}


def moved(model: nn.Module) -> nn.Module:
    """The model with no parameter at its initial value."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for own in model.parameters():
            own.add_(0.02 * torch.randn(own.shape, generator=generator))
    return model


class Run(NamedTuple):
    """Output and gradients by name of one forward and backward."""

    output: Tensor
    grads: dict[str, Tensor]


def run(model: Any, call: Callable[[Any], Tensor]) -> Run:
    """One forward and backward from fixed gradients of the output."""
    model.zero_grad()
    output = call(model)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    output.backward(grad.to(output))
    grads = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    return Run(output.detach(), grads)


def snr(expected: Tensor, actual: Tensor) -> float:
    """Signal to noise in dB."""
    expected, actual = expected.detach(), actual.detach()
    noise = (expected - actual).double().square().sum().clamp_min(1e-30)
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def copy_of(model: Any) -> Any:
    return copy.deepcopy(model)
