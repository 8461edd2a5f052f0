"""A cluster with the number of its devices behind its name: `h100x512`."""

import re
from dataclasses import replace
from pathlib import Path

from interlace.errors import InputError
from interlace.hardware.cluster import Cluster, cluster_files, load_cluster

_SIZED = re.compile(r"(.+)x(\d+)")


def load_sized_cluster(text: str) -> tuple[Cluster, int]:
    """(the cluster, its devices) of `h100x512` or `my.tomlx64`; of a name alone, 0 devices.

    Raises InputError for an unknown cluster, and for devices that do not fill its hosts."""
    found = _SIZED.fullmatch(text)
    if found is None or text in cluster_files() or Path(text).is_file():
        return load_cluster(text), 0
    cluster, devices = load_cluster(found[1]), int(found[2])
    per_host = cluster.devices_per_host
    if devices < 1 or (devices > per_host and devices % per_host):
        raise InputError(
            f"{devices} devices do not fill hosts of {per_host} on cluster {cluster.name}",
            hint=f"give a multiple of {per_host}, or at most {per_host}: "
            f"{found[1]}x{max(per_host, devices // per_host * per_host)}",
        )
    cluster.require(devices)
    return replace(cluster, hosts=-(-devices // per_host)), devices
