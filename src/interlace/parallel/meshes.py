"""Device meshes. Axis names are torchtitan's: `tp` for tensor parallel."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from interlace.config import ParallelConfig

TENSOR_AXIS = "tp"


def build_mesh(config: ParallelConfig, device_type: str) -> DeviceMesh:
    """The mesh of this run; the process group must exist. Communicators are made here, ahead of
    the first collective."""
    return init_device_mesh(device_type, (config.tensor,), mesh_dim_names=(TENSOR_AXIS,))


def axis_of_group(mesh: DeviceMesh) -> dict[str, str]:
    """Mesh axis by process-group name, as it appears in traced collectives."""
    names = mesh.mesh_dim_names or ()
    return {mesh.get_group(name).group_name: name for name in names}
