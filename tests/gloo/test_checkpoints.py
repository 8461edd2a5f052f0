"""Proves what checkpoints promise, on real runs: same bits after a kill, no damage unnoticed."""

import json
import os
import shutil
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_runs import EVERY, STEPS, Runs, differing
from safetensors.torch import load_file, save_file

from interlace.checkpoint import folders as files
from interlace.checkpoint.folders import Damaged
from interlace.checkpoint.manifest import MANIFEST, Manifest, digest_of
from interlace.checkpoint.request import claim_directory
from interlace.checkpoint.tensor_files import CheckpointReader, whole_tensor
from interlace.checkpoint.to_hugging_face import (
    export_as_it_was,
    export_checkpoint,
    export_trusted_dcp,
    find_checkpoint,
    sound_manifest,
)
from interlace.claims import LOCK, ClaimLost
from interlace.config import ModelConfig
from interlace.errors import InputError

pytestmark = pytest.mark.gloo

# Two tensor-parallel ranks add partial sums where one rank has a single longer sum.
OTHER_MESH_RELATIVE = 1e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A workplace with finished, undisturbed runs: `one` on one rank, `two` on two."""
    runs = Runs(tmp_path_factory.mktemp("checkpoints"))
    runs.train("one", checkpoint__keep=0)
    runs.train("two", ranks=2, checkpoint__keep=0)
    return runs


@pytest.fixture
def copy(runs: Runs, tmp_path: Path) -> Path:
    """A copy of a sound checkpoint of two ranks, to be damaged."""
    return Path(shutil.copytree(runs.checkpoint("two"), tmp_path / runs.checkpoint("two").name))


@pytest.mark.parametrize(
    ("ranks", "whole", "number"), [(1, "one", signal.SIGTERM), (2, "two", signal.SIGKILL)]
)
def test_a_run_that_ended_early_goes_on_with_the_same_bits(
    runs: Runs, ranks: int, whole: str, number: signal.Signals
) -> None:
    """SIGTERM or SIGKILL to all ranks in the middle, then `resume = "latest"`: losses of every
    step, weights, optimizer state, data position and generators are those of the undisturbed run.
    SIGTERM saves the step that it ends after."""
    out, latest = f"ended-{ranks}", {"checkpoint__resume": "latest"}
    assert runs.end(out, ranks, number, after_step=EVERY, delay_s=0.02, **latest)
    last = runs.steps(out)[-1]
    if number == signal.SIGTERM:
        assert last == len(runs.losses(out))
    runs.train(out, ranks, **latest)
    (resumed,) = runs.actions(out, "resumed")
    assert 0 < resumed["step"] == last < STEPS
    assert runs.losses(out) == runs.losses(whole)
    assert differing(runs.checkpoint(out), runs.checkpoint(whole)) == []
    assert runs.steps(out) == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]  # keep is 3


ALONE = {"parallel__tensor": 1}
SHARDED = {"parallel__tensor": 1, "parallel__data_shard": 2, "train__micro_batches": 2}


@pytest.mark.parametrize(
    ("out", "ranks", "settings"), [("alone", 1, ALONE), ("sharded", 2, SHARDED)]
)
def test_another_mesh_goes_on_within_rounding(
    runs: Runs, out: str, ranks: int, settings: dict[str, int]
) -> None:
    """Saved by two tensor-parallel ranks, taken up by one, or by two that share the weights
    (ZeRO-3) and the micro-batches of a step: later losses agree within float32 rounding, and the
    change is told."""
    runs.train(out, ranks, checkpoint__resume=runs.checkpoint("two", STEPS // 2), **settings)
    (resumed,) = runs.actions(out, "resumed")
    assert "parallel.tensor: 2 -> 1" in resumed["changed"]
    losses = runs.losses("two")[STEPS // 2 :]
    assert runs.losses(out) == pytest.approx(losses, rel=OTHER_MESH_RELATIVE)


def test_damage_is_found_and_the_one_before_is_taken(runs: Runs) -> None:
    """The newest checkpoint has a flipped bit, the one before lost a file: both are refused before
    any weight changes, told and kept aside, and the third is taken, to the same end."""
    shutil.copytree(runs.folder / "two", runs.folder / "damaged")
    for step, damage in ((STEPS, flip), (STEPS - EVERY, lose)):
        damage(runs.checkpoint("damaged", step))
    runs.train("damaged", 2, checkpoint__resume="latest", checkpoint__keep=0)
    found = [(event["step"], event["reason"]) for event in runs.actions("damaged", "damaged")]
    assert [step for step, _ in found] == [STEPS, STEPS - EVERY]
    assert "has changed since it was written" in found[0][1]
    assert "No such file" in found[1][1]
    (resumed,) = runs.actions("damaged", "resumed")
    assert resumed["step"] == STEPS - 2 * EVERY
    assert differing(runs.checkpoint("damaged"), runs.checkpoint("two")) == []
    aside = sorted(path.name for path in runs.checkpoints("damaged").glob("*damaged*"))
    assert aside == [f"step-{step:08d}.damaged-1" for step in (STEPS - EVERY, STEPS)]


def test_a_finished_run_has_nothing_left_to_do(runs: Runs) -> None:
    """It says so before a model is built, and changes none of its results."""
    shutil.copytree(runs.folder / "one", runs.folder / "done")
    before = {path: path.read_bytes() for path in (runs.folder / "done").glob("[!.]*.*")}
    (result,) = runs.train("done", checkpoint__resume="latest")
    assert f"done holds this run, finished after step {STEPS}: nothing is left" in result.stderr
    assert f"hint: set train.steps above {STEPS} to go on" in result.stderr
    assert before == {path: path.read_bytes() for path in before}
    assert "plan by search" not in result.stdout + result.stderr


def flip(folder: Path) -> None:
    """One bit in the middle of a file."""
    path = folder / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose(folder: Path) -> None:
    """A file is gone."""
    (folder / "rank-00000.safetensors").unlink()


def truncate(folder: Path) -> None:
    """A file ends early."""
    os.truncate(folder / "rank-00000.safetensors", 1000)


def truncate_manifest(folder: Path) -> None:
    """The manifest ends early."""
    os.truncate(folder / MANIFEST, 1000)


def edit_manifest(folder: Path) -> None:
    """A number in the manifest changes and it is still JSON."""
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"offsets":[0', '"offsets":[1', 1))


def plant(folder: Path, change: tuple[str, str]) -> None:
    """A manifest that someone made on purpose, with a matching digest."""
    data = json.loads((folder / MANIFEST).read_text().replace(*change))
    data["sha256"] = digest_of(data["body"])
    (folder / MANIFEST).write_text(json.dumps(data))


def climb(folder: Path) -> None:
    """A file name that leads out of the folder."""
    plant(folder, ("rank-00001.safetensors", "../rank-00001.safetensors"))


def absolute(folder: Path) -> None:
    """A file name that is a path of its own."""
    plant(folder, ("rank-00001.safetensors", "/etc/passwd"))


def enlarge(folder: Path) -> None:
    """A tensor that its pieces do not cover."""
    plant(folder, ('"shape":[256,64]', '"shape":[512,64]'))


def link(folder: Path) -> None:
    """A link in place of a file."""
    path = folder / "rank-00000.safetensors"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def pickle(folder: Path) -> None:
    """A pickle under the name of a file, with a matching checksum."""
    path = folder / "rank-00000.safetensors"
    torch.save({"weights": torch.zeros(3)}, path)
    reseal(folder, path)


def swap(folder: Path) -> None:
    """A sound safetensors file that holds another tensor, with a matching checksum."""
    path = folder / "rank-00000.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if tensors[name].dim() == 2)
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, path)
    reseal(folder, path)


def reseal(folder: Path, path: Path) -> None:
    """Make the manifest fit a changed file."""
    data = json.loads((folder / MANIFEST).read_text())
    for file in data["body"]["files"]:
        if file["name"] == path.name:
            sealed = files.seal(path)
            file["size_bytes"], file["sha256"] = sealed.size_bytes, sealed.sha256
    data["sha256"] = digest_of(data["body"])
    (folder / MANIFEST).write_text(json.dumps(data))


DAMAGE = {
    flip: "has changed",
    lose: "No such file",
    truncate: "has 1000 bytes, and had",
    truncate_manifest: "manifest.json: ",
    edit_manifest: "its content has changed",
    climb: "is not the name of a checkpoint's file",
    absolute: "is not the name of a checkpoint's file",
    enlarge: "of 32768 elements",
    link: "is not a regular file",
    pickle: "is not a safetensors file",
    swap: "does not hold the pieces",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_every_kind_of_damage_is_refused(copy: Path, damage: object) -> None:
    """Checksums, sizes, names, shapes and kinds of files; nothing is unpickled or followed."""
    assert callable(damage)
    sound_manifest(copy)
    damage(copy)
    with pytest.raises(Damaged, match="is damaged: ") as refused:
        sound_manifest(copy)
    assert DAMAGE[damage] in refused.value.reason  # type: ignore[index]


def test_a_full_disk_costs_no_checkpoint_and_no_step(runs: Runs, tmp_path: Path) -> None:
    """Room for one checkpoint and a half: the first stays sound, later saves fail and say why,
    training goes on with the same bits, and the run ends with an error."""
    if os.geteuid() != 0:
        pytest.skip("a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    size_bytes = sum(path.stat().st_size for path in runs.checkpoint("one", EVERY).iterdir())
    options = f"size={size_bytes * 3 // 2}"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(small)],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        (result,) = runs.train(
            "full-disk", checkpoint__directory=small / "kept", checkpoint__keep=0
        )
        assert "No space left on device" in result.value["error"]
        assert f"the newest good one is step-{EVERY:08d}" in result.value["hint"]
        assert "step 4 NOT written" in result.stderr
        assert sorted(path.name for path in (small / "kept").iterdir()) == [
            LOCK, f"step-{EVERY:08d}",
        ]  # fmt: skip
        assert differing(small / "kept" / f"step-{EVERY:08d}", runs.checkpoint("one", EVERY)) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert runs.losses("full-disk") == runs.losses("one")


def test_requests_that_cannot_be_are_refused(runs: Runs) -> None:
    """Before anything of the earlier run is touched, with what to set instead."""
    before = (runs.folder / "one" / "run.toml").read_text()
    cases = {
        "holds checkpoints of an earlier run": {},
        "model.heads = 4, and this run has 2": {
            "checkpoint__resume": "latest", "model__heads": 2, "model__kv_heads": 2,
        },
        "has no manifest.json": {"checkpoint__resume": "nowhere"},
        "holds newer checkpoints (step 16) than that of step 2": {
            "checkpoint__resume": runs.checkpoint("one", EVERY),
        },
    }  # fmt: skip
    for said, settings in cases.items():
        config = runs.config("one", **settings, output__overwrite="true")
        with pytest.raises(InputError) as refused:
            claim_directory(config)
        assert said in refused.value.message
        assert refused.value.hint
    assert (runs.folder / "one" / "run.toml").read_text() == before
    assert len(runs.losses("one")) == STEPS


def test_a_run_that_was_cut_off_before_its_first_checkpoint_begins_again(
    runs: Runs, tmp_path: Path
) -> None:
    """`resume = "latest"` is for a command that is given again and again: what a killed run left
    is replaced. A run that ended, or that saved something, is not."""
    text = (runs.folder / "one" / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace('resume = ""', 'resume = "latest"'))
    lines = (runs.folder / "one" / "metrics.jsonl").read_text().splitlines(keepends=True)
    begun = [line for line in lines if '"saved"' not in line and '"end"' not in line]
    assert 0 < len(begun) < len(lines) - 1
    config = runs.config("one", checkpoint__resume="latest", output__directory=tmp_path)
    for left, replaced in ((begun, True), (begun + lines[-1:], False), (lines[:-1], False)):
        (tmp_path / "metrics.jsonl").write_text("".join(left))
        if replaced:
            claim_directory(config).release()
            continue
        with pytest.raises(InputError, match="holds an earlier run"):
            claim_directory(config)


def test_an_orphan_changes_no_checkpoint(tmp_path: Path) -> None:
    """A rank of an older epoch writes into a folder of its own, which never becomes visible, and
    removes nothing; the next run clears it."""

    def lost() -> None:
        raise ClaimLost("taken over")

    old, new = (files.temporary_folder(tmp_path, 3, epoch) for epoch in (1, 2))
    fields: dict[str, Any] = {
        "step": 3, "mesh": {}, "config": {}, "state": {}, "files": (), "tensors": {},
    }  # fmt: skip
    (old / "rank-00000.safetensors").write_bytes(b"of an orphan")
    with pytest.raises(ClaimLost):
        files.commit(old, Manifest(**fields, epoch=1), lost)
    assert files.saved_steps(tmp_path) == []
    kept = files.commit(new, Manifest(**fields, epoch=2), lambda: None)
    with pytest.raises(ClaimLost):
        files.drop_oldest(tmp_path, -1, lost)
    assert files.recover(tmp_path) == [f"{old.name} removed"]
    assert (files.saved_steps(tmp_path), sound_manifest(kept).epoch) == ([3], 2)
    assert [path.name for path in kept.iterdir()] == [MANIFEST]


def test_a_checkpoint_that_goes_while_it_is_exported_is_named(copy: Path, tmp_path: Path) -> None:
    """The retention of a live run may remove it: no traceback, and what to take instead."""
    manifest = sound_manifest(copy)
    (copy / "rank-00001.safetensors").unlink()
    with pytest.raises(Damaged, match=r"rank-00001.safetensors was removed just now"):
        export_checkpoint(copy, manifest, tmp_path / "out", torch.float32)


def test_models_of_others_go_on_and_are_exported(runs: Runs) -> None:
    """Shape and weights from a folder of `transformers`, as our model and as its own: the shape is
    no difference to the checkpoint's, both go on, and exports of both are the trained weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(runs.folder / "given")
    found = {}
    for source in ("interlace", "hugging_face"):
        given = {"model__config": runs.folder / "given", "model__source": source}
        given |= {"checkpoint__resume": "latest", "train__micro_batches": 2}
        for steps in (2, 4):
            (result,) = runs.train(source, train__steps=steps, **given)
            assert result.value["error"] == ""
        assert [event["step"] for event in runs.actions(source, "resumed")] == [2]
        folder, manifest, _ = find_checkpoint(runs.folder / source)
        assert manifest.step == 4
        export_checkpoint(folder, manifest, runs.folder / f"{source}-out", torch.float32)
        model = AutoModelForCausalLM.from_pretrained(runs.folder / f"{source}-out")
        found[source] = model.state_dict()
    assert found["interlace"].keys() == found["hugging_face"].keys()
    for name, each in found["interlace"].items():
        torch.testing.assert_close(each, found["hugging_face"][name], rtol=1e-4, atol=1e-5)


