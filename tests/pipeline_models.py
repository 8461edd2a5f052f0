"""Models as rows of units, drawn or made, for tests of the search for pipelines."""

from hypothesis import strategies as st

from interlace.search.pipelines.model_units import ModelUnit, PipelineProblem


def uneven(ranks: int, micro_batches: int, **more: object) -> PipelineProblem:
    """32 layers, every sixth of which takes longer, an embedding, and a head as long as three and
    a half."""
    embedding = ModelUnit(
        name="embedding", forward_ns=5_000, input_ns=0, weight_ns=5_000, boundary_ns=20_000,
        saved_bytes=1, held_bytes=300,
    )  # fmt: skip
    layers = []
    for number in range(32):
        ns = 302_000 if number % 6 == 5 else 214_000
        layers.append(
            ModelUnit(
                name=f"layers.{number}", forward_ns=ns, input_ns=ns, weight_ns=ns * 9 // 10,
                boundary_ns=20_000, saved_bytes=34, kept_bytes=20, held_bytes=100,
            )
        )  # fmt: skip
    head = ModelUnit(
        name="head", forward_ns=788_000, input_ns=788_000, weight_ns=788_000, saved_bytes=60,
        kept_bytes=60, held_bytes=300,
    )  # fmt: skip
    units = (embedding, *layers, head)
    return PipelineProblem(units=units, ranks=ranks, micro_batches=micro_batches, **more)  # type: ignore[arg-type]


TIMES = st.integers(1, 40)
SIZES = st.integers(0, 9)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    most_ranks: int = 3,
    most_units: int = 7,
    most_micro_batches: int = 6,
    overlaps: tuple[float, ...] = (0.0, 0.25),
) -> PipelineProblem:
    """Small problems without a limit of memory."""
    ranks = draw(st.integers(1, most_ranks))
    units = [
        ModelUnit(
            name=f"layers.{number}", forward_ns=draw(TIMES), input_ns=draw(TIMES),
            weight_ns=draw(TIMES), boundary_ns=draw(SIZES), saved_bytes=draw(SIZES),
            kept_bytes=draw(SIZES), held_bytes=draw(SIZES),
        )
        for number in range(draw(st.integers(ranks, most_units)))
    ]  # fmt: skip
    return PipelineProblem(
        units=tuple(units), ranks=ranks, micro_batches=draw(st.integers(1, most_micro_batches)),
        overlap=draw(st.sampled_from(overlaps)), most_chunks=2,
    )  # fmt: skip
