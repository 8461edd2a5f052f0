"""Traces are read in bounded memory, and what is no trace is refused with what to do."""

import gzip
import json
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_traces import TraceMaker

from interlace.errors import InputError
from interlace.explain.event_stream import EventStream
from interlace.explain.explanation import explain
from interlace.explain.kineto_collectives import (
    gloo_bytes,
    group_of,
    kernel_bytes,
    kernel_kind,
    kind_of,
)
from interlace.explain.kineto_events import nanoseconds
from interlace.explain.kineto_trace import rank_trace
from interlace.explain.rank_trace import Pass
from interlace.explain.step_choice import StepChoice
from interlace.ir import interval_sets as sets

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda each: (each[0], sum(each)))
)


def moments(intervals: Any) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_sets_of_moments(first: list[sets.Interval], second: list[sets.Interval]) -> None:
    a, b = sets.union(first), sets.union(second)
    assert moments(a) == moments(first)
    assert sets.length(a) == len(moments(first))
    assert moments(sets.common(a, b)) == moments(first) & moments(second)
    assert moments(sets.without(a, b)) == moments(first) - moments(second)


@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5), st.floats(allow_nan=False) | st.text() | st.integers()
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_events_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any], packed: bool
) -> None:
    """Whatever is in them, and whatever stands around the list."""
    path = tmp_path_factory.mktemp("t") / "any-name"
    text = json.dumps({"before": [1, {"a": 2.5}], "traceEvents": events, "after": 17})
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    stream = EventStream(path)
    assert list(stream) == events
    assert stream.header == {"before": [1, {"a": 2.5}], "after": 17}
    path.write_text(json.dumps(events))
    assert list(EventStream(path)) == events


