"""Unmodified `transformers` models with experts train as their own code does, on one rank, on
data-parallel ones and with their experts dealt to ranks; what cannot be split is refused by name.

These are also the scenarios of `transformers`' own mixin for expert parallelism (forward, backward,
the gradient of every parameter against one process), whose tolerance is 5e-3. Wide are those of our
Qwen3-MoE and PhiMoE by two strands; by these Mixtral runs always."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import Runs
from hugging_face_models import MOE, PLAIN, VOCABULARY, batch, saved
from mixin_scenarios import LAYOUTS, TOLERANCE, scenario
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import interlace
from interlace.checkpoint.to_hugging_face import export_checkpoint, sound_manifest
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.models.transformers_model import TransformersLoss, build
from interlace.parallel.expert import apply_expert_parallel, dealt_parameters
from interlace.parallel.plans import apply_published_plan
from interlace.parallel.published_experts import adopt_published_experts
from interlace.report.build import build_report
from wide import WIDE

BOUND = 1e-5
"""Of gradients, over the largest one, in float32: grouped matmuls add in another order than the
loop over experts."""
FLOAT64_BOUND = 1e-10
"""The same in float64."""
QUICK = PlanConfig(search="list", cluster="h100")
TRACED = {"mixtral": False, "mixtral, tied, linear": True, "qwen3_moe, dense layers": True}
"""Models, and whether their config.json asks for the auxiliary loss."""


def loss_fn(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return module(tokens, targets)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Four micro-batches."""
    tokens, targets = batch()
    return [(tokens.roll(n, 1).contiguous(), targets.roll(n, 1).contiguous()) for n in range(4)]


def built(folder: Path | str) -> nn.Module:
    return build(str(folder), vocab_size=VOCABULARY, sequence_length=24)


def settled(model: Any) -> Any:
    """Routers of PhiMoE take the likeliest experts, as in evaluation."""
    for name, module in model.named_modules():
        if name.endswith(".router"):
            module.eval()
    return model


