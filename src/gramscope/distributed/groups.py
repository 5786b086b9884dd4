"""Which processes work together: from ``process_group=``, ``mesh=``, the model, or the default group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch.distributed as dist
from torch import nn

from gramscope.distributed.exchange import Exchange
from gramscope.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: a process group, ``None`` for that of the model or the default one, or ``False`` for this process alone
Group: TypeAlias = "dist.ProcessGroup | Literal[False] | None"


def find_exchange(
    process_group: Group = None, mesh: DeviceMesh | None = None, model: nn.Module | None = None
) -> Exchange | None:
    """The processes to work with; ``None`` where this process works alone.

    Args:
        process_group: the group itself; ``False`` for this process alone; ``None`` for the group of a
            ``DistributedDataParallel`` model, else the default group, else (without ``init_process_group``) none.
        mesh: a device mesh of one dimension, in place of ``process_group``.
        model: looked at where neither is given.

    >>> find_exchange() is None
    True
    """
    if mesh is not None:
        if process_group is not None:
            raise InputError("give process_group= or mesh=, not both")
        if not hasattr(mesh, "get_group"):
            raise InputError(f"mesh={mesh!r} is a {type(mesh).__name__}; give a torch.distributed.DeviceMesh")
        if mesh.ndim != 1:
            raise InputError(
                f"mesh= has the dimensions {mesh.mesh_dim_names or mesh.ndim}; choose the one over which data are divided, "
                "such as mesh['dp']"
            )
        process_group = mesh.get_group()
    if process_group is False or not dist.is_available() or not dist.is_initialized():
        return None
    if process_group is None:
        process_group = dist.group.WORLD
        if isinstance(model, nn.parallel.DistributedDataParallel):
            process_group = model.process_group
    if not isinstance(process_group, dist.ProcessGroup):
        raise InputError(
            f"process_group={process_group!r}: give a torch.distributed process group that this process belongs to, False "
            "for this process alone, or None for the default group"
        )
    return Exchange(process_group) if dist.get_world_size(process_group) > 1 else None