def test_a_large_trace_takes_little_memory(tmp_path: Path) -> None:
    """24 MB with nothing in them but Python's stack, as `with_stack=True` writes it."""
    path = tmp_path / "large.json"
    one = json.dumps({"ph": "X", "cat": "python_function", "name": "f" * 400, "ts": 1.5, "dur": 2})
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        file.writelines(f"{one},\n" for _ in range(52_000))
        file.write(one + "]}")
    tracemalloc.start()
    count = sum(1 for _ in EventStream(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 52_001
    assert path.stat().st_size > 24_000_000
    assert peak < 12_000_000


WHOLE = '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 2}], "x": 1}'
DURATION = '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2}]}'
MARKED = DURATION.replace('"a"', '"my_step"').replace("cpu_op", "user_annotation")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "is empty", "export_chrome_trace"),
        ("  \n", "is empty", "export_chrome_trace"),
        ("step,time\n1,2\n", "is not JSON", "export_chrome_trace"),
        ('"a string"', "is not JSON: expected '{'", "export_chrome_trace"),
        ('{"events": []}', "no list 'traceEvents'", "output folder of a run"),
        ('{"traceEvents": 3}', "no list 'traceEvents'", "output folder of a run"),
        (WHOLE[:40], "was cut off", "copy it again"),
        (WHOLE[:-12], "was cut off", "copy it again"),
        (WHOLE[:-1], "was cut off", "copy it again"),
        (WHOLE.replace('"ts": 1', '"ts": one'), "is not JSON", "export_chrome_trace"),
        ('{"traceEvents": []}', "0 events and none with a duration", "export_chrome_trace"),
        ('[{"ph": "M"}]', "1 events and none with a duration", "export_chrome_trace"),
        (DURATION, "has no step marks: no annotation 'ProfilerStep'", "--between 120:480"),
        (MARKED, "its annotations are my_step", "--mark NAME"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(text: str, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        explain([path])
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert hint in caught.value.hint


def test_other_wrong_sources(tmp_path: Path) -> None:
    """Names that are not there, damaged gzip, empty folders, two files of one rank."""
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(WHOLE.encode() * 50)[:60])
    cases: list[tuple[list[Path], str]] = [
        ([tmp_path / "nothing.json"], "there is no file or folder"),
        ([packed], "ends before its gzip stream does"),
        ([tmp_path], "is not the folder of a run"),
        ([tmp_path, packed], "has no traces"),
        ([], "nothing to explain"),
    ]
    for sources, message in cases:
        with pytest.raises(InputError, match=message):
            explain(sources)
    twice = [simple().write(tmp_path / f"rank{i}.json") for i in range(2)]
    with pytest.raises(InputError, match="are both of rank 0"):
        explain(twice)
    nccl = TraceMaker()
    nccl.step(1, 0, 10)
    nccl.event("user_annotation", "nccl:all_reduce", 1, 5)
    with pytest.raises(InputError, match="1 calls of NCCL and no kernels") as caught:
        explain([nccl.write(tmp_path / "host.json")])
    assert "ProfilerActivity.CUDA" in caught.value.hint
    empty = TraceMaker()
    empty.step(1, 0, 10)
    with pytest.raises(InputError, match="no kernels and no operators"):
        explain([empty.write(tmp_path / "empty.json")])


def simple() -> TraceMaker:
    """Three steps with a kernel and a collective in each."""
    maker = TraceMaker()
    for number in range(3):
        begin = 1000 * number
        maker.step(number + 5, begin, 900)
        maker.kernel(begin + 10, begin + 100, 50 + number)
        maker.collective(begin + 20, begin + 200, 70)
    return maker


def test_steps_are_chosen(tmp_path: Path) -> None:
    """All but the last, by number, by another annotation, by time."""
    path = simple().write(tmp_path / "trace.json.gz")
    every = explain([path])
    assert every.steps == ("ProfilerStep#5", "ProfilerStep#6")
    assert "ProfilerStep#7, the last one of the trace, is left out" in every.left_out
    assert every.figures.compute_ns == 101_000
    assert every.figures.communication_ns == 140_000
    last = explain([path], StepChoice.of(steps="7"))
    assert (last.steps, last.figures.compute_ns) == (("ProfilerStep#7",), 52_000)
    pair = explain([path], StepChoice.of(steps="6-7"))
    assert pair.figures.compute_ns == 103_000
    window = explain([path], StepChoice.of(between="0.15:1.12"))
    assert window.figures.compute_ns == 51_000  # of kernels that start in it
    assert window.figures.communication_ns == 70_000
    named = simple()
    named.events = [
        event | {"name": "train_step"} if event["name"].startswith("ProfilerStep") else event
        for event in named.events
    ]
    named.kernel(950, 960, 30)  # between two steps: an evaluation
    marked = explain([named.write(tmp_path / "named.json")], StepChoice.of(mark="train_step"))
    assert marked.figures.compute_ns == every.figures.compute_ns
    assert marked.steps == ("train_step#0", "train_step#1")
    with pytest.raises(InputError, match="has no step 1 to 2") as caught:
        explain([path], StepChoice.of(steps="1-2"))
    assert "5 to 7" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"steps": "five"}, "--steps five"),
        ({"steps": "8-5"}, "ends before it begins"),
        ({"between": "3"}, "no range of time"),
        ({"between": "5:3"}, "no range of time"),
        ({"between": "3:5", "steps": "1"}, "leaves no step"),
    ],
)
def test_wrong_choices(words: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StepChoice.of(**words)


def test_collectives_are_named_as_pytorch_asked_for_them() -> None:
    """NCCL runs an all-to-all as SendRecv; sizes and groups stand in the arguments."""
    assert (
        kernel_kind("ncclDevKernel_SendRecv(x)", {"Collective name": "all_to_allv"}) == "all_to_all"
    )
    assert kernel_kind("ncclDevKernel_SendRecv(x)", {}) == "send"
    assert kernel_kind("ncclKernel_AllReduce_RING_LL_Sum_float(x)", {}) == "all_reduce"
    assert kernel_kind("ncclDevKernel_ReduceScatter_Sum_bf16(x)", {}) == "reduce_scatter"
    assert kind_of("_allgather_base") == "all_gather"
    assert kind_of("strange") == "strange"
    sizes = {"In msg nelems": 10, "Out msg nelems": 40, "dtype": "BFloat16"}
    assert kernel_bytes(sizes) == 80
    assert kernel_bytes(sizes | {"dtype": "Odd"}) is None
    assert kernel_bytes({}) is None
    assert gloo_bytes({"Input Dims": [[3, 4]], "Input type": ["float"]}) == 48
    assert gloo_bytes({"Input Dims": [[[3, 4], [2]]], "Input type": ["c10::BFloat16"]}) == 28
    assert gloo_bytes({}) is None
    listed = [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]},
        {"pg_name": "1", "pg_desc": "mesh_tp", "pg_size": 2, "ranks": [0, 1]},
    ]
    header = {"distributedInfo": {"pg_config": listed}}
    group = group_of({"Process Group Name": "1"}, header)
    assert (group.name, group.ranks, group.size) == ("mesh_tp", (0, 1), 2)
    assert group_of({}, header).name == ""
    shortened = {"Process Group Name": "9", "Process Group Ranks": "[0, 1, ...]", "Group size": 64}
    assert group_of(shortened, header).ranks == ()
    assert group_of(shortened, header).size == 64


