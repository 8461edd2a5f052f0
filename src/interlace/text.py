"""Numbers and tables as people read them: plain text, standard library only."""

import math
from collections.abc import Sequence

_NS_PER_MS = 1e6
"""Nanoseconds of a millisecond."""


def milliseconds(time_ns: float) -> str:
    """`0.03`, `4.2`, `812` or `1,801`: milliseconds with three digits or so, without the unit."""
    return number(time_ns / _NS_PER_MS)


def number(value: float) -> str:
    """A number with about three significant digits and thousands separated."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{value:,.{digits}f}"


def percent(fraction: float) -> str:
    """`3.2 %`."""
    return f"{100 * fraction:.1f} %"


def size(count_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1: `64.0 KiB`."""
    value, units = float(count_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int) -> str:
    """Columns padded to equal width; the first `text_columns` to the left, the rest right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = []
    for row in [header, rule, *rows]:
        cells = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bits_per_byte(loss_nats: float, bytes_per_token: float | None) -> float | None:
    """Mean loss per token in nats, as bits per byte of text: comparable across tokenizers.

    None where the bytes of a token are not known: of token ids that were made elsewhere.
    """
    return None if bytes_per_token is None else bits_per_token(loss_nats) / bytes_per_token


def bits_per_token(loss_nats: float) -> float:
    """Mean loss per token in bits: comparable between runs on the same tokens only."""
    return loss_nats / math.log(2)


def in_bits(loss_nats: float, bytes_per_token: float | None) -> str:
    """`5.895 bits per byte`, or per token where the bytes of a token are not known."""
    bits = bits_per_byte(loss_nats, bytes_per_token)
    if bits is None:
        return f"{bits_per_token(loss_nats):.3f} bits per token"
    return f"{bits:.3f} bits per byte"
