"""Quantized tensors of other libraries. Each library is imported only when a function needs it.

``torchao`` and ``transformer_engine`` convert in both directions; ``export`` makes quantized tensors and states inputs
and outputs of ``torch.export`` and nodes of PyTorch's own pytrees. ``te_state_dict`` writes checkpoints for te.ops,
``onnx`` models in standard operators.
"""

from bridge.interop.export import register_pytrees
from bridge.interop.onnx import to_onnx
from bridge.interop.te_state_dict import te_state_dict
from bridge.interop.torchao import from_torchao, to_torchao
from bridge.interop.transformer_engine import from_transformer_engine, to_transformer_engine

__all__ = [
    "from_torchao",
    "from_transformer_engine",
    "register_pytrees",
    "te_state_dict",
    "to_onnx",
    "to_torchao",
    "to_transformer_engine",
]
