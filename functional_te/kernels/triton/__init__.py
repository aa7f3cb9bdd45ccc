"""The Triton backend: this project's fused kernels, and PyTorch's FP8 matrix products.

``record`` holds what it gives to ops. ``tile`` is how every kernel ends, ``sizes`` the table of tiles, ``launch`` how
kernels are called eagerly and while a compiler traces.
"""
