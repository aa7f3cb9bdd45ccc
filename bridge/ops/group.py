"""Groups: consecutive modules that run as one chain, with the parameters and quantizer state of their ops."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from bridge.autograd import run
from bridge.compat import in_backward, mark_static
from bridge.glue import define, parameters_source, state_source
from bridge.main_grad import MainGrad, check_one_dtype, main_grad_of, overwriting_once
from bridge.ops.fusions import FusionCache, registered
from bridge.ops.layout import Layout
from bridge.program import MISFIT, as_made, fold, kinds_of, run_program, states
from bridge.recipe_context import (
    active_recipe,
    close_captured,
    close_in_graph,
    closed_steps,
    closes_in_graph,
    reads_weight_casts,
    steps_to_close,
)
from bridge.recording import kinds_as_made
from bridge.state import fold_amaxes_
from bridge.weight_cache import cached_params, modules_by_serial
from functional_te import pytree
from functional_te._value import Table, value_of
from functional_te.chain import Chain
from functional_te.fuser import default_fusions
from functional_te.fuser.plan import plan as make_plan
from functional_te.quantization.quantizer import Quantizer
from functional_te.recipes import Recipe

if TYPE_CHECKING:
    from bridge.ops.operation import BasicOperation

__all__ = ["Group", "StateRoles", "modules_by_serial", "state_key", "state_roles"]

StateRoles = tuple[tuple[str, Quantizer], ...]

# states made while a graph was traced
_made = Table()
# functions that read parameters and states, by chain and recipe
_readers = Table()


def state_key(roles: StateRoles) -> str:
    """What tells states of different roles and quantizers apart, as a string: cheap to guard."""
    return " ".join(f"{role}:{quantizer.uid}" for role, quantizer in roles)


def state_roles(block: Chain, recipe: Recipe) -> tuple[StateRoles, ...]:
    """For every op of a chain, the (role, quantizer) pairs that have state under ``recipe``."""
    return make_plan(block, recipe=recipe).state_roles


@torch.compiler.assume_constant_result
def _parameters_reader(block: str) -> str:
    """The name of the functions that read the parameters of a chain (by uid) from its modules."""
    name = f"parameters_{block}"
    if not hasattr(_readers, f"{name}_list"):
        slots = [(index, own) for index, op in enumerate(value_of(block).ops) for own in op.param_names]
        made = define(parameters_source(slots, len(value_of(block))), __name__, {"_attribute": _attribute})
        setattr(_readers, f"{name}_bundles", made["bundles"])
        setattr(_readers, f"{name}_list", made["parameters"])
    return name


@torch.compiler.assume_constant_result
def _state_reader(block: str, recipe: str) -> str:
    """The name of the functions that read a chain's state under a recipe (by uids) from its modules.

    :data:`MISFIT` for a recipe that does not fit.
    """
    name = f"state_{block}_{recipe}"
    if not hasattr(_readers, f"{name}_fits"):
        text = states(block, recipe)
        if text == MISFIT:
            return MISFIT
        triples = [place.split(":") for place in text.split()]
        places = [(int(index), role, field) for index, role, field in triples]
        plan = make_plan(value_of(block), recipe=value_of(recipe))
        kinds = [(kind.sizes, kind.dtype) for kind in kinds_as_made(plan, ("meta", None))]
        made = define(state_source(list(map(state_key, plan.state_roles)), places, kinds), __name__, {"torch": torch})
        for part in ("state", "stateful", "fits"):
            setattr(_readers, f"{name}_{part}", made[part])
    return name


class _StateMaker:
    """Makes the state of the op of an index, while a caller is traced, for a module that has another one."""

    def __init__(self, modules: Any, block: str, recipe: str) -> None:
        self.modules, self.block, self.recipe = modules, block, recipe

    def __call__(self, index: int) -> Any:
        return getattr(_made, _make_state(f"{self.modules[index]._serial}/{self.block}/{self.recipe}/{index}"))


@torch.compiler.assume_constant_result
def _make_state(names: str) -> str:
    """Make a module's state, for real, while a caller is traced: a graph must not create what outlives it.

    Args:
        names: ``module/chain/recipe/index``: the module's serial, two uids, and the op's index in the chain.

    Returns:
        The name of the state in the table.
    """
    serial, block, recipe, index = names.split("/")
    roles = make_plan(value_of(block), recipe=value_of(recipe)).state_roles[int(index)]
    module = modules_by_serial[serial]
    module.ensure_state(roles)
    states = module.states(roles)
    for tensor in pytree.leaves(states):
        mark_static(tensor)
    key = f"state_{serial}"
    setattr(_made, key, states)
    return key


class Group(Layout):
    """Consecutive ops of a container, run as one chain.

    Attributes:
        modules: the basic ops.
        block: their chain.
        eager_block: the chain that eager code runs: with the hooks of ops that have both hooks and a functional op.
        evaluation_block: the chain with what runs in evaluation mode.
        prepared: whether every parameter has storage, as far as the first eager call can give it.
        ran: whether it was called in eager mode, which fixes the channels of its ops. (A compiled call is compiled
            again when a channel changes.)
    """

    def __init__(self, modules: list[BasicOperation]) -> None:
        self.modules = modules
        self.ran = self.prepared = False
        self.last_call = None
        for module in modules:
            module.refresh_op()
        self.block = Chain(tuple(module.compiled_op for module in modules))
        self.eager_block = Chain(tuple(module.eager_op for module in modules))
        self.custom_fusions = FusionCache(modules)
        self.num_extra_inputs = self.block.num_extra_inputs
        self.quantized = [m for m in modules if m.op.forward_quantizers or m.op.backward_quantizers]
        self.switching = [m for m in modules if m.evaluation_op is not m.op]
        self.evaluation_block = Chain(tuple(m.evaluation_op for m in modules)) if self.switching else self.block
        self.taking_over = [(i, module) for i, module in enumerate(modules) if module.may_take_over]
        self.accumulating = [(i, module) for i, module in enumerate(modules) if module.accumulate_into_main_grad]
        self.providers = [(index, module) for index, module in enumerate(modules) if module.provides_kwargs]
        # nothing is asked of the modules but their parameters and state
        self.plain = len(set(modules)) == len(modules) and not (
            self.switching or self.taking_over or self.accumulating or self.providers
        )

    def __call__(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: Any = None) -> list[torch.Tensor]:
        compiling, read = torch.compiler.is_compiling(), None
        if torch.compiler.is_dynamo_compiling() and self.plain and not kwargs:
            outputs, read = self._recorded(x, extra_inputs)
            if outputs is not None:
                return outputs
        if not compiling and not self.prepared:
            self._prepare(x)
        evaluates = len(self.switching) > 0 and not any(module.training for module in self.switching)
        if evaluates and kwargs:  # what runs in evaluation mode takes none
            evaluates = all(module.evaluation_op is module.op for module in map(self.modules.__getitem__, kwargs))
        block = self.evaluation_block if evaluates else self.block if compiling else self.eager_block
        if self.providers:
            kwargs = self._with_provided(kwargs or {}, x, evaluates)
        recipe = self._recipe()
        fusions = self.fusions(block, recipe)
        takeovers = None
        if self.taking_over:
            kwargs, fusions, takeovers = self._takeovers(kwargs, fusions)
        if not compiling:
            self.remember_call(recipe, x, extra_inputs)
        main_grads = self._main_grads()
        options = {"fusions": fusions, "main_grads": main_grads, "takeovers": takeovers}
        if recipe is None:
            params = self._all_params(None, read)
            return run(block, params, x, extra_inputs, None, None, kwargs, **options)[0]
        state = self._state(recipe)
        casts = recipe if reads_weight_casts() else None
        params = self._all_params(casts, read)
        reads = state
        if not compiling and self.quantized:
            reads = self._recomputed(state) if in_backward() else self._started(state)
        observes = torch.is_grad_enabled() and reads is state
        # a recomputation may be stopped before what it observed is folded in
        options["in_place"] = observes and not compiling and not in_backward()
        outputs, amaxes = run(
            block, params, x, extra_inputs, reads, recipe, kwargs, closes=closes_in_graph(), **options
        )
        if amaxes and observes:
            self._observe(state, amaxes)
        return outputs

    def _observe(self, state: Any, amaxes: Any) -> None:
        """Fold what a forward that is no recomputation observed into the state."""
        fold_amaxes_(state, amaxes)
        if not torch.compiler.is_compiling() and not in_backward():
            for module in self.quantized:
                vars(module)["observed"] = True  # past torch.nn.Module, which looks for it among parameters first

    def _recorded(self, x: Any, extra_inputs: tuple[Any, ...]) -> tuple[list[torch.Tensor] | None, Any]:
        """A traced call by recorded functions (:mod:`bridge.program`), or None; and the parameters if they were read.

        Reads as little as it can.
        """
        if registered.version or reads_weight_casts() or not isinstance(x, torch.Tensor):
            return None, None
        if x.device.type == "meta" or torch.is_autocast_enabled(x.device.type):
            return None, None
        recipe, block, modules = active_recipe(), self.block.uid, self.modules
        own: list[Any] = []
        entries: list[Any] = []
        kinds: Any = ()
        if recipe is not None:
            reader = _state_reader(block, recipe.uid)
            if reader == MISFIT:
                return None, None
            own = getattr(_readers, f"{reader}_stateful")(modules)
            make = _StateMaker(modules, block, recipe.uid)
            entries = getattr(_readers, f"{reader}_state")(modules, make)
            fits = len(entries) > 0 and getattr(_readers, f"{reader}_fits")(entries)
            kinds = as_made(entries) if fits else kinds_of(entries)
        params = getattr(_readers, f"{_parameters_reader(block)}_list")(modules)
        way = ("", "auto", None, steps_to_close(own), closes_in_graph())
        found = run_program(self.block, params, x, extra_inputs, entries, kinds, recipe, way)
        if found is None:
            return None, params
        outputs, amaxes, name = found
        closed_steps(own)
        if amaxes and torch.is_grad_enabled():
            fold(name, entries, amaxes)
        return outputs, params

    def _all_params(self, casts: Recipe | None, read: Any) -> tuple[Any, ...]:
        """The parameters of every op, of what was read already if anything was: a parametrization runs once."""
        if read is None:
            return tuple([_params(module, casts) for module in self.modules])
        bundles = getattr(_readers, f"{_parameters_reader(self.block.uid)}_bundles")(read)
        return tuple([_cached(module, own, casts) for module, own in zip(self.modules, bundles, strict=True)])

    def _prepare(self, x: Any) -> None:
        """Before the first eager call: give parameters without storage theirs, as te.ops does."""
        self.ran = True
        if getattr(x, "device", None) != torch.device("meta"):
            for module in self.modules:
                module.pre_first_fuser_forward()
            self.prepared = True

    def fusions(self, block: Chain, recipe: Recipe | None) -> Any:
        """The fusions to plan a call with, or None for the default ones."""
        return self.custom_fusions.fusions(block, recipe) if registered.version else None

    def _takeovers(self, kwargs: Any, fusions: Any) -> tuple[Any, Any, Any]:
        """What modules run themselves; kwargs without those meant for them, and fusions that leave their ops alone."""
        found, rest = {}, dict(kwargs or {})
        for index, module in self.taking_over:
            own, rest[index] = module.takeover(rest.get(index, {}))
            if own is not None:
                found[index] = own
        if not found:
            return kwargs, fusions, None
        rules = default_fusions() if fusions is None else fusions
        return {i: given for i, given in rest.items() if given}, dataclasses.replace(rules, joint=()), found

    def _main_grads(self) -> tuple[MainGrad, ...]:
        """Where gradients of weights go that are not returned."""
        if not self.accumulating or not torch.is_grad_enabled():
            return ()
        found: list[MainGrad] = []
        for index, module in self.accumulating:
            own: list[MainGrad] = []
            for position, name in enumerate(module.op.param_names):
                weight = getattr(module, name)
                if name.startswith("weight") and weight.requires_grad:
                    own.append(main_grad_of(index, position, name, weight, type(module).__name__))
            check_one_dtype(own, type(module).__name__)
            found.extend(own)
        return overwriting_once(found)

    def _with_provided(self, kwargs: dict[int, dict[str, Any]], x: Any, evaluates: bool) -> dict[int, dict[str, Any]]:
        """The caller's forward kwargs by op index, and those that modules give themselves."""
        bound = dict(kwargs)
        for index, module in self.providers:
            if evaluates and module.evaluation_op is not module.op:
                continue
            given = bound.get(index, {})
            own = module.forward_kwargs(x, given)
            if own:
                bound[index] = {**own, **given}
        return bound

    def _recipe(self) -> Recipe | None:
        """The active recipe. A forward recomputed by a backward outside of any context runs the recipe it ran first."""
        recipe = active_recipe()
        if not self.quantized or torch.compiler.is_compiling():
            return recipe  # a compiled forward is recomputed inside its graph, where no attribute may be set
        if recipe is None and in_backward():
            return self.quantized[0]._last_recipe
        if self.quantized[0]._last_recipe is not recipe:
            for module in self.quantized:
                module._last_recipe = recipe
        return recipe

    def _state(self, recipe: Recipe) -> Any:
        state: list[dict[str, Any]] = []
        for index, (module, roles) in enumerate(zip(self.modules, state_roles(self.block, recipe), strict=True)):
            if not roles:
                state.append({})
                continue
            if torch.compiler.is_compiling() and not module.has_state(roles):
                own = getattr(_made, _make_state(f"{module._serial}/{self.block.uid}/{recipe.uid}/{index}"))
            else:
                module.ensure_state(roles)
                own = module.states(roles)
            close_in_graph(module, roles, own)
            if not torch.compiler.is_compiling():
                close_captured(module, roles, own)
            state.append(own)
        return tuple(state)

    def _started(self, state: Any) -> Any:
        """A forward that is no recomputation: what was closed before it no longer matters."""
        for module in self.quantized:
            module.scales_before_close.clear()
        return state

    def _recomputed(self, state: Any) -> Any:
        """The state with the scales that the recomputed forward read, if a step has been closed since then.

        Its observations were closed with that step and are not folded in a second time.
        """
        if not any(module.scales_before_close for module in self.quantized):
            return state
        return tuple(
            {role: entry.reading(module.scales_before_close.get(role, entry.read)) for role, entry in own.items()}
            for module, own in zip(self.modules, state, strict=True)
        )


def _attribute(module: BasicOperation, name: str) -> Any:
    # those of an op with hooks may belong to modules inside of it
    return module.get_parameter(name) if "." in name else getattr(module, name)


def _params(module: BasicOperation, casts: Recipe | None) -> Any:
    """The op's parameters by name; attributes for those that a parametrization or pruning has replaced."""
    own = module._parameters
    names = module.op.param_names
    registered = len(own) == len(names) and all(name in own for name in names)
    given = own if registered else {name: _attribute(module, name) for name in names}
    return _cached(module, given, casts)


def _cached(module: BasicOperation, given: Any, casts: Recipe | None) -> Any:
    return cached_params(module, given, casts) if module.op.forward_quantizers else given