def eager(folder: Path | str) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients of their own code, loop over experts and all, on one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
    settled(model)
    total = 0.0
    for tokens, targets in batches():
        found = model(input_ids=tokens)
        loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), targets.flatten())
        if found.aux_loss is not None:
            loss = loss + model.config.router_aux_loss_coef * found.aux_loss
        (loss / 4).backward()
        total += loss.item() / 4
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def step_of(folder: Path | str, strands: int, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """The same of a compiled step."""
    module = TransformersLoss(built(folder))
    mine: Any = options.pop("mine", slice(None))
    step = interlace.compile_step(
        module, loss_fn, batches()[0], strands=strands, config=QUICK, **options
    )
    loss = float(step(batches()[mine]))
    named = module.model.named_parameters()
    return loss, {name: p.grad.clone() for name, p in named if p.grad is not None}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / largest


@pytest.mark.parametrize("case", TRACED)
def test_on_one_rank(case: str, tmp_path: Path) -> None:
    """Loss and gradients are those of their own code, with its auxiliary loss if config.json asks
    for it, and two strands have the bits of one."""
    save(case, tmp_path, auxiliary=TRACED[case])
    wanted = eager(tmp_path)
    one, two = step_of(tmp_path, 1), step_of(tmp_path, 2)
    assert one[0] == two[0]
    assert all(torch.equal(one[1][name], gradient) for name, gradient in two[1].items())
    assert abs(one[0] - wanted[0]) < BOUND
    assert error(one[1], wanted[1]) < BOUND


def save(case: str, folder: Path, *, auxiliary: bool) -> None:
    saved(case, folder)
    file = folder / "config.json"
    settings = {"output_router_logits": auxiliary, "router_aux_loss_coef": 0.1}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def replicas(folder: str) -> dict[str, float]:
    """On each of two ranks, which see two micro-batches each."""
    with gloo_group(timeout_s=60) as rank:
        del rank
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
        mine = slice(2 * mesh.get_rank(), 2 * mesh.get_rank() + 2)
        _, found = step_of(folder, 2, mesh=mesh, mine=mine)
        return {"error": error(found, eager(folder)[1])}


def test_on_data_parallel_ranks(tmp_path: Path) -> None:
    """Gradients are averaged as of any model."""
    save("mixtral", tmp_path, auxiliary=False)
    args = [str(tmp_path)]
    results = run_ranks("test_hugging_face_experts:replicas", 2, args=args, timeout_s=100)
    assert all(result.value["error"] < BOUND for result in results)


def tensor_parallel(folder: str) -> str:
    with gloo_group(timeout_s=60):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(InputError) as refused:
            apply_published_plan(built(folder), mesh)
        return refused.value.message


def give(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A list: plain code gets its numbers in place of those that it draws, in their order."""
    numbers: list[Tensor] = []

    def given(like: Tensor) -> Tensor:
        number = numbers.pop(0)
        assert number.shape == like.shape
        return number

    for owner, name in ((Tensor, "exponential_"), (Tensor, "uniform_"), (torch, "rand_like")):
        monkeypatch.setattr(owner, name, given)
    return numbers


@pytest.mark.parametrize("case", ["phimoe", "phimoe, plain"])
def test_phimoe_draws_its_experts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients are those of its own code that is given the same numbers; long rotary
    positions are those of its own code too."""
    from transformers import AutoModelForCausalLM

    saved(case, tmp_path)
    module = TransformersLoss(built(tmp_path))
    step = interlace.compile_step(module, loss_fn, batches()[0], strands=2, config=QUICK)
    operator = torch.ops.interlace.drawn.default
    nodes = step.strands.graphs["forward"].graph.find_nodes(op="call_function", target=operator)
    given = [[operator(step.seeds(n), *node.args[1:]) for node in nodes] for n in range(4)]
    loss = float(step(batches()))
    found = {name: p.grad.clone() for name, p in module.model.named_parameters()}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").train()
    numbers, total = give(monkeypatch), 0.0
    for (tokens, targets), drawn in zip(batches(), given, strict=True):
        numbers += drawn
        logits = plain(input_ids=tokens).logits
        each = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 4
        each.backward()
        assert not numbers
        total += each.item()
    assert abs(loss - total) < BOUND
    assert error(found, {name: p.grad for name, p in plain.named_parameters()}) < BOUND
    if case == "phimoe":
        with pytest.raises(InputError, match="12 positions, and rotary positions were made for 24"):
            module.model(input_ids=batches()[0][0][:, :12])


DEALT = {"mixtral": True, "qwen3_moe, dense layers": False, "phimoe": False}
"""Models whose experts are dealt to ranks, and whether they add their auxiliary loss."""


def dealt_step(
    model: nn.Module, strands: int, mesh: DeviceMesh, rank: int
) -> tuple[float, dict[str, Tensor], list[str]]:
    """The loss of a step of a rank's micro-batches, gradients, and which parameters are dealt."""
    apply_expert_parallel(model, mesh)
    step = interlace.compile_step(
        TransformersLoss(model), loss_fn, batches()[0], mesh=mesh, strands=strands, config=QUICK
    )
    loss = float(step(batches()[2 * rank : 2 * rank + 2]))
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return loss, gradients, sorted(dealt_parameters(model))


def dealt(folders: list[str]) -> list[dict[str, Any]]:
    """On each of two ranks, which see two micro-batches each and hold half of the experts."""
    facts = []
    with gloo_group(timeout_s=60):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        rank = mesh.get_rank()
        for folder in folders:
            loss, wanted = eager(folder)
            seen = [
                dealt_step(settled(built(folder)), strands, mesh["ep"], rank) for strands in (1, 2)
            ]
            whole = torch.tensor(seen[0][0])
            dist.all_reduce(whole)
            parts = {
                name: each.chunk(2)[rank] if ".experts." in name else each
                for name, each in wanted.items()
            }
            experts = sorted(name for name in parts if ".experts." in name)
            judged = folder, batches(), loss, wanted
            ours = [scenario(each, *judged, traced=folder == folders[0]) for each in LAYOUTS]
            facts.append({
                "loss": abs(float(whole) / 2 - loss),
                "gradients": error(seen[0][1], parts),
                "bitwise": seen[0][0] == seen[1][0]
                and all(torch.equal(seen[1][1][name], each) for name, each in seen[0][1].items()),
                "dealt": seen[0][2] == experts,
                "ours": ours,
            })  # fmt: skip
        one, two = (dealt_step(built(folders[-1]), n, mesh["ep"], rank) for n in (1, 2))
        facts[-1]["drawn"] = one[0] == two[0] != seen[0][0]
        dist.barrier()
    return facts


def test_experts_are_dealt_by_the_published_plan(tmp_path: Path) -> None:
    """A step of unmodified models whose experts lie on two ranks: loss and gradients of all
    parameters are those of plain `transformers` on one process; two strands have one's bits. And
    so are those of our models of the same files, under tensor and under expert parallelism."""
    folders = []
    for number, (case, auxiliary) in enumerate(DEALT.items()):
        save(case, tmp_path / str(number), auxiliary=auxiliary)
        folders.append(str(tmp_path / str(number)))
    for result in run_ranks("test_hugging_face_experts:dealt", 2, args=[folders], timeout_s=300):
        for found in result.value:
            assert found["loss"] < BOUND, found
            assert found["gradients"] < BOUND, found
            assert found["bitwise"], found
            assert found["dealt"], found
            for ours in found["ours"]:
                assert ours["logits"], ours
                assert ours["loss"] < TOLERANCE, ours
                assert not ours["wrong"], ours
        assert result.value[-1]["drawn"], "PhiMoE draws in training, by any number of strands alike"


def by_strands(folders: list[str]) -> list[dict[str, Any]]:
    """On each of two ranks: the scenarios of our models by two strands in a random order."""
    found = []
    with gloo_group(timeout_s=60):
        for folder in folders:
            loss, wanted = eager(folder)
            judged = folder, batches(), loss, wanted
            found += [scenario(each, *judged, traced=True) for each in LAYOUTS]
        dist.barrier()
    return found


@WIDE
def test_scenarios_by_two_strands(tmp_path: Path) -> None:
    """Of the other models, as of Mixtral above."""
    _, *others = DEALT.items()
    folders = [str(tmp_path / str(number)) for number in range(len(others))]
    for (case, auxiliary), folder in zip(others, folders, strict=True):
        save(case, Path(folder), auxiliary=auxiliary)
    target = "test_hugging_face_experts:by_strands"
    for result in run_ranks(target, 2, args=[folders], timeout_s=240):
        assert len(result.value) == len(folders) * len(LAYOUTS)
        for ours in result.value:
            assert ours["logits"], ours
            assert ours["loss"] < TOLERANCE, ours
            assert not ours["wrong"], ours


def test_dealt_experts_beside_shared_weights(tmp_path: Path) -> None:
    """The same of the trainer's layouts, in float64: ZeRO-1 and ZeRO-3."""
    cases = []
    for layout, case in (
        ("zero1x2 ep2", "mixtral"),
        ("zero3x2 ep2", "qwen3_moe, dense layers"),
    ):
        save(case, tmp_path / layout, auxiliary=False)
        cases.append((layout, str(tmp_path / layout)))
    for result in run_ranks("test_data_parallel:table", 2, args=[cases], timeout_s=200):
        for facts in result.value:
            assert facts["different"] == [], facts
            assert facts["strands"][1] < FLOAT64_BOUND, facts
            assert facts["eager"][1] < FLOAT64_BOUND, facts


def test_trained_and_published_again(tmp_path: Path) -> None:
    """`interlace train` of a folder of Mixtral's on one rank, on two that have half of the experts
    each, and on one again from their checkpoint: the same losses, and an export that
    `transformers` reads with the weights of the checkpoint."""
    from transformers import AutoModelForCausalLM, MixtralConfig, PhimoeConfig

    runs = Runs(tmp_path)
    shape = {**MOE, "vocab_size": 256, "num_hidden_layers": 1, "num_local_experts": 4}
    AutoModelForCausalLM.from_config(MixtralConfig(**shape)).save_pretrained(tmp_path / "given")
    common: dict[str, Any] = {
        "parallel__tensor": 1, "train__steps": 4, "checkpoint__every": 2,
        "model__source": "hugging_face", "model__config": tmp_path / "given",
        "plan__trial_steps": 0,
    }  # fmt: skip
    one = common | {"train__micro_batch_size": 4}
    two = common | {"parallel__data_shard": 2, "parallel__expert": 2, "strands": "2"}
    two |= {"parallel__expert_sends": "merged"}
    runs.train("one", 1, **one)
    for result in runs.train("two", 2, **two):
        assert result.value["error"] == ""
    assert runs.losses("two") == pytest.approx(runs.losses("one"), rel=1e-5)
    first, second = (runs.events(out, "step")[0] for out in ("one", "two"))
    assert sum(first["expert_load"]) == pytest.approx(1, abs=1e-4)
    assert second["expert_load"] == pytest.approx(first["expert_load"], abs=1e-6)
    assert 1 <= first["expert_imbalance"] <= 2
    assert second["expert_dropped"] == 0
    assert "Load of each expert over steps" in build_report(runs.folder / "two")[0].read_text()
    source = runs.checkpoint("two", 2)
    runs.train("again", 1, **one | {"checkpoint__resume": source, "checkpoint__every": 0})
    assert runs.losses("again") == pytest.approx(runs.losses("one")[2:], rel=1e-5)
    for out in ("one", "two"):
        folder = runs.checkpoint(out, 4)
        export_checkpoint(folder, sound_manifest(folder), tmp_path / f"{out}-hf", torch.float32)
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / f"{out}-hf").state_dict()
        for out in ("one", "two")
    )
    assert first.keys() == second.keys()
    for name, each in first.items():
        torch.testing.assert_close(second[name], each, rtol=1e-3, atol=1e-5)
    shape = {**MOE, "vocab_size": 256, "num_hidden_layers": 1, "num_local_experts": 4}
    phi = AutoModelForCausalLM.from_config(PhimoeConfig(**shape, rope_parameters=PLAIN))
    phi.save_pretrained(tmp_path / "drawn")
    drawn = two | {"model__config": tmp_path / "drawn", "checkpoint__every": 0, "train__steps": 1}
    for result in runs.train("drawn", 2, **drawn):
        assert result.value["error"] == "", "ZeRO-3: its own code evaluates on gathered weights"
    assert len(runs.events("drawn", "evaluate")) == 2
    assert sum(runs.events("drawn", "step")[0]["expert_load"]) == pytest.approx(1, abs=1e-4)
    (result,) = runs.train("three", 1, **common | {"parallel__expert": 3})
    assert "does not fit into the 1 ranks" in result.value["error"]


def test_what_is_refused(tmp_path: Path) -> None:
    """Plans that split experts by tensor parallelism have styles of their own, and experts with
    biases are not computed by our dispatch."""
    saved("mixtral", tmp_path / "mixtral")
    args = [str(tmp_path / "mixtral")]
    found = run_ranks("test_hugging_face_experts:tensor_parallel", 2, args=args, timeout_s=60)
    for result in found:
        assert "moe_tp_experts" in result.value
    model: Any = built(tmp_path / "mixtral")
    experts = "model.layers.*.mlp.experts"
    model._ep_plan = {**model._ep_plan, experts: "ep_router"}
    with pytest.raises(InputError, match="style 'ep_router', which is not supported"):
        adopt_published_experts(model)
    model._ep_plan = {experts: "ep_dispatch_experts"}
    with pytest.raises(InputError, match="gate_up_proj and down_proj, with the style grouped_gemm"):
        adopt_published_experts(model)
    model.model.layers[0].mlp.experts.has_bias = True
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.experts' have biases"):
        adopt_published_experts(model)
