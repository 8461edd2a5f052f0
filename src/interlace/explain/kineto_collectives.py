"""What a Kineto trace says about one collective: its kind, process group and bytes."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KINDS = (
    ("all_gather", ("allgather",)),
    ("reduce_scatter", ("reducescatter",)),
    ("all_reduce", ("allreduce",)),
    ("all_to_all", ("alltoall",)),
    ("broadcast", ("broadcast",)),
    ("send", ("send", "recv")),
    ("reduce", ("reduce",)),
    ("gather", ("gather",)),
    ("scatter", ("scatter",)),
    ("barrier", ("barrier",)),
)
"""Kind -> parts of names, letters only, of which the first that fits counts."""
_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "longint": 8, "longlongint": 8,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "half": 2, "float16": 2, "bfloat16": 2,
    "short": 2, "int16": 2, "char": 1, "signedchar": 1, "unsignedchar": 1, "byte": 1, "int8": 1,
    "uint8": 1, "bool": 1, "float8e4m3fn": 1, "float8e5m2": 1, "c10half": 2, "c10bfloat16": 2,
    "c10float8e4m3fn": 1, "c10float8e5m2": 1,
}  # fmt: skip
"""Bytes of an element by the name of its type, small letters and digits only."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, as far as the trace names it."""

    name: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0


def kind_of(name: str) -> str:
    """`all_gather` for `ncclDevKernel_AllGather_RING_LL(...)`, `_allgather_base` or
    `gloo:all_gather`; the name itself for what is not known."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    for kind, parts in _KINDS:
        if any(part in letters for part in parts):
            return kind
    return name


def kernel_kind(name: str, args: Mapping[str, Any]) -> str:
    """The kind of an NCCL kernel. What PyTorch asked for counts before the kernel's name: an
    all-to-all runs as a kernel `SendRecv`."""
    asked = args.get("Collective name")
    if isinstance(asked, str) and asked:
        known = kind_of(asked)
        if known != asked:
            return known
    kernel = re.match(r"nccl\w*?Kernel_([A-Za-z]+)", name)
    return kind_of(kernel[1]) if kernel else kind_of(name)


def kernel_bytes(args: Mapping[str, Any]) -> int | None:
    """Bytes of the larger of input and output; None if the trace has no sizes."""
    counts = [args.get(key) for key in ("In msg nelems", "Out msg nelems")]
    known = [count for count in counts if isinstance(count, int) and count >= 0]
    element = _element_bytes(args.get("dtype"))
    return max(known) * element if known and element else None


def gloo_bytes(args: Mapping[str, Any]) -> int | None:
    """Bytes of the inputs of one of gloo's collectives, from its shapes; None without shapes
    (`record_shapes=True` of torch.profiler writes them)."""
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list) or not shapes:
        return None
    total = 0
    for shape, kind in zip(shapes, types, strict=False):
        count = _elements(shape)
        element = _element_bytes(kind)
        if count and element:
            total += count * element
    return total or None


def group_of(args: Mapping[str, Any], header: Mapping[str, Any]) -> Group:
    """The process group of a collective, from its arguments and the list of groups in the file. A
    file with one group needs no arguments."""
    listed = _listed_groups(header)
    name = str(args.get("Process Group Name") or "")
    known = listed.get(name)
    if known is None and not name and len(listed) == 1:
        known = next(iter(listed.values()))
    described = str(args.get("Process Group Description") or "")
    ranks = _ranks(args.get("Process Group Ranks"))
    size = args.get("Group size")
    if known is not None:
        described = described if described not in ("", "undefined") else known.name
        ranks = ranks or known.ranks
    if described in ("", "undefined"):
        described = name
    size = (
        size if isinstance(size, int) and size > 0 else len(ranks) or (known.size if known else 0)
    )
    return Group(described, ranks, size)


def _listed_groups(header: Mapping[str, Any]) -> dict[str, Group]:
    information = header.get("distributedInfo")
    listed = information.get("pg_config") if isinstance(information, dict) else None
    found: dict[str, Group] = {}
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict):
            name = str(each.get("pg_name", ""))
            described = str(each.get("pg_desc") or "")
            label = name if described in ("", "undefined") else described
            ranks = _ranks(each.get("ranks"))
            size = each.get("pg_size")
            found[name] = Group(label, ranks, size if isinstance(size, int) else len(ranks))
    return found


def _ranks(value: Any) -> tuple[int, ...]:
    """A list of ranks, or the text of one; empty if it was shortened."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:  # `[0, 1, 2, ...]`
            return ()
    if isinstance(value, list) and all(isinstance(each, int) for each in value):
        return tuple(value)
    return ()


def _element_bytes(name: Any) -> int:
    """0 for a type that is not known."""
    return _BYTES.get(re.sub(r"[^a-z0-9]", "", str(name).lower()), 0)


def _elements(shape: Any) -> int:
    """Elements of a shape, or of all shapes in a list of them."""
    if not isinstance(shape, list):
        return 0
    if any(isinstance(each, list) for each in shape):
        return sum(_elements(each) for each in shape)
    count = 1
    for each in shape:
        count *= each if isinstance(each, int) else 0
    return count if shape else 0
