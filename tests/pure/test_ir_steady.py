"""Proves what the steady state of a step is: the part between warm-up and drain."""

from interlace.ir.graph import COMPUTE_LANE
from interlace.ir.timeline import WAIT, Span, Timeline, compute_ns, steady_state, steady_window


def span(name: str, lane: str, start: int, end: int, strand: str, kind: str = "matmul") -> Span:
    return Span(name, kind, lane, start, end, strand)


def step_of_two() -> Timeline:
    """F1 with an exposed gather, F2|B1 with a transfer that is half hidden, B2 with an exposed
    scatter. The steady part is 20 to 60."""
    return Timeline(
        "2",
        0,
        (
            span("gather", "tp", 0, 10, "forward", "all_gather"),
            span("gather", COMPUTE_LANE, 0, 10, "forward", WAIT),
            span("f1", COMPUTE_LANE, 10, 20, "forward"),
            # A transfer of the warm-up reaches 5 into the steady part, hidden.
            span("head", "tp", 15, 25, "forward", "all_gather"),
            span("b1", COMPUTE_LANE, 20, 40, "backward"),
            span("scatter", "tp", 30, 50, "backward", "reduce_scatter"),
            span("scatter", COMPUTE_LANE, 40, 50, "backward", WAIT),
            span("f2", COMPUTE_LANE, 50, 60, "forward"),
            # And one of the drain begins 10 before its end, hidden, and is then waited for.
            span("tail", "tp", 50, 80, "backward", "reduce_scatter"),
            span("tail", COMPUTE_LANE, 60, 80, "backward", WAIT),
            span("b2", COMPUTE_LANE, 80, 90, "backward"),
        ),
    )


def test_warm_up_and_drain_do_not_count() -> None:
    """From the first backward operator to the end of the last forward one, spans cut there."""
    timeline = step_of_two()
    assert steady_window(timeline) == (20, 60)
    steady = steady_state(timeline)
    assert steady is not None
    assert steady.communication_ns() == 5 + 20 + 10
    assert steady.exposed_ns() == 10
    assert steady.hidden_fraction() == 1 - 10 / 35
    assert timeline.hidden_fraction() == 1 - 40 / (10 + 10 + 20 + 30)
    assert {span.name for span in steady.spans} == {"head", "b1", "scatter", "f2", "tail"}
    assert compute_ns(timeline) == 10 + 20 + 10 + 10
    assert compute_ns(steady) == 20 + 10


def test_an_operator_of_a_later_micro_batch_is_a_forward_one() -> None:
    """Whatever strand is not backward extends the window to the right."""
    extra = span("head of 3", COMPUTE_LANE, 60, 65, "next")
    timeline = step_of_two()
    assert steady_window(Timeline("2", 0, (*timeline.spans, extra))) == (20, 65)


def test_a_step_of_one_micro_batch_has_no_steady_state() -> None:
    """Forward is over when backward begins; and an empty timeline has none either."""
    alone = (span("f", COMPUTE_LANE, 0, 10, "forward"), span("b", COMPUTE_LANE, 10, 20, "backward"))
    for spans in (alone, alone[:1], ()):
        timeline = Timeline("1", 0, spans)
        assert steady_window(timeline) is None
        assert steady_state(timeline) is None
