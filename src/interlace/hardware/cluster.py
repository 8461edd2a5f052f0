"""A cluster as a file: its devices, its links, and how long a collective takes on them.

    collective  base + ring steps x step latency + wire bytes / (link rate x efficiency)

The latency terms are those of NCCL's own tuner for the ring algorithm and the Simple protocol (8.4
us base; 3.4 us per NVLink step, 14 us per network step), which the presets hold. Across hosts every
device uses its own network port, and the exchange inside the hosts runs along with it, so the
slower of the two counts. Efficiencies in the presets come from published nccl-tests: 0.78 of
NVLink on A100 nodes, 0.80 on H200 nodes, 0.74 of the network ports of four hosts of 8 B200.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import interlace.presets
from interlace.errors import InputError, nearest
from interlace.hardware.device_rates import DeviceRates, reached_shares
from interlace.hardware.link_rates import link_class
from interlace.hardware.wire_bytes import wire_bytes_by_link
from interlace.ir.graph import Kind
from interlace.toml_text import place_of, read_toml

BASE_LATENCY_US = 8.4
"""Time of a collective without any step: NCCL's tuner, ring, Simple protocol."""

_UNITS = {
    "_tflops": "1e12 floating point operations per second, dense",
    "gbit_per_s": "1e9 bit/s, of one device",
    "gb_per_s": "1e9 byte/s",
    "_gib": "2**30 bytes; 80 GB are 74.5",
    "_us": "microseconds",
}
"""Units of numbers by the end of their keys."""
_UNIT_WORDS = "[kmgtp]?(flops|bit|bits|b|ib|byte|bytes)?|[mnu]?s|ns|seconds"
"""Units that somebody may write instead."""

