"""Python source of what a traced call does around its recorded functions, every number and name written out.

A compiler that traces a loop over the ops of a chain, a split string or a slice with a computed bound interprets every
instruction, for every chain and every compilation. What is the same for every call of a kind is written into
straight-line code instead, when the first call of that kind is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["call_source", "define", "parameters_source", "state_source"]


def define(source: str, module: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run ``source`` and give what it defines.

    Args:
        source: definitions of functions.
        module: the module that has everything under ``names``, where a compiler's guards look it up.
        names: what the functions refer to.
    """
    namespace = {**names, "__name__": module}
    exec(compile(source, "<functional_te glue>", "exec"), namespace)
    return namespace


def _items(name: str, places: Iterable[int]) -> str:
    return "".join(f"{name}[{place}], " for place in places)


def call_source(made: Any, name: str) -> str:
    """Functions around those of a recording (:class:`bridge.recording.Recording`) called ``name``.

    ``run`` takes the distinct arguments and the entries of the state, and gives the outputs and the forward's amaxes.
    ``enter`` and ``leave`` are the two halves of an autograd function over the distinct arguments, what ``begin``
    gives, and the entries that the backward writes. ``fold`` takes the entries and the amaxes. ``places`` gives which
    entries those amaxes belong to.
    """
    returned = made.outputs + made.observes
    forward = [2 * place + part for place in made.forward for part in (0, 1)]
    backward = [2 * place + part for place in made.backward for part in (0, 1)]
    if "begin" in made.functions:
        begun = f"_functions.{name}_begin({_items('entries', forward)})"
    else:
        begun = f"({_items('entries', forward[::2])})"
    if made.differentiable:
        call = f'ProgramFunction.apply("{name}", *unique, *begun, {_items("entries", backward)})'
    else:
        call = f"_functions.{name}_forward(*unique, *begun)"
    whole = made.differentiable and returned == 1
    outputs = "made" if whole else _items("made", range(made.outputs))
    amaxes = _items("made", range(made.outputs, returned))
    own = made.arguments + made.begun
    lines = [
        "def run(unique, entries):",
        f"    begun = {begun}",
        f"    made = {call}",
        f"    return [{outputs}], [{amaxes}]",
        "def places():",
        f"    return {list(made.forward)}",
        "def fold(entries, amaxes):",
        f"    _functions.{name}_amaxes({_items('entries', forward[1::2])}*amaxes)" if made.observes else "    return",
    ]
    if made.differentiable:
        nones = "None, " * (made.begun + len(backward))
        lines += [
            "def enter(ctx, tensors):",
            f"    made = _functions.{name}_forward(*tensors[:{own}])",
            f"    ctx.save_for_backward(*made[{returned}:])",
            f"    ctx.entries = tensors[{own}:]",
            f"    ctx.mark_non_differentiable({amaxes})" if made.observes else "    pass",
            "    return made[0]" if whole else f"    return ({_items('made', range(returned))})",
            "def leave(ctx, grads):",
            f"    made = _functions.{name}_backward(*ctx.saved_tensors, *ctx.entries, *grads[:{made.outputs}])",
            f"    return (None, *made, {nones})",
        ]
    return "\n".join(lines)


def parameters_source(slots: Sequence[tuple[int, str]], count: int) -> str:
    """``parameters(modules)`` and ``bundles(parameters)``: a chain's parameters (index of the op, name), and by op.

    Args:
        slots: index of the op and name of every parameter.
        count: number of ops.
    """
    lines = ["def parameters(modules):", "    found = []"]
    for index, name in slots:
        lines += [
            f"    own = modules[{index}]._parameters",
            # an operation whose parameters are another module's, or made of them, has them as attributes
            f"    found.append(own[{name!r}] if {name!r} in own else _attribute(modules[{index}], {name!r}))",
        ]
    lines += ["    return found", "def bundles(parameters):"]
    bundles = [""] * count
    for place, (index, name) in enumerate(slots):
        bundles[index] += f"{name!r}: parameters[{place}], "
    found = "".join(f"{{{own}}}, " for own in bundles)
    return "\n".join([*lines, f"    return ({found})"])


def state_source(
    keys: Sequence[str], places: Sequence[tuple[int, str, str]], kinds: Sequence[tuple[Sequence[Any], Any]]
) -> str:
    """``stateful(modules)``, ``state(modules, make)`` and ``fits(entries)``: modules with state, and entries of it.

    The second function gives what casts read and the amax history of every entry; ``make`` makes the state of the op of
    an index whose module has another one. The third says whether the entries are as modules make them.

    Args:
        keys: of every op, what ``_state_key`` of its module is if it has that state.
        places: index of the op, role, and field that casts read, of every entry.
        kinds: sizes and dtype of what casts read and of the history of every entry.
    """
    owners = sorted({index for index, _, _ in places})
    lines = ["def stateful(modules):", f"    return [{_items('modules', owners)}]", "def state(modules, make):"]
    for index in owners:
        own = [(role, field) for owner, role, field in places if owner == index]
        held = "".join(f"own[{f'{role}_{field}'!r}], own[{f'{role}_amax_history'!r}], " for role, field in own)
        made = "".join(f"own[{role!r}].read, own[{role!r}].amax_history, " for role, _ in own)
        lines += [
            f"    if modules[{index}]._state_key == {keys[index]!r}:",
            f"        own = modules[{index}]._buffers",
            f"        of_{index} = [{held}]",
            "    else:",
            f"        own = make({index})",
            f"        of_{index} = [{made}]",
        ]
    lines += [f"    return [{''.join(f'*of_{index}, ' for index in owners)}]", "def fits(entries):"]
    lines += ["    device = entries[0].device"] if kinds else []
    for place, (sizes, dtype) in enumerate(kinds):
        wanted = [f"own.dim() != {len(sizes)}", *(f"own.shape[{axis}] != {size}" for axis, size in enumerate(sizes))]
        lines += [
            f"    own = entries[{place}]",
            f"    if {' or '.join(wanted)} or own.dtype is not {dtype} or own.device != device:",
            "        return False",
        ]
    return "\n".join([*lines, "    return True"])