def test_export_takes_the_newest_sound_weights(runs: Runs, tmp_path: Path) -> None:
    """The folder of a run whose newest checkpoint is damaged: the one before is taken, the damage
    is told; without a checkpoint it is an error."""
    shutil.copytree(runs.checkpoints("two"), tmp_path / "checkpoints")
    flip(tmp_path / "checkpoints" / f"step-{STEPS:08d}")
    folder, manifest, problems = find_checkpoint(tmp_path)
    assert (folder.name, manifest.step) == (f"step-{STEPS - EVERY:08d}", STEPS - EVERY)
    assert len(problems) == 1
    with pytest.raises(InputError, match="holds no checkpoint"):
        find_checkpoint(runs.folder)


def test_folders_of_pytorch_need_trust(runs: Runs, tmp_path: Path) -> None:
    """A folder of torch.distributed.checkpoint holds pickles: nothing reads it unless told to, and
    then the same weights are exported as from our own checkpoint."""
    reader = CheckpointReader(runs.checkpoint("one"))
    weights = {
        name.removeprefix("weights."): whole_tensor(reader, name)
        for name in reader.read_metadata().state_dict_metadata
        if name.startswith("weights.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that there is no process group
        dcp.save({"app": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(InputError, match="runs code in its files"):
        find_checkpoint(tmp_path / "dcp")
    with pytest.raises(InputError, match=r"is of torch\.distributed\.checkpoint"):
        claim_directory(
            runs.config(
                "new",
                checkpoint__resume=tmp_path / "dcp",
                output__directory=tmp_path / "new",
            )
        )
    config = runs.config("one")
    with pytest.raises(InputError, match=r"has no \.metadata"):
        export_trusted_dcp(runs.checkpoint("one"), config.model, 32, tmp_path / "a", torch.float32)
    theirs = ModelConfig(source="hugging_face", config="anywhere")
    with pytest.raises(InputError, match=r"under the names of interlace\.models"):
        export_trusted_dcp(tmp_path / "dcp", theirs, 32, tmp_path / "a", torch.float32)
    export_trusted_dcp(
        tmp_path / "dcp", config.model, config.data.sequence_length, tmp_path / "a", torch.float32
    )
    folder, manifest, _ = find_checkpoint(runs.folder / "one")
    export_checkpoint(folder, manifest, tmp_path / "b", torch.float32)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()


def test_models_of_transformers_are_exported_as_they_were(tmp_path: Path) -> None:
    """Weights under the names of a `transformers` model with a tied head: it loads them again."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    shape.save_pretrained(tmp_path / "shape")
    model = AutoModelForCausalLM.from_config(shape)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    config = ModelConfig(source="hugging_face", config=str(tmp_path / "shape"))
    export_as_it_was(state, config, tmp_path / "out", torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[name], each) for name, each in model.state_dict().items())
    with pytest.raises(InputError, match="exists"):
        export_as_it_was(state, config, tmp_path / "out", torch.float32)
