"""What people bring to `compile_step` that had ended in an error of something else."""

import re

import pytest
import torch
from test_hf_trainer import bert
from torch import Tensor, nn

import interlace
from interlace import start_progress
from interlace.config import PlanConfig
from interlace.errors import InputError

QUICK = PlanConfig(cluster="h100", search="list")
"""Times are computed: measuring takes longer than all else."""


class TwoNames(nn.Module):
    """The same sub-module under two names, as the prompt tuning of PEFT has an embedding."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.again = self.table
        self.head = nn.Linear(8, 8)
        self.table.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x) + self.again(x.flip(0)))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_sub_module_under_two_names(frozen: bool) -> None:
    """torch's export had left tensors of its own in the module."""
    model = TwoNames(frozen=frozen)
    batches = [(torch.randint(0, 8, (4,)),) for _ in range(2)]
    step = interlace.compile_step(
        model, lambda m, x: m(x).square().mean(), batches[0], config=QUICK
    )
    assert type(model.table.weight) is nn.Parameter
    assert step.compare(batches).worst < 1e-6


def test_what_a_classifier_notes_of_its_labels() -> None:
    """Eager forwards note the kind of labels, and had so changed what a step relies on."""
    model = bert()
    example = {"input_ids": torch.randint(0, 64, (2, 6)), "labels": torch.tensor([0, 2])}
    step = interlace.compile_step(model, lambda m, batch: m(**batch).loss, example, config=QUICK)
    assert model.config.problem_type == "single_label_classification"
    model(**example)
    assert step.compare([example] * 2).worst < 1e-5
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(interlace.errors.RunError, match="problem_type"):
        step([example] * 2)


def test_no_module() -> None:
    with pytest.raises(InputError, match=r"module is a function, no nn\.Module"):
        interlace.compile_step(lambda x: x, lambda m, x: m(x), (torch.ones(2),))  # type: ignore[arg-type]


def test_a_recorded_step_and_a_single_micro_batch() -> None:
    """The text of a step has what was measured; the hint names what `compile_step` has."""
    layer = nn.Linear(4, 4)
    step = interlace.compile_step(layer, lambda m, x: m(x).sum(), (torch.ones(2, 4),), config=QUICK)
    assert "recorded" not in repr(step)
    step.record([(torch.ones(2, 4),)] * 2)
    assert re.search(r"; recorded: [0-9.,]+ ms with 0\.00 exposed\)$", repr(step))
    with pytest.raises(InputError, match="not 1") as found:
        step([(torch.ones(2, 4),)])
    assert found.value.hint == (
        "give the step two micro-batches or more (in a run file train.micro_batches), or set "
        "strands to 1"
    )


def test_a_slow_compilation_says_what_it_works_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, after some silence; a fast one says nothing."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    given = (layers, lambda m, x: m(x).sum(), (torch.ones(2, 4),))
    interlace.compile_step(*given, config=QUICK)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(start_progress, "QUIET_S", 0.005)
    interlace.compile_step(*given, config=QUICK)
    said = capsys.readouterr().err.splitlines()
    assert "compile_step: tracing the module: 0 s, 0 s since the start" in said


def test_a_bound_of_memory_names_what_the_caller_has() -> None:
    """In words of `compile_step` beside those of run files, of which its callers have none."""
    layer = nn.Linear(64, 64)
    tight = PlanConfig(cluster="h100", search="list", memory_mib=0.001)
    with pytest.raises(InputError, match="more than the bound") as found:
        interlace.compile_step(
            layer, lambda m, x: m(x).square().sum(), (torch.ones(64, 64),), config=tight
        )
    assert "compile_step(config=PlanConfig(memory_mib=" in found.value.hint
