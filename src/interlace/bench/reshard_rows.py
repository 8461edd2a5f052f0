"""What a comparison of ways to reshard shows: rows for the result file, tables for people."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from interlace.bench.reshard_cases import (
    CHECKPOINT,
    FULL_TENSOR,
    LABELS,
    METHODS,
    OURS,
    PYTORCH,
    SEND_RECV,
    ReshardCase,
)
from interlace.bench.results import ResultRow, speedup
from interlace.text import aligned, number

_PLANNED = tuple(method.name for method in METHODS)
"""Methods that move by a plan, whose time is predicted too."""
WIRED = "checkpoint_wired"
"""The checkpoint and the time that its bytes need on the NICs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case: all methods, which took turns repeat by repeat."""

    case: ReshardCase
    times_ms: Mapping[str, Sequence[float]]
    cpu_ms: Mapping[str, Sequence[float]]
    """CPU time of all processes in each repeat."""
    predicted_ms: Mapping[str, float]
    """Of every method that has a plan."""
    lower_bound_ms: float
    nic_bytes_per_s: float
    """Payload that a NIC carries in one direction."""

    @property
    def storage_ms(self) -> float:
        """The least time on the NICs to write the tensor to shared storage and to read it again."""
        return sum(self.case.storage_bytes) / self.nic_bytes_per_s * 1e3

    def repeats(self, method: str) -> list[float]:
        """Times in ms; those of `checkpoint_wired` follow from those of `checkpoint`."""
        if method == WIRED:
            return [time + self.storage_ms for time in self.times_ms[CHECKPOINT]]
        return list(self.times_ms[method])

    def pytorch(self) -> list[float]:
        """The faster of both PyTorch ways in each repeat, with storage behind the NICs."""
        return list(map(min, self.repeats(FULL_TENSOR), self.repeats(WIRED)))


def rows_of(measured: Measured) -> list[ResultRow]:
    """All metrics of one case, times in ms."""
    ours = measured.repeats(OURS)
    name = measured.case.name
    others = [method for method in (*_PLANNED, FULL_TENSOR) if method != OURS]
    return [
        *(_over_bound(measured, method) for method in _PLANNED),
        *(speedup(name, f"speedup_vs_{m}", ours, measured.repeats(m)) for m in others),
        speedup(name, "speedup_vs_checkpoint_on_ram_disk", ours, measured.repeats(CHECKPOINT)),
        speedup(name, "speedup_vs_checkpoint", ours, measured.repeats(WIRED)),
        speedup(name, "speedup_vs_pytorch", ours, measured.pytorch()),
        *_predictions(measured),
        *(_cpu(measured, method) for method in LABELS),
    ]


def _metric(name: str, method: str) -> str:
    return name if method == OURS else f"{name}_{method}"


def _over_bound(measured: Measured, method: str) -> ResultRow:
    times, bound = measured.repeats(method), measured.lower_bound_ms
    return ResultRow(
        case=measured.case.name,
        metric=_metric("over_lower_bound", method),
        ours=median(times),
        baseline=bound,
        ratio=median(times) / bound,
        spread=(min(times) / bound, max(times) / bound),
    )


def _predictions(measured: Measured) -> Iterator[ResultRow]:
    for method in _PLANNED:
        predicted, times = measured.predicted_ms[method], measured.repeats(method)
        yield ResultRow(
            case=measured.case.name,
            metric=_metric("predicted_over_measured", method),
            ours=predicted,
            baseline=median(times),
            ratio=predicted / median(times),
            spread=(predicted / max(times), predicted / min(times)),
        )


def _cpu(measured: Measured, method: str) -> ResultRow:
    """CPU time of all processes over the time: how many cores the move keeps busy. Near the
    number of cores, not the links but the machine limits it."""
    pairs = list(zip(measured.cpu_ms[method], measured.repeats(method), strict=True))
    busy = [cpu / time for cpu, time in pairs]
    return ResultRow(
        case=measured.case.name,
        metric=_metric("cores_busy", method),
        ours=median(cpu for cpu, _ in pairs),
        baseline=median(time for _, time in pairs),
        ratio=median(busy),
        spread=(min(busy), max(busy)),
    )


def summary_rows(all_measured: Sequence[Measured]) -> list[ResultRow]:
    """The worst of ours over all cases: time over the bound, and |predicted / measured - 1|."""
    over = [_over_bound(each, OURS).ratio or 0.0 for each in all_measured]
    errors = [
        abs(each.predicted_ms[OURS] / median(each.repeats(OURS)) - 1) for each in all_measured
    ]
    return [
        _summary("over_lower_bound", max(over), median(over), (min(over), max(over))),
        _summary("prediction_error", max(errors), median(errors), (min(errors), max(errors))),
    ]


def _summary(metric: str, worst: float, middle: float, spread: tuple[float, float]) -> ResultRow:
    return ResultRow(
        case="all",
        metric=f"worst_{metric}",
        ours=worst,
        baseline=middle,
        ratio=None,
        spread=spread,
    )


def tables(all_measured: Sequence[Measured]) -> str:
    """Times of all methods, how good ours is, and predictions, one line per case."""
    return "\n\n".join(
        (
            "measured time in ms, median",
            _times(all_measured),
            "ours: range of times in ms, and against the others; `vs PyTorch` is the faster of\n"
            "full_tensor and a checkpoint whose bytes also take their time on the NICs (+ wire)",
            _quality(all_measured),
            "predicted over measured",
            _predicted(all_measured),
        )
    )


def _times(all_measured: Sequence[Measured]) -> str:
    header = ("case", "bound", *(LABELS[method] for method in (*_PLANNED, *PYTORCH)), "+ wire")
    rows = [
        (
            each.case.name,
            number(each.lower_bound_ms),
            *(number(median(each.repeats(m))) for m in (*_PLANNED, *PYTORCH, WIRED)),
        )
        for each in all_measured
    ]
    return aligned(header, rows, text_columns=1)


def _quality(all_measured: Sequence[Measured]) -> str:
    gained = ("vs send/recv", "vs + order", "vs PyTorch")
    header = ("case", "min", "max", "over bound", *gained, "cores busy")
    rows = []
    for each in all_measured:
        by_metric = {row.metric: row for row in rows_of(each)}
        gains = (f"speedup_vs_{name}" for name in (SEND_RECV, "search", "pytorch"))
        rows.append(
            (
                each.case.name,
                number(min(each.repeats(OURS))),
                number(max(each.repeats(OURS))),
                f"{by_metric['over_lower_bound'].ratio:.3f}",
                *(f"{by_metric[gain].ratio:.2f}x" for gain in gains),
                f"{by_metric['cores_busy'].ratio:.2f}",
            )
        )
    return aligned(header, rows, text_columns=1)


def _predicted(all_measured: Sequence[Measured]) -> str:
    header = ("case", *(LABELS[method] for method in _PLANNED))
    rows = [
        (each.case.name, *(f"{row.ratio:.3f}" for row in _predictions(each)))
        for each in all_measured
    ]
    return aligned(header, rows, text_columns=1)