@pytest.mark.parametrize("text", ["1683564901557893", "4458676524670.502", "0.001", "0"])
def test_times_keep_their_nanoseconds(text: str) -> None:
    assert nanoseconds(json.loads(text)) == int(Decimal(text) * 1000)


def test_collectives_of_gloo_run_beside_each_other(tmp_path: Path) -> None:
    """On gloo's threads; those of one thread one after the other, whenever they were asked for."""
    maker = TraceMaker()
    maker.step(1, 0, 1000)
    maker.event("cpu_op", "aten::mm", 0, 100)
    for call, start, length, thread in ((110, 120, 100, 7), (130, 150, 100, 8), (140, 230, 50, 7)):
        maker.event("cpu_op", "c10d::allreduce_", call, 5)
        maker.event("user_annotation", "gloo:all_reduce", start, length, tid=thread)
    trace = rank_trace(maker.write(tmp_path / "cpu.json"), StepChoice())
    assert [(c.lane, c.start_ns // 1000, c.end_ns // 1000) for c in trace.communicated] == [
        ("gloo 7", 110, 220),
        ("gloo 8", 130, 250),
        ("gloo 7", 220, 280),
    ]
    assert all(each.bytes is None for each in trace.communicated)  # no shapes in the file


def test_a_cpu_computes_where_operators_run(tmp_path: Path) -> None:
    """Operators inside others count once, those that start or await communication not at all, and
    a collective is under way from its call on."""
    maker = TraceMaker()
    maker.step(1, 0, 1000)
    maker.event("cpu_op", "aten::linear", 100, 100)
    maker.event("cpu_op", "aten::mm", 110, 80)
    maker.event("cpu_op", "c10d::allreduce_", 200, 10)
    maker.event("user_annotation", "gloo:all_reduce", 250, 150, tid=7,
                **{"Input Dims": [[8, 2]], "Input type": ["float"]})  # fmt: skip
    maker.event("cpu_op", "aten::copy_", 260, 20, tid=7)  # gloo's own
    maker.event("cpu_op", "autograd::engine::evaluate_function: M", 220, 100)
    maker.event("cpu_op", "_c10d_functional::wait_tensor", 290, 30)
    maker.event("cpu_op", "aten::add", 500, 40)
    trace = rank_trace(maker.write(tmp_path / "cpu.json"), StepChoice())
    assert trace.device == "CPU"
    work = [(each.name.split("::")[1], each.start_ns, each.end_ns) for each in trace.computed]
    assert work == [
        ("linear", 100_000, 200_000),
        ("engine", 220_000, 290_000),
        ("add", 500_000, 540_000),
    ]
    parts = [each.place.part for each in trace.computed]
    assert parts == [Pass.FORWARD, Pass.BACKWARD, Pass.END]
    [each] = trace.communicated
    assert (each.kind, each.bytes, each.group) == ("all_reduce", 64, "tp")
    assert (each.start_ns, each.end_ns) == (200_000, 400_000)
    found = explain([tmp_path / "cpu.json"]).figures
    assert (found.compute_ns, found.communication_ns, found.hidden_ns) == (210_000, 200_000, 70_000)
