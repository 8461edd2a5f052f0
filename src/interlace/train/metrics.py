"""What a run writes about itself: metrics.jsonl, one line per step, and the numbers in them."""

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from interlace.claims import Claim
from interlace.errors import InputError, RunError
from interlace.model_config import ModelConfig, expert_width_of, head_size_of
from interlace.run_files import METRICS, TENSORBOARD, change_each
from interlace.text import size

COLUMNS = 80
"""Of a terminal as it opens; longer lines wrap in the middle of a number."""
_GAP = "  "
WHOLE_MS = 10
"""Durations from here on are shown in whole milliseconds."""
FEED_FORWARD_MATRICES = {"llama": 3, "gpt": 2, "moe": 3}
"""Gate, up and down, or up and down; the formula below holds for these architectures only."""


def model_flops_per_token(model: ModelConfig, vocab_size: int, sequence_length: int) -> int | None:
    """FLOPs of forward and backward per token: 6 N + 12 layers heads head_size sequence_length.
    None for an architecture that this formula does not know.

    N are the parameters of matmuls that a token meets: attention, feed-forward and head, of experts
    those that it chooses, with their router; norms and the embedding look-up do not count. As in
    PaLM (appendix B), attention counts in full although a causal kernel computes half of it, and
    recomputation does not count.
    """
    matrices = FEED_FORWARD_MATRICES.get(model.architecture)
    if matrices is None or model.source != "interlace":
        return None
    inner = model.heads * head_size_of(model)
    kv_inner = model.kv_heads * head_size_of(model)
    parameters = model.layers * model.width * 2 * (inner + kv_inner) + model.width * vocab_size
    dense = model.layers
    if experts := model.experts.count:
        dense = model.experts.dense_layers
        met = model.experts.chosen * expert_width_of(model) + model.experts.shared_width
        parameters += (model.layers - dense) * model.width * (matrices * met + experts)
    parameters += dense * matrices * model.width * model.ffn_width
    return 6 * parameters + 12 * model.layers * inner * sequence_length


def step_line(values: Mapping[str, Any]) -> str:
    """A step for people, in lines of at most `COLUMNS` columns: what one has no room for begins a
    further one, below the first field. A field that is absent or None is left out.

    Keys: step, steps, loss, tokens_per_s, step_ms, lr, grad_norm, mfu (0..1), expert_imbalance,
    exposed_ms, bubble_fraction, and of collectives the all-to-alls. Others are ignored.
    """
    begin = ""
    if (step := values.get("step")) is not None:
        steps = values.get("steps")
        begin = f"step {step:>5}" + (f"/{steps}" if steps is not None else "") + _GAP
    lines: list[list[str]] = [[]]
    for field in _fields(values):
        if len(begin + _GAP.join([*lines[-1], field])) > COLUMNS:
            lines.append([])
        lines[-1].append(field)
    return f"\n{' ' * len(begin)}".join([begin + _GAP.join(lines[0]), *map(_GAP.join, lines[1:])])


def _fields(values: Mapping[str, Any]) -> list[str]:
    """What is known of a step, as it is shown, what every step has first."""
    step_ms, exposed_ms = values.get("step_ms"), values.get("exposed_ms")
    parts = _present(values, [("loss", "loss {:.3f}"), ("tokens_per_s", "{:,.0f} tok/s")])
    if step_ms is not None:
        parts.append(_ms(step_ms))
    parts += _present(values, [("lr", "lr {:.1e}"), ("grad_norm", "grad {:.2f}")])
    if (mfu := values.get("mfu")) is not None:
        parts.append(f"MFU {100 * mfu:.1f} %")
    parts += _present(values, [("expert_imbalance", "experts {:.2f}x")])
    if exposed_ms is not None:
        share = f" ({exposed_ms / step_ms:.0%})".replace("%", " %") if step_ms else ""
        parts.append(f"exposed {_ms(exposed_ms)}{share}")
    if (bubble := values.get("bubble_fraction")) is not None:
        parts.append(f"bubble {100 * bubble:.1f} %")
    if exchanges := _all_to_alls(values.get("collectives", {})):
        sent, waited_ms = exchanges
        parts.append(f"all-to-all {size(sent)}, exposed {_ms(waited_ms)}")
    return parts


