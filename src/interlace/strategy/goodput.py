"""Goodput: the share of time in which a job makes progress, between failures and checkpoints.

Devices fail independently, at a constant rate. A job stops to save, loses what it did since the
last checkpoint when a device fails, and then waits until it is running again. The expected time of
an interval with its save, failures while restarting not counted, is (Daly, A higher order estimate
of the optimum checkpoint interval, 2006)

    (M + R) (exp((I + S) / M) - 1)

for a mean time M between failures, an interval I, a save of S and R until it runs again. For short
intervals this is (1 - S/I - I/(2 M)) M / (M + R), the effective training time ratio as Kokolis et
al. write it (arXiv 2410.21680), whose best interval is sqrt(2 S M) (Young 1974).
"""

import math
from dataclasses import dataclass

from interlace.errors import InputError

LLAMA_3_PER_DEVICE_HOUR = 419 / (54 * 24 * 16384)
"""Unexpected interruptions of Llama 3 405B on 16,384 H100 in 54 days (arXiv 2407.21783): one in
3.1 hours, or in 50,700 hours of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How often devices fail, and what a failure and a checkpoint cost."""

    per_device_hour: float = LLAMA_3_PER_DEVICE_HOUR
    save_s: float = 5.0
    """For which training stops to save; of a checkpoint that is written meanwhile, the copy."""
    detect_s: float = 5.0
    """Until the others know."""
    restart_s: float = 60.0
    """From then until the first step after the checkpoint."""

    def __post_init__(self) -> None:
        for name in ("per_device_hour", "save_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(
                    f"{name} = {getattr(self, name)} is not above 0", hint=f"set {name} above 0"
                )
        for name in ("detect_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} = {getattr(self, name)}", hint=f"set {name} to 0 or more")

    def mean_time_s(self, devices: int) -> float:
        """Between failures of a job on so many devices."""
        if devices < 1:
            raise InputError(f"devices = {devices}", hint="1 or more")
        return 3600 / (self.per_device_hour * devices)


@dataclass(frozen=True, slots=True)
class Goodput:
    """What is left of a job's time."""

    share: float
    """Of its time that ends in a checkpoint."""
    interval_s: float
    """Between two checkpoints."""
    mean_time_s: float
    """Between failures."""
    saving: float
    """Share that goes to saving, were there no failures."""


def goodput(devices: int, failures: Failures, interval_s: float | None = None) -> Goodput:
    """Of a job on so many devices that saves every `interval_s` of training, or as is best.

    Raises InputError for an interval that is not above 0."""
    mean_s = failures.mean_time_s(devices)
    interval = best_interval_s(mean_s, failures.save_s) if interval_s is None else interval_s
    if not 0 < interval < math.inf:
        raise InputError(f"interval_s = {interval}", hint="seconds, above 0")
    again_s = failures.detect_s + failures.restart_s
    exponent = (interval + failures.save_s) / mean_s
    share = interval / ((mean_s + again_s) * math.expm1(exponent)) if exponent < _HOPELESS else 0.0
    return Goodput(share, interval, mean_s, failures.save_s / (interval + failures.save_s))


_HOPELESS = 500.0
"""Mean times without a failure that an interval would need: it never ends."""


def best_interval_s(mean_time_s: float, save_s: float) -> float:
    """The interval with the least expected time: 1 - I/M = exp(-(I + S)/M), by bisection. Near
    sqrt(2 S M) where that is short against M."""
    low, high = 0.0, mean_time_s
    for _ in range(100):
        middle = (low + high) / 2
        if 1 - middle / mean_time_s > math.exp(-(middle + save_s) / mean_time_s):
            low = middle
        else:
            high = middle
    return (low + high) / 2
