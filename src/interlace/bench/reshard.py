"""Tensors moved between meshes: the paper's cases, its methods, plain PyTorch, and ours.

The hosts are 5 namespaces whose NICs carry 125 Mbit/s in either direction, with 4 processes each
(the paper: 5 hosts of 4 GPUs, 10 Gbit/s); inside a host data goes over the loopback device. The
lower bound takes what such a NIC carries of payload, 1448 of every 1514 bytes of a frame. All
methods take turns repeat by repeat in one run. Where namespaces cannot be made, links are emulated,
and as each rank then has its own link, hosts have one device.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.bench.reshard_cases import (
    FULL,
    FULL_EMULATED,
    QUICK,
    QUICK_EMULATED,
    ReshardSize,
    to_json,
)
from interlace.bench.reshard_rows import Measured, rows_of, summary_rows, tables
from interlace.bench.results import ResultRow, environment, write_json
from interlace.errors import RunError
from interlace.lab import hosts
from interlace.ranks.launch import launch
from interlace.run_files import write_whole

_WORLD = "interlace.bench.reshard_world"
"""The module that each rank runs."""
_RAM_DISK = Path("/dev/shm")
"""Where the checkpoint lies that plain PyTorch writes and reads: memory that all hosts see."""


def run(*, quick: bool, json_path: Path | None) -> int:
    """Run all cases, print the tables; write JSON and, beside it, a picture if asked."""
    reason = "this is already a lab" if hosts.inside_lab() else hosts.available()
    if reason:
        print(f"note: no network namespaces here ({reason}); links are emulated", file=sys.stderr)
        size = QUICK_EMULATED if quick else FULL_EMULATED
    else:
        size = QUICK if quick else FULL
    return run_size(size, json_path)


def run_size(size: ReshardSize, json_path: Path | None) -> int:
    """The bench at one size."""
    result = measure(size)
    measured = [read_case(size, result, index) for index in range(len(size.cases))]
    print(tables(measured))
    if json_path is not None:
        from interlace.bench.reshard_picture import bandwidth_png  # noqa: PLC0415  matplotlib

        rows = [row for each in measured for row in rows_of(each)]
        rows += [*summary_rows(measured), *link_rows(result["links"])]
        write_json(json_path, "reshard", environment(size.link), rows)
        picture = json_path.with_suffix(".png")
        write_whole(picture, bandwidth_png(measured, size.link))
        print(json_path)
        print(picture)
    return 0


def measure(size: ReshardSize) -> dict[str, Any]:
    """What one world of `hosts` x `devices` processes measured. RunError when it fails."""
    ram = _RAM_DISK if _RAM_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="interlace-reshard-", dir=ram) as name:
        folder = Path(name)
        (folder / "size.json").write_text(to_json(size), encoding="utf-8")
        if size.emulated:
            launch([sys.executable, "-m", _WORLD, name], ranks=size.hosts * size.devices)
        else:
            _run_in_lab(size, ["python", "-m", _WORLD, name])
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def _run_in_lab(size: ReshardSize, command: list[str]) -> None:
    code = hosts.run_in_lab(command, hosts=size.hosts, ranks_per_host=size.devices, rate=size.rate)
    if code:
        raise RunError(
            f"the processes of the bench ended with exit code {code}",
            hint="their own message is above",
        )


def read_case(size: ReshardSize, result: Mapping[str, Any], index: int) -> Measured:
    """One case of what `measure` returned, in ms."""
    case, content = size.cases[index], result["cases"][index]
    assert case.name == content["name"], "in the same order"
    return Measured(
        case=case,
        times_ms=_in_ms(content["times_ns"]),
        cpu_ms=_in_ms(content["cpu_ns"]),
        predicted_ms={method: time / 1e6 for method, time in content["predicted_ns"].items()},
        lower_bound_ms=content["lower_bound_ns"] / 1e6,
        nic_bytes_per_s=result["links"]["nic_bytes_per_s"],
    )


def _in_ms(times_ns: Mapping[str, Sequence[int]]) -> dict[str, list[float]]:
    return {method: [time / 1e6 for time in times] for method, times in times_ns.items()}


def link_rows(links: Mapping[str, float]) -> list[ResultRow]:
    """Payload of a NIC in MB/s as one message of 4 MiB had it, over what its rate allows."""
    measured, allowed = (
        links[key] / 1e6 for key in ("nic_measured_bytes_per_s", "nic_bytes_per_s")
    )
    return [
        ResultRow(
            case="all",
            metric="nic_payload",
            ours=measured,
            baseline=allowed,
            ratio=measured / allowed,
            spread=None,
        )
    ]
