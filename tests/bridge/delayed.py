"""Transformer Engine's rule of delayed scaling, simulated number by number in float32; a small model and its data."""

import numpy
import torch

from bridge import ops

SIZE = 16

E4M3_MAX, E5M2_MAX = numpy.float32(448), numpy.float32(57344)


class Rule:
    """One quantizer: what it multiplies with, and what it remembers (slot 0 is the running step)."""

    def __init__(self, limit, length=4, margin=0, algorithm="max"):
        self.limit, self.margin, self.algorithm = limit, margin, algorithm
        self.scale, self.history = numpy.float32(1), numpy.zeros(length, dtype=numpy.float32)

    def observe(self, amax):
        self.history[0] = max(self.history[0], numpy.float32(amax))

    def close(self):
        """The end of a step. A quantizer that saw nothing but zeros is left alone."""
        if self.history[0] == 0:
            return
        amax = self.history.max() if self.algorithm == "max" else self.history[0]
        self.scale = self.limit / amax * numpy.float32(2.0**-self.margin)
        self.history = numpy.roll(self.history, -1)
        self.history[0] = 0

    def resize(self, length):
        """Another history length: cut at the end, or padded with zeros there."""
        resized = numpy.zeros(length, dtype=numpy.float32)
        kept = min(length, len(self.history))
        resized[:kept] = self.history[:kept]
        self.history = resized


class LinearRules:
    """The three quantizers of a linear layer."""

    ROLES = ("input", "weight", "grad_output")

    def __init__(self, grad_limit=E5M2_MAX, **settings):
        self.rules = {role: Rule(grad_limit if role == "grad_output" else E4M3_MAX, **settings) for role in self.ROLES}

    def observe(self, **amaxes):
        for role, amax in amaxes.items():
            self.rules[role].observe(amax)

    def close(self, *roles):
        for role in roles or self.ROLES:
            self.rules[role].close()

    def resize(self, length):
        for rule in self.rules.values():
            rule.resize(length)

    def check(self, module):
        """Assert that the module's buffers are these, bit for bit."""
        for role, rule in self.rules.items():
            assert getattr(module, f"{role}_scale").numpy().tolist() == [rule.scale], role
            assert getattr(module, f"{role}_amax_history").numpy().tolist() == rule.history.tolist(), role


def state_of(model):
    """Copies of all quantizer state, by buffer name."""
    return {
        name: b.detach().clone()
        for name, b in sorted(model.named_buffers())
        if name.endswith(("scale", "amax_history"))
    }


def with_amax(amax, seed):
    """A matrix whose largest magnitude is exactly ``amax``."""
    values = 2 * torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) - 1
    values = values * amax * 0.75
    values[seed % SIZE, 3] = -amax
    return values


def mlp(seed=0):
    torch.manual_seed(seed)
    return ops.Sequential(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE, bias=False))


def inputs_of(step):
    return with_amax(1.0 + 2 * step, step).requires_grad_(), with_amax(0.5 + step, step + 50)
