"""Drill: a model from one file of the user's own, trained by `interlace train` on two ranks."""

import json
import shutil
from pathlib import Path
from typing import ClassVar

import own_model
import pytest
from training import Workplace

from interlace.__main__ import main
from interlace.ranks.source_files import own_code_contents

FILE = Path(__file__).with_name("own_model.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A finished run of the file, which lies in the working folder under a name that Python finds
    nowhere else."""
    place = Workplace(tmp_path_factory.mktemp("own_model"))
    shutil.copy(FILE, place.folder / "model_of_mine.py")
    words = ("--model.architecture", "model_of_mine", "--train.steps", "2")
    place.train(*words, "--compare.steps", "2", "--checkpoint.every", "2", out="out")
    return place


def test_two_strands_train_it(place: Workplace) -> None:
    """Split over two ranks: the bits of one strand, and the losses of plain eager PyTorch."""
    comparison = json.loads((place.folder / "out" / "comparison.json").read_text())
    assert set(comparison["modes"]) == {"eager", "1", "2"}
    assert comparison["losses_identical"] is True
    assert comparison["max_relative_difference_to_eager"] <= 1e-6
    first, second = place.losses("out")
    assert second < first


def test_the_plan_has_its_operators(place: Workplace) -> None:
    """Gathers and scatters as the file's TENSOR_PLAN says, its running mean, and no attention."""
    plan = (place.folder / "out" / "plan.txt").read_text()
    assert "cumsum" in plan
    assert "reduce_scatter_tensor" in plan
    assert "attention" not in plan


def test_export_has_no_form_for_it(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`transformers` knows no such model: refused by name, and nothing is written."""
    monkeypatch.syspath_prepend(place.folder)
    exported = place.folder / "exported"
    assert main(["export", str(place.folder / "out"), str(exported)]) == 2
    assert "'model_of_mine' has no form that transformers reads" in capsys.readouterr().err
    assert not exported.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("own_modle", 'model.architecture = \'own_modle\' must be one of "llama", "gpt"'),
        ("own_model:Mixer", "has no build and no TENSOR_PLAN and no CONTEXT_PLAN"),
        ("own_model:Missing", "'own_model' has no 'Missing'"),
        ("own_model --parallel.context 2", "its plan names none"),
        ("test_own_model:Odd --parallel.tensor 2", "knows no role 'colum'"),
        ("test_own_model:Plain --parallel.tensor 2", "splits nothing"),
    ],
)
def test_what_a_file_does_not_offer_is_refused(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Wrong names, axes for which the file has no plan, and plans that do not fit."""
    monkeypatch.chdir(tmp_path)
    given = ["plan", "quickstart", "--hardware.peak_tflops", "1", "--hardware.memory_gb_per_s", "9"]
    assert main([*given, "--model.architecture", *words.split()]) == 2
    assert message in capsys.readouterr().err


class Plain:
    """As own_model, but split over no ranks."""

    build = staticmethod(own_model.build)
    CONTEXT_PLAN = own_model.CONTEXT_PLAN
    TENSOR_PLAN: ClassVar[dict[str, str]] = {}


class Odd(Plain):
    """A role that is misspelt."""

    TENSOR_PLAN: ClassVar[dict[str, str]] = {"blocks.*.mixer.up": "colum"}


def test_ranks_compare_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal files are equal whatever they lie in, another version differs, and so does no file."""
    seen = []
    for folder, more in (("one", ""), ("two", ""), ("three", "# changed\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file_of_mine.py").write_text(FILE.read_text() + more)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / folder)
            seen += own_code_contents(["file_of_mine"])
    seen += own_code_contents(["file_of_mine"])
    assert {each.name for each in seen} == {"source file 'file_of_mine.py'"}
    digests = [each.digest for each in seen]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
