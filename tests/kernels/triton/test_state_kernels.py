"""Closing a step of delayed scaling in place, bit for bit as the pure functions of the state do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from functional_te.quantization.quantizers import Float8DelayedScalingQuantizer
from functional_te.quantization.state import DelayedScalingState, update_amax, update_scale

from .casting import E4M3, E5M2, bits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

SPECIAL = (0.0, math.nan, math.inf, 1e-45, 1e-40, 3e38)


def close_step(*args, **kwargs):
    from functional_te.kernels.triton import state

    return state.close_step(*args, **kwargs)


def histories(count: int, length: int, seed: int) -> list[Tensor]:
    """Random magnitudes, some zero; observation slots that are empty, used and special."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        history = torch.rand(length, generator=generator) * 10 ** float(index - 2)
        history[torch.rand(length, generator=generator) < 0.3] = 0.0
        if index % 3 == 0:
            history[0] = 0.0
        if index % 4 == 1 and length > 1:
            history[1 + index % (length - 1)] = SPECIAL[index % len(SPECIAL)]
        made.append(history)
    return made


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 16, 1024, 1030])
def test_equals_the_pure_functions(length: int, algorithm: str, closes: bool, device: str) -> None:
    count, margin = (11, 2) if length < 1024 else (3, -1)
    generator = torch.Generator().manual_seed(length)
    quantizers = [
        Float8DelayedScalingQuantizer(
            E5M2 if index % 2 else E4M3, margin=margin, amax_history_len=length, amax_compute_algo=algorithm
        )
        for index in range(count)
    ]
    mine = [history.to(device) for history in histories(count, length, 5)]
    scales = [torch.rand(1, generator=generator).to(device) + 0.1 for _ in range(count)]
    states = [DelayedScalingState(scale=s.clone(), amax_history=h.clone()) for s, h in zip(scales, mine, strict=True)]
    for step in range(4):
        amaxes: list[Tensor | None] = []
        for index in range(count):
            amax = torch.rand(1, generator=generator) * 100
            if (index + step) % 4 == 2:
                amax[0] = SPECIAL[(index + step) % len(SPECIAL)]
            amaxes.append(None if (index + step) % 5 == 3 else amax.to(device))
        close_step(
            scales,
            mine,
            amaxes,
            limit=[quantizer.limit for quantizer in quantizers],
            margin=margin,
            algorithm=algorithm,
            closes=closes,
        )
        for index, (quantizer, amax) in enumerate(zip(quantizers, amaxes, strict=True)):
            states[index] = states[index] if amax is None else update_amax(states[index], amax)
            states[index] = update_scale(quantizer, states[index]) if closes else states[index]
            assert torch.equal(bits(scales[index]), bits(states[index].scale))
            assert torch.equal(bits(mine[index]), bits(states[index].amax_history))


def test_lengths_may_differ(device: str) -> None:
    own = [torch.full((length,), float(length), device=device) for length in (3, 1, 3, 7)]
    scales = [torch.ones(1, device=device) for _ in own]
    close_step(scales, own, [None] * 4, limit=[448.0, 448.0, 57344.0, 448.0])
    assert [scale.item() for scale in scales] == [pytest.approx(x) for x in (448 / 3, 448.0, 57344 / 3, 64.0)]
    assert [history.tolist() for history in own] == [[0, 3, 3], [0], [0, 3, 3], [0, 7, 7, 7, 7, 7, 7]]


