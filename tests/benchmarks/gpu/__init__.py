"""Training speed and memory on a GPU, beside PyTorch, torchao and Transformer Engine. Start with ``run.py``."""