LinkName = Literal["intra_host", "inter_host"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraHostLink:
    """What joins the devices of one host."""

    gb_per_s: float
    """Data-sheet rate of one device in one direction, in 1e9 byte/s."""
    efficiency: float
    """Bus bandwidth that collectives reach, as a fraction of that."""
    step_latency_us: float
    """Time of one ring step without data."""
    sms_held: int
    """Multiprocessors that a collective occupies (NCCL channels)."""
    link: str = ""
    """Class of the link, a name of `link_rates.LINKS`."""
    island: int = 0
    """Devices that this link joins, if a host has several such groups; 0: all of the host."""
    between_gb_per_s: float = 0.0
    """Data-sheet rate of all that joins two islands, in one direction, in 1e9 byte/s."""
    between_efficiency: float = 0.0
    """The fraction of it that is reached; 0, or no such key: that of the link."""

    @property
    def bytes_per_s(self) -> float:
        """What a device really gets through in one direction."""
        return self.gb_per_s * 1e9 * self.efficiency

    @property
    def between_bytes_per_s(self) -> float:
        """What all devices of an island together get through to another one."""
        return self.between_gb_per_s * 1e9 * (self.between_efficiency or self.efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterHostLink:
    """What joins the hosts."""

    gbit_per_s: float
    """Data-sheet rate of one device's share of its host's ports, in one direction."""
    efficiency: float
    """Bandwidth that collectives reach, as a fraction of that."""
    step_latency_us: float
    """Time of one ring step without data."""
    sms_held: int
    """Multiprocessors that a collective occupies (NCCL channels)."""
    link: str = ""
    """Class of the link, a name of `link_rates.LINKS`."""

    @property
    def bytes_per_s(self) -> float:
        """What a device really gets through in one direction."""
        return self.gbit_per_s * 1e9 / 8 * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal hosts of equal devices; ranks fill one host after the other."""

    name: str
    devices_per_host: int
    peak_tflops: float
    """Dense bfloat16 rate of one device."""
    memory_gb_per_s: float
    """Memory bandwidth of one device, in 1e9 byte/s."""
    memory_gib: float
    """Memory of one device."""
    sms: int
    """Multiprocessors of one device."""
    intra_host: IntraHostLink
    inter_host: InterHostLink
    gpu: str = ""
    """Class of the devices, a name of `device_rates.REACHED`; empty: of none that is known."""
    ports_per_host: int = 0
    """Network ports of one host; 0, or no such key: one for each device."""
    hosts: int = 0
    """How many hosts there are; 0, or no such key: as many as are asked for."""

    @property
    def device(self) -> DeviceRates:
        """Rates of one device in a long run. Raises InputError if its class is not known."""
        reached = reached_shares(self.gpu)
        return DeviceRates(
            flops_per_s=self.peak_tflops * 1e12,
            bytes_per_s=self.memory_gb_per_s * 1e9 * reached.memory,
            multiprocessors=self.sms,
            memory_bytes=self.memory_gib * 2**30,
            reached=reached,
        )

    def require(self, ranks: int) -> None:
        """Raise InputError if the cluster has fewer devices than `ranks`."""
        if self.hosts and ranks > self.hosts * self.devices_per_host:
            raise InputError(
                f"{ranks} ranks do not fit on cluster {self.name}: {self.hosts} hosts of "
                f"{self.devices_per_host} devices are {self.hosts * self.devices_per_host}",
                hint="use fewer ranks, or correct `hosts` in the cluster file",
            )

    def unlike(self, groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """One of each sort of `groups` of ranks: those that lie on hosts alike take equal times."""
        sorts = {tuple(sorted(self._per_host(group).values())): tuple(group) for group in groups}
        return tuple(sorts.values())

    def link_of(self, ranks: Sequence[int]) -> LinkName:
        """The link that a group of global `ranks` communicates over."""
        return "inter_host" if len(self._per_host(ranks)) > 1 else "intra_host"

    def sms_held(self, ranks: Sequence[int]) -> int:
        """Multiprocessors that a collective of these ranks occupies on each device."""
        return getattr(self, self.link_of(ranks)).sms_held

    def collective_ns(self, kind: Kind, full_bytes: float, ranks: Sequence[int]) -> int:
        """Time of one collective among global `ranks`, alone on its link.

        `full_bytes` is the whole tensor: gathered, before a scatter, or what one rank sends.
        """
        if len(ranks) == 1:
            return 0
        per_host = self._per_host(ranks)
        hosts, local = len(per_host), max(per_host.values())
        steps = (len(ranks) - 1) * (2 if kind is Kind.ALL_REDUCE else 1)
        network_steps = steps * (hosts - 1) // (len(ranks) - 1)
        if kind is Kind.SEND:
            steps, network_steps = 1, int(hosts > 1)
        latency_us = (
            BASE_LATENCY_US
            + network_steps * self.inter_host.step_latency_us
            + (steps - network_steps) * self.intra_host.step_latency_us
        )
        inside, across = wire_bytes_by_link(kind, full_bytes, len(ranks), hosts, local)
        transfer_s = max(inside / self.intra_host.bytes_per_s, across / self.inter_host.bytes_per_s)
        return round(latency_us * 1e3 + transfer_s * 1e9)

    def _per_host(self, ranks: Sequence[int]) -> Counter[int]:
        return Counter(rank // self.devices_per_host for rank in ranks)


def cluster_files() -> dict[str, Path]:
    """Cluster files that come with the package, by name."""
    folder = Path(interlace.presets.__path__[0]) / "clusters"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def load_cluster(path: str) -> Cluster:
    """Read a TOML file, or a preset by name. Raises InputError that names the line and the key."""
    presets = cluster_files()
    file = presets[path] if path in presets and not Path(path).is_file() else Path(path)
    if not file.is_file():
        looks_like_a_file = file.suffix == ".toml" or file.name != path
        raise InputError(
            f"there is no cluster file {path}"
            if looks_like_a_file
            else f"there is no cluster {path!r}",
            hint="give a TOML file, or a preset: " + ", ".join(presets)
            if looks_like_a_file
            else nearest(path, presets),
        )
    table, text = read_toml(file)
    where = partial(place_of, str(file), text)
    cluster = _structure(table, Cluster, prefix="", where=where)
    if (cluster.intra_host.island > 0) != (cluster.intra_host.between_gb_per_s > 0):
        raise InputError(
            f"{where('intra_host')}: island = {cluster.intra_host.island} and between_gb_per_s = "
            f"{cluster.intra_host.between_gb_per_s:g} belong together",
            hint="give both, or neither",
        )
    for key, check in (
        ("gpu", lambda: reached_shares(cluster.gpu)),
        ("intra_host.link", lambda: link_class(cluster.intra_host.link, inside=True)),
        ("inter_host.link", lambda: link_class(cluster.inter_host.link, inside=False)),
    ):
        try:
            check()
        except InputError as error:
            raise InputError(f"{where(key)}: {error.message}", hint=error.hint) from None
    return cluster


def _structure(
    table: dict[str, Any], type_: type[T], *, prefix: str, where: Callable[[str], str]
) -> T:
    """A parsed table as a dataclass: every key that has no default, no other, of the right type
    and in range. `where` gives the file and the line of a key."""
    types = get_type_hints(type_)
    for key in table:
        if key not in types:
            raise InputError(
                f"{where(prefix + key)}: unknown key {prefix}{key}",
                hint=_other_unit(key, types)
                or nearest(prefix + key, [prefix + name for name in types]),
            )
    values: dict[str, Any] = {}
    for field in fields(type_):  # type: ignore[arg-type]
        name, kind = prefix + field.name, types[field.name]
        if field.name not in table:
            if field.default is not MISSING:
                continue
            place = where(prefix.rstrip("."))
            raise InputError(f"{place}: {name} is missing", hint=f"add {name}")
        value = table[field.name]
        if is_dataclass(kind):
            if not isinstance(value, dict):
                raise InputError(
                    f"{where(name)}: {name} = {value!r} must be a table", hint=f"write [{name}]"
                )
            values[field.name] = _structure(value, kind, prefix=f"{name}.", where=where)
        else:
            values[field.name] = _value(value, kind, name, where(name))
    return type_(**values)


def _other_unit(key: str, known: Iterable[str]) -> str:
    """A hint for a key that is known in another unit; empty if it is not."""
    for name in known:
        for end, unit in _UNITS.items():
            base = name.removesuffix(end)
            same_sort = ("per_s" in end) == (key.endswith(("per_s", "bps")))
            if (
                base != name
                and same_sort
                and re.fullmatch(rf"{base}_?({_UNIT_WORDS})(_?(per|p)_?s)?", key)
            ):
                return f"give {name}, in {unit}"
    return ""


def _value(value: Any, type_: type, name: str, where: str) -> Any:
    if type_ is str:
        if type(value) is str and value:
            return value
        raise InputError(f"{where}: {name} = {value!r} must be text", hint=f'write {name} = "..."')
    types = (int,) if type_ is int else (int, float)
    if type(value) not in types or not math.isfinite(value):
        what = "a whole number" if type_ is int else "a number"
        unit = next((text for end, text in _UNITS.items() if name.endswith(end)), "")
        hint = f"write the number alone: {name} is in {unit}" if unit else f"correct {name}"
        raise InputError(f"{where}: {name} = {value!r} must be {what}", hint=hint)
    key = name.rpartition(".")[2]
    if (key == "efficiency" and not 0 < value <= 1) or (key == "between_efficiency" and value > 1):
        raise InputError(
            f"{where}: {name} = {value!r} must be a fraction", hint="0.8 is 80 % of the data sheet"
        )
    may_be_zero = key in ("step_latency_us", "sms_held", "hosts", "ports_per_host")
    may_be_zero = may_be_zero or key in ("island", "between_gb_per_s", "between_efficiency")
    if value < 0 or (value == 0 and not may_be_zero):
        raise InputError(
            f"{where}: {name} = {value!r} must be {'0 or more' if may_be_zero else 'above 0'}",
            hint=f"correct {name}",
        )
    return type_(value)