@pytest.mark.parametrize("count", [3, 11])
def test_copies_before_and_after_and_zeros(count: int, device: str) -> None:
    from functional_te.kernels.triton.state import copies

    how = dict(limit=[448.0] * count)
    for keeps in ("old", "new"):
        scales = [torch.full((1,), 1.0 + index, device=device) for index in range(count)]
        own = [torch.full((5,), float(index), device=device) for index in range(count)]  # the first observed nothing
        before = torch.cat(scales)
        made = close_step(scales, own, [None] * count, **how, keeps=keeps, blanks=True)
        assert torch.equal(torch.cat(made[:count]), before if keeps == "old" else torch.cat(scales))
        assert not torch.equal(torch.cat(scales), before)
        assert [zero.tolist() for zero in made[count:]] == [[0.0]] * count
        assert len({zero.untyped_storage().data_ptr() for zero in made}) >= count  # zeros are written to one by one
    assert torch.equal(torch.cat(copies(scales)), torch.cat(scales))
    made = copies(scales, True)
    assert torch.equal(torch.cat(made[:count]), torch.cat(scales))
    assert [zero.tolist() for zero in made[count:]] == [[0.0]] * count


def test_nothing_to_do(device: str) -> None:
    close_step([], [], [], limit=[])
    scale, history = torch.ones(1, device=device), torch.ones(4, device=device)
    close_step([scale], [history], [None], limit=[448.0], closes=False)
    assert scale.item() == 1
    assert history.tolist() == [1, 1, 1, 1]


def test_bad_arguments(device: str) -> None:
    one = [torch.ones(1, device=device)]
    with pytest.raises(ValueError, match="close_step: algorithm: expected 'max' or 'most_recent', got 'mean'"):
        close_step(one, one, one, limit=[448.0], algorithm="mean")
    with pytest.raises(ValueError, match="close_step: keeps: expected '', 'old' or 'new', got True"):
        close_step(one, one, [None], limit=[448.0], keeps=True)
    for wrong in (dict(amaxes=one, keeps="old"), dict(amaxes=[None])):
        with pytest.raises(ValueError, match="close_step: blanks: expected keeps and no amaxes"):
            close_step(one, one, limit=[448.0], blanks=True, **wrong)
    with pytest.raises(ValueError, match="close_step: limit: expected one for each of 1 scales, got 0"):
        close_step(one, one, one, limit=[])
    from functional_te.kernels.triton.state import Closing

    with pytest.raises(ValueError, match="Closing: algorithm: expected 'max' or 'most_recent', got 'mean'"):
        Closing(one, one, limit=[448.0], algorithm="mean")
    with pytest.raises(ValueError, match="Closing: histories: expected one for each of 1 scales, got 0"):
        Closing(one, [], limit=[448.0])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_many_close_at_once_by_their_addresses(algorithm: str, device: str) -> None:
    from functional_te.kernels.triton.state import Closing

    lengths = [1, 2, 3, 16, 1024, 1030] * 5
    quantizers = [
        Float8DelayedScalingQuantizer(
            E5M2 if index % 2 else E4M3, margin=index % 4 - 1, amax_history_len=length, amax_compute_algo=algorithm
        )
        for index, length in enumerate(lengths)
    ]
    mine = [histories(index + 1, length, index)[index].to(device) for index, length in enumerate(lengths)]
    scales = [torch.full((1,), 0.1 + index, device=device) for index in range(len(lengths))]
    states = [DelayedScalingState(scale=s.clone(), amax_history=h.clone()) for s, h in zip(scales, mine, strict=True)]
    close = Closing(scales, mine, limit=[own.limit * 2.0**-own.margin for own in quantizers], algorithm=algorithm)
    for step in range(3):
        before = torch.cat(scales)
        kept = close()
        assert torch.equal(bits(torch.cat(kept)), bits(before))
        for index, quantizer in enumerate(quantizers):
            states[index] = update_scale(quantizer, states[index])
            assert torch.equal(bits(scales[index]), bits(states[index].scale)), (step, lengths[index])
            assert torch.equal(bits(mine[index]), bits(states[index].amax_history)), (step, lengths[index])
            observed = SPECIAL[(index + step) % len(SPECIAL)] if index % 5 == 0 else float(index % 3 * (step + 1))
            for history in (mine[index], states[index].amax_history):
                history[0] = observed
