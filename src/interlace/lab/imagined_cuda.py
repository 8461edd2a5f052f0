"""The CUDA side of an imagined link: a stream on which a collective's time passes.

Per collective, on the link's stream: read the device's clock, fill in the result, and spin until
the modelled time since that reading has passed. The clock is %globaltimer, which counts real time
in steps of about a microsecond; a count of processor cycles would stretch when the device lowers
its clock under load. The spinning kernel has a block per multiprocessor that NCCL would hold, with
40 KiB of shared memory each, so that matmuls which need most of it run on the others.

The stream has high priority, as NCCL's has.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

CompileKernel = Callable[[str], Callable[..., Tensor]]
"""CUDA source of an element-wise function -> a function of tensors that runs it."""

ELEMENTS_PER_BLOCK = 512
"""128 threads with 4 elements each: the blocks of torch's element-wise kernels."""

READ_CLOCK = """
template <typename T> T read_clock(T slot) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return static_cast<T>(now);
}
"""
"""CUDA source: the device's clock, in ns."""

HOLD_UNTIL = """
template <typename T> T hold_until(T deadline) {
    __shared__ volatile char held[40960];
    held[threadIdx.x] = 0;
    unsigned long long now;
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (static_cast<T>(now) < deadline);
    return static_cast<T>(now);
}
"""
"""CUDA source: holds a block, and with 40 KiB of shared memory its part of a multiprocessor, until
a time on that clock."""


class CudaLink:
    """The stream of one link of one device."""

    def __init__(self, device: torch.device, sms_held: int, compile_kernel: CompileKernel) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._read_clock = compile_kernel(READ_CLOCK)
        self._hold_until = compile_kernel(HOLD_UNTIL)
        elements = max(1, sms_held) * ELEMENTS_PER_BLOCK
        self._slots = torch.zeros(elements, dtype=torch.int64, device=device)

    def start(
        self, fill: Callable[[], None], duration_ns: int, tensors: list[Tensor]
    ) -> "CudaWork":
        """Queue one collective behind the current stream and the link's earlier ones."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            deadlines = self._read_clock(self._slots).add_(duration_ns) if duration_ns else None
            fill()
            if deadlines is not None:
                self._hold_until(deadlines)
            end = torch.cuda.Event()
            end.record()
        return CudaWork(end, tensors)


class CudaWork(dist.Work):
    """A collective on a link's stream. It keeps its tensors alive until it is dropped itself,
    because their memory belongs to another stream."""

    def __init__(self, end: torch.cuda.Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self._end = end
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait; the caller goes on at once."""
        torch.cuda.current_stream(self._tensors[0].device).wait_event(self._end)
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device has got there."""
        return self._end.query()

    def is_success(self) -> bool:
        """Same as `is_completed`; errors surface where the device is synchronised."""
        return self._end.query()

    def result(self) -> list[Tensor]:
        """The tensors of the collective; the current stream waits."""
        self.wait()
        return self._tensors
