"""What FSDP2 knows about a module under `fully_shard`, read and turned into plain data.

The one file beside `torch_private.py` that reads private names of torch: those of FSDP2's states
(`_get_fsdp_state`, `_lazy_init`, `_fsdp_param_groups` or before 2.13 `_fsdp_param_group`,
`_mp_policy`, `_modules`, `_pre_forward_hook_handle`, `_post_forward_hook_handle`), of its groups
(`_reshard_after_forward`, the process groups, what `_refuse_group` names) and of its parameters
(`_module_info`, `sharded_param`, `_sharded_param_data`, sizes and dtypes; from torch 2.15 on
`unsharded_grad_dtype`, `sharded_grad_dtype`, `may_reduce_grad_outside_dp`). docs/new-torch.md says
with which versions of torch it was tested.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from interlace.errors import InputError
from interlace.graphs.torch_private import fake_tensor_mode, tree_map_only
from interlace.parallel.data import Axis
from interlace.parallel.fsdp_groups import GroupWeight, WeightGroup, WeightGroups

_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("force_sum_reduction_for_comms", False, "leave set_force_sum_reduction_for_comms out"),
    ("reduce_grads", True, "call set_requires_gradient_sync(True) before compile_step"),
    ("all_reduce_grads", True, "call set_requires_all_reduce(True) before compile_step"),
    ("_all_reduce_hook", None, "leave set_all_reduce_hook out"),
)
"""Settings of a group that a traced step does not follow: what they must be, and what to do."""
_COMMS = {"_all_gather_comm": "DefaultAllGather", "_reduce_scatter_comm": "DefaultReduceScatter"}
"""Attributes of a group that hold its collectives, and the classes of FSDP2's own."""


