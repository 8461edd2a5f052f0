"""`interlace bench` gives a bench its own options, as the types that it asks for."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import interlace.bench
from interlace.__main__ import main
from interlace.bench.imagined import MODELS, ImaginedCase, configuration
from interlace.rules import check

IMAGINED = '''"""One device."""
CALLS = []


def run(*, quick, json_path, cluster: str = "a800", world: int = 8, slower: float = 1.0) -> int:
    CALLS.append((quick, json_path, cluster, world, slower))
    return 0
'''
STRANDS = '"""Two strands."""\ndef run(*, quick, json_path) -> int:\n    return 5\n'


@pytest.fixture
def benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake benches in place of ours; the real ones come back afterwards."""
    names = [f"interlace.bench.{name}" for name in ("imagined", "strands")]
    for name, text in zip(names, (IMAGINED, STRANDS), strict=True):
        (tmp_path / f"{name.rpartition('.')[2]}.py").write_text(text)
    monkeypatch.setattr(interlace.bench, "__path__", [str(tmp_path)])
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("benches")
def test_options_arrive_with_their_types() -> None:
    """Words become what `run` is annotated with; what is not given keeps its default."""
    assert (
        main(
            ["bench", "imagined", "--world", "16", "--slower=2.5", "--quick", "--json", "rows.json"]
        )
        == 0
    )
    assert main(["bench", "imagined"]) == 0
    assert [
        (True, Path("rows.json"), "a800", 16, 2.5),
        (False, None, "a800", 8, 1.0),
    ] == sys.modules["interlace.bench.imagined"].CALLS


@pytest.mark.usefixtures("benches")
def test_strands_of_a_cluster_are_imagined() -> None:
    """With --cluster or --world, `strands` is measured on this one device; without, as ever."""
    assert main(["bench", "strands"]) == 5
    assert main(["bench", "strands", "--cluster", "h100"]) == 0
    assert main(["bench", "strands", "--world", "4"]) == 0
    calls = sys.modules["interlace.bench.imagined"].CALLS
    assert [(cluster, world) for _, _, cluster, world, _ in calls] == [("h100", 8), ("a800", 4)]


@pytest.mark.usefixtures("benches")
def test_the_list_shows_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the bench that has them."""
    assert main(["bench"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["imagined", "One", "device."],
        ["options:", "--cluster", "--world", "--slower"],
        ["strands", "Two", "strands."],
    ]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ("imagined --wold 8", "bench imagined has no option --wold", "world"),
        ("strands --jsn x", "bench strands has no option --jsn", "json"),
        ("imagined --world eight", "--world eight must be a whole number", "--world 8"),
        ("imagined --world 2.5", "--world 2.5 must be a whole number", "--world 8"),
        ("imagined --slower fast", "--slower fast must be a number", "--slower 1.0"),
    ],
)
@pytest.mark.usefixtures("benches")
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str, hint: str
) -> None:
    """Exit code 2; the message has the words, the hint the way out."""
    assert main(["bench", *arguments.split()]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert message in first
    assert hint in last


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ("--cluster a80", "there is no cluster 'a80'", "a800"),
        ("--cluster no.toml", "there is no cluster file no.toml", "h100"),
        ("--cluster a800 --model 9b", "there is no model '9b'", "39b"),
        (
            "--cluster a800 --world 3",
            "--world 3 cannot share the 8 key-value heads",
            "divisor of 8",
        ),
        ("--cluster a800 --world 1", "--world 1 cannot share", "2 or more"),
        ("--cluster a800 --layers 0", "--layers 0 leaves no model", "1 or more"),
        ("--cluster a800 --slower -1", "cannot be -1.0 times slower", "1 keeps"),
    ],
)
def test_wrong_clusters_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str, hint: str
) -> None:
    """By the real bench, before anything is built."""
    assert main(["bench", "strands", *arguments.split()]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert message in first
    assert hint in last


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_model_fits_the_world(model: str, on_gpu: bool) -> None:
    """Shapes divide among 8 ranks, and all byte tokens are rows of rank 0."""
    case = ImaginedCase(cluster="a800", world=8, model=model, layers=2, slower=1.0, steps=3)
    config = configuration(case, on_gpu=on_gpu)
    check(config)
    assert config.model.vocab_size // case.world >= 260