def _all_to_alls(collectives: Mapping[str, Mapping[str, float]]) -> tuple[int, float] | None:
    """(bytes, ms in which the rank waited) of all links together; None if there were none."""
    found = [each for name, each in collectives.items() if name.startswith("all_to_all.")]
    if not found:
        return None
    return int(sum(each["bytes"] for each in found)), sum(each["exposed_ms"] for each in found)


def _present(values: Mapping[str, Any], fields: list[tuple[str, str]]) -> list[str]:
    return [text.format(values[key]) for key, text in fields if values.get(key) is not None]


def _ms(duration_ms: float) -> str:
    return f"{duration_ms:,.0f} ms" if duration_ms >= WHOLE_MS else f"{duration_ms:.2f} ms"


class MetricsWriter:
    """Appends events to `directory`/metrics.jsonl, and to TensorBoard if asked. Rank 0 makes one.

    When `write` returns, a crash of this process cannot lose the event; RunError if
    it could not be written.
    """

    def __init__(self, directory: Path, *, tensorboard: bool, claim: Claim | None = None) -> None:
        """Make the folder and the file; InputError if the extra `tensorboard` is missing.

        With a `claim`, a `write` after another run has taken the folder over raises ClaimLost.
        """
        self.path = directory / METRICS
        # Looked for first, so that its absence leaves no folder behind.
        summary_writer = _summary_writer() if tensorboard else None
        self._claim = claim
        self._tensorboard: Any = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _drop_half_line(self.path)
            # Unbuffered: a line that failed must not be tried again at close.
            self._file = self.path.open("ab", buffering=0)
            if summary_writer is not None:
                self._tensorboard = summary_writer(log_dir=str(directory / TENSORBOARD))
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror}",
                hint="set output.directory to a folder that can be written",
            ) from error

    def write(self, event: str, **values: Any) -> None:
        """One line {"event", "unix_time_s", **values}; NaN and infinity as strings.

        An event with a `step` also sends its numbers to TensorBoard: as event/key, those within
        a table as event/key/key, and a list of numbers as a histogram.
        """
        if self._claim is not None:
            self._claim.check()
        values = {key: change_each(value, _plain) for key, value in values.items()}
        record = {"event": event, "unix_time_s": round(time.time(), 3), **values}
        line = json.dumps(change_each(record, _finite), allow_nan=False, separators=(",", ":"))
        try:
            self._append(line.encode() + b"\n")
            if self._tensorboard is not None and "step" in values:
                step = values.pop("step")
                self._mirror(event, values, step)
        except OSError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Close files; safe to call twice."""
        tensorboard, self._tensorboard = self._tensorboard, None
        try:
            self._file.close()
            if tensorboard is not None:
                tensorboard.close()
        except OSError as error:
            raise self._lost(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        # Linux goes on writing to a file that was deleted, and nobody would ever read it.
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was deleted while the run went on")
        while data:
            data = data[self._file.write(data) :]

    def _mirror(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        import numpy as np  # noqa: PLC0415  TensorBoard needs it, nothing else here

        for key, value in values.items():
            name = f"{prefix}/{key}"
            if isinstance(value, Mapping):
                self._mirror(name, value, step)
            elif isinstance(value, list) and value and all(map(_is_number, value)):
                self._tensorboard.add_histogram(name, np.array(value), step)
            elif _is_number(value):
                self._tensorboard.add_scalar(name, value, step)

    def _lost(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self.path}: {error.strerror or error}",
            hint="free some space, or set output.directory to another folder",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InputError(
            "output.tensorboard = true needs the package tensorboard",
            hint="pip install interlace[tensorboard], or set output.tensorboard to false",
        ) from error
    return SummaryWriter


def _drop_half_line(path: Path) -> None:
    """A killed run may leave half a line, and the next event must not be glued to it."""
    if not path.is_file() or not (data := path.read_bytes()) or data.endswith(b"\n"):
        return
    os.truncate(path, data.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    """Tensors and numpy values as numbers and lists, paths as text."""
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the strings in NOT_FINITE."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