class FullyShardedModule:
    """A module of which some sub-modules, or itself, are under `fully_shard`."""

    def __init__(self, root: nn.Module) -> None:
        """`root` is what is traced: the module with its loss. Weights that were left whole by an
        earlier forward are sharded again. Raises InputError naming what cannot be traced."""
        self.root = root
        self._modules = _fsdp_modules(root)
        self.reshard()
        self._states = list(dict.fromkeys(each._get_fsdp_state() for each in self._modules))
        for state in self._states:
            _begin(state)
        self._groups = [group for state in self._states for group in _groups_of(state)]
        _refuse(self._groups)
        self.layout = _layout(root, self._groups)
        self.fake = fake_tensor_mode()
        self._swaps = self._made_plain()

    def reshard(self) -> None:
        """Free whole weights that a forward without backward has left."""
        for module in self._modules:
            module.reshard()

    def fake_inputs(self, example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A batch without memory, as the weights of `plain` are."""
        return tuple(self.fake.from_tensor(each) for each in example)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside, `root` is what it would be without FSDP2, with whole weights that have no
        memory, and with its casts of inputs and outputs in the place of its hooks."""
        kinds = [(module, type(module)) for module in self._modules]
        before = [(table, key, table[key]) for table, key, _ in self._swaps]
        for table, key, value in self._swaps:
            table[key] = value
        try:
            for module, kind in kinds:
                module.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
            yield
        finally:
            for module, kind in kinds:
                module.__class__ = kind
            for table, key, value in before:
                table[key] = value

    def _made_plain(self) -> list[tuple[dict[Any, Any], Any, Any]]:
        """(dictionary, key, value while it is traced): of hooks, FSDP2's states and weights."""
        swaps: list[tuple[dict[Any, Any], Any, Any]] = []
        for state in self._states:
            before, after = _casts(state._mp_policy)
            inputs = [module._forward_pre_hooks for module in state._modules]
            handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
            for handle in {id(each): each for each in handles}.values():
                for one in getattr(handle, "handles", (handle,)):  # several of a list of modules
                    hooks = one.hooks_dict_ref()
                    is_before = any(hooks is table for table in inputs)
                    swaps.append((hooks, one.id, before if is_before else after))
            # Each block's own, by which equal blocks would be told apart (`graphs.blocks`).
            swaps += [
                (table, key, None)
                for module in state._modules
                for table in vars(module).values() if isinstance(table, dict)
                for key, value in table.items() if value is state
            ]  # fmt: skip
        for group in self._groups:
            for each in group.fsdp_params:
                whole, at = self._whole(each), each._module_info
                places = [(at.module, at.param_name)]
                places += zip(at.shared_modules, at.shared_param_names, strict=True)
                swaps += [(module._parameters, name, whole) for module, name in places]
        return swaps

    def _whole(self, each: Any) -> nn.Parameter:
        with self.fake:
            dtype = each.param_dtype or each.orig_dtype
            whole = torch.empty(each._orig_size, dtype=dtype, device=each.device)
            spec = _tensor_spec(each)
            if spec is not None:
                whole = DTensor.from_local(
                    whole, spec.mesh, spec.placements,
                    run_check=False, shape=spec.shape, stride=spec.stride,
                )  # fmt: skip
            return nn.Parameter(whole, requires_grad=each.sharded_param.requires_grad)


def _begin(state: Any) -> None:
    """Settle dtypes and what the root keeps, as FSDP2 does it in its first forward."""
    try:
        state._lazy_init()  # does nothing the second time
    except (AssertionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"fully_shard refuses the module: {error}",
            hint="make it what FSDP2 can run forward: weights on their device, of one dtype in "
            "each call of fully_shard",
        ) from error


def _fsdp_modules(root: nn.Module) -> list[Any]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        found = list(state._fsdp_param_groups)
    else:
        found = [state._fsdp_param_group] if state._fsdp_param_group else []
    if len(found) > 1:
        raise InputError(
            f"{_title(found[0])} is under fully_shard with a shard_placement_fn that puts its "
            f"weights on {len(found)} meshes",
            hint="call fully_shard once for each mesh, with modules of their own",
        )
    return found


def _tensor_spec(each: Any) -> Any:
    """How a weight lies over tensor-parallel ranks while FSDP2 has it whole."""
    return getattr(each, "_unsharded_dtensor_spec", None) or getattr(each, "_tp_spec", None)


def _casts(policy: Any) -> tuple[Any, Any]:
    """Hooks that convert what a module is given, and what it gives, as FSDP2's do."""
    given = policy.param_dtype if policy.cast_forward_inputs else None

    def cast(dtype: torch.dtype | None, tree: Any) -> Any:
        if dtype is None:
            return tree
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast(given, (args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return cast(policy.output_dtype, output)

    return before, after


def _refuse(groups: list[Any]) -> None:
    """Raise InputError for settings that change what a step computes, and are not done here."""
    if not groups:
        raise InputError(
            "the modules under fully_shard hold no parameter", hint="leave fully_shard out"
        )
    for group in groups:
        _refuse_group(group)
    axes = {_axes(group) for group in groups}
    if len(axes) > 1:
        raise InputError(
            f"{_title(groups[0])} and other modules are under fully_shard on different meshes, and "
            "the gradients of a step are averaged over the ranks of one",
            hint="give all calls of fully_shard the same mesh",
        )
    factors = {group.gradient_divide_factor for group in groups}
    if len(factors) > 1:
        raise InputError(
            "modules under fully_shard have unlike gradient_divide_factors: "
            + ", ".join(sorted(str(each) for each in factors)),
            hint="call set_gradient_divide_factor on all of them with one number, or leave it out",
        )


def _refuse_group(group: Any) -> None:
    title = f"{_title(group)} is under fully_shard"
    for name, wanted, hint in _SETTINGS:
        if getattr(group, name, wanted) != wanted:
            raise InputError(
                f"{title} with {name.lstrip('_')} = {getattr(group, name)!r}, which a traced step "
                "does not follow",
                hint=hint,
            )
    for name, usual in _COMMS.items():
        found = type(getattr(group, name, None)).__name__
        if hasattr(group, name) and found != usual:
            raise InputError(
                f"{title} with collectives of its own ({found})",
                hint="leave set_custom_all_gather, set_custom_reduce_scatter and "
                "set_symm_mem out: the planner orders PyTorch's collectives",
            )
    if not hasattr(group.mesh_info, "shard_process_group") or getattr(
        group.mesh_info, "is_spmd_mesh", False
    ):
        raise InputError(
            f"{title} on a mesh whose axes it tells apart itself (dp_mesh_dims), or on replicas",
            hint="give fully_shard the data-parallel mesh: of one axis, or (replicate, shard)",
        )
    if group._use_post_forward_mesh:
        raise InputError(
            f"{title} with a number as reshard_after_forward, so that weights stay with fewer "
            "ranks between forward and backward",
            hint="set reshard_after_forward to True or False",
        )
    for each in group.fsdp_params:
        _refuse_parameter(title, each)
    dtypes = {(each.param_dtype, each.orig_dtype) for each in group.fsdp_params}
    if len(dtypes) > 1:
        raise InputError(
            f"{title} with weights of different types, which travel together",
            hint="give all weights of the module one dtype, or call fully_shard on its parts",
        )


def _refuse_parameter(title: str, each: Any) -> None:
    name = each._param_fqn or each._module_info.param_name
    if each.offload_to_cpu:
        raise InputError(
            f"{title} with CPUOffloadPolicy, and a traced step keeps {name!r} on its device",
            hint="leave offload_policy out",
        )
    asked = getattr(each, "sharded_grad_dtype", each.orig_dtype)  # new in torch 2.15
    if _is_trained(each) and asked != each.orig_dtype:
        raise InputError(
            f"{title}, and the gradient of {name!r} has a type of its own (grad_dtype {asked}), "
            "which a traced step does not give it",
            hint="leave grad_dtype as it is; MixedPrecisionPolicy.reduce_dtype says in what "
            "gradients are summed",
        )
    if hasattr(each.sharded_param.to_local(), "fsdp_pre_all_gather"):
        raise InputError(
            f"{title}, and {name!r} changes itself while it is gathered (fsdp_pre_all_gather, as "
            "for float8)",
            hint="leave that conversion out",
        )


def _title(group: Any) -> str:
    name = (group._module_fqn or "").split(", ")[0]
    return f"module {name!r}" if name else "the module"


def _axes(group: Any) -> tuple[Axis, Axis]:
    """(ranks that share the weights, ranks that hold the same parts)."""
    shard = _axis(group._all_gather_process_group)
    return shard, _axis(group._all_reduce_process_group) if group._is_hsdp else Axis("", 1)


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(str(group.group_name), group.size())


def _layout(root: nn.Module, groups: list[Any]) -> WeightGroups:
    """The groups as plain data. Raises InputError for a weight that is in none of them."""
    known = {each.sharded_param: each for group in groups for each in group.fsdp_params}
    names: dict[Any, list[str]] = {each: [] for each in known.values()}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter in known:
            names[known[parameter]].append(name)
        elif parameter.requires_grad:
            raise InputError(
                f"parameter {name.removeprefix('module.')!r} is under no fully_shard, so nobody "
                "averages its gradient",
                hint="call fully_shard on the whole module last, without ignored_params, or freeze "
                "the parameter by requires_grad_(False)",
            )
    found = []
    for index, group in enumerate(groups):
        shard, replicate = _axes(group)
        weights = tuple(_weight(each, tuple(names[each])) for each in group.fsdp_params)
        found.append(
            WeightGroup(
                index, weights, shard, replicate, group.fsdp_params[0].param_dtype,
                _reduce_dtype(group), keeps=not group._reshard_after_forward,
            )
        )  # fmt: skip
    factor = groups[0].gradient_divide_factor
    ranks = found[0].shard.size * found[0].replicate.size
    return WeightGroups(tuple(found), float(ranks if factor is None else factor))


def _reduce_dtype(group: Any) -> torch.dtype | None:
    """What gradients are summed in over ranks: from torch 2.15 on the type that autograd gives
    them where the policy names none, and before that, None, what they were computed in."""
    found = {_gradient_dtype(each) for each in group.fsdp_params if _is_trained(each)}
    if len(found) > 1:
        raise InputError(
            f"{_title(group)} is under fully_shard with weights whose gradients have different "
            f"types: {', '.join(sorted(map(str, found)))}",
            hint="give its MixedPrecisionPolicy a reduce_dtype, or all weights one grad_dtype",
        )
    return group._reduce_dtype or next(iter(found), None)


def _gradient_dtype(each: Any) -> torch.dtype | None:
    return getattr(each, "unsharded_grad_dtype", None)  # new in torch 2.15


def _is_trained(each: Any) -> bool:
    return each.sharded_param.requires_grad


def _early_dtype(each: Any) -> torch.dtype | None:
    """torch 2.15 widens a gradient after backward, unless other ranks than its own add to it."""
    return _gradient_dtype(each) if getattr(each, "may_reduce_grad_outside_dp", False) else None


def _keeps_wide(each: Any) -> bool:
    """From torch 2.15 on autograd leaves a gradient as it comes, and FSDP2 widens it later, where
    gradients have a wider type than the weight that is computed with."""
    wide, own = _gradient_dtype(each), each.param_dtype or each.orig_dtype
    if wide is None or not (wide.is_floating_point and own.is_floating_point):
        return False
    return wide.itemsize > own.itemsize


def _weight(each: Any, names: tuple[str, ...]) -> GroupWeight:
    spec = _tensor_spec(each)
    return GroupWeight(
        names=names,
        shape=tuple(each._orig_size),
        dim=each.fsdp_placement.dim,
        part=tuple(each.padded_sharded_param_size),
        own=tuple(each.sharded_size),
        own_stride=tuple(each.contiguous_sharded_stride),
        tensor=None if spec is None else (spec.mesh, tuple(spec.placements)),
        early_dtype=_early_dtype(each) if _is_trained(each) else None,
        keeps_wide=_is_trained(each) and _keeps_wide(each),
        shard=lambda: each._sharded_param_data,
    )
