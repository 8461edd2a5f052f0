"""When checkpoints are written and which one is taken up; `checkpoint/` has the rest."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from interlace.checkpoint import folders as files
from interlace.checkpoint.background_save import Background, Outcome, write_checkpoint
from interlace.checkpoint.folders import Damaged
from interlace.checkpoint.manifest import MANIFEST, Manifest
from interlace.checkpoint.request import changed_settings
from interlace.checkpoint.tensor_files import SavePieces, check_headers, plan_pieces
from interlace.claims import Claim, holder
from interlace.data.batches import Batches
from interlace.errors import InputError, RunError
from interlace.ranks.agree import odd_ones
from interlace.ranks.small_collectives import gather_json
from interlace.train.same_run import check_state
from interlace.train.session import Session
from interlace.train.session_state import mesh_of, plain_state, restore, state_tensors

Tell = Callable[[str, dict[str, Any]], None]
"""Takes a line for people and the values of a metrics event `checkpoint`."""

LAST_WRITE_S = 60.0
"""How long a run that has failed waits for a checkpoint that is being written."""


class Checkpointer:
    """Saves a session every so many steps, keeps the newest, and resumes from one.

    Methods are collective. A save that fails harms nothing: it is told, the next one tries again,
    and `finish` raises RunError if the last one failed.
    """

    def __init__(self, session: Session, tell: Tell, claim: Claim | None) -> None:
        """`claim` is the right to write into the directory, of a run that saves."""
        self.session = session
        self.config = session.config.checkpoint
        self.directory = session.config.checkpoints
        self._tell = tell
        self._claim = claim
        self._pieces: SavePieces | None = None
        self._writing: Background | None = None
        self._last: Outcome | None = None
        self._saved_step = 0
        self._group: dist.ProcessGroup | None = None
        if self.config.every or self.config.resume:
            # A group of its own: the writing thread talks while training does.
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    def resume(self, batches: Batches) -> int:
        """Take up the checkpoint that the configuration names; returns its step, 0 for none.

        Call it before the first step. Damage is found before any weight changes: with `latest`
        the checkpoint before it is taken. Raises InputError if none can be.
        """
        if self._group is None:
            return 0
        steps = self._open_directory()
        if not self.config.resume:
            return 0
        if self.config.resume == "latest":
            folder, manifest = self._newest_good(steps)
        else:
            folder, manifest = self._named()
        if folder is None or manifest is None:
            self._tell(f"no checkpoint in {self.directory}: starting afresh", {"action": "none"})
            return 0
        # A layout that the planner cannot describe must not get as far as changing weights.
        masters = self.session.weights.masters
        plan_pieces({name: each.detach() for name, each in masters.items()}, self._group)
        restore(self.session, folder, manifest, batches)
        check_state(self.session, manifest.step, batches, state_tensors(self.session), self._group)
        self._saved_step = manifest.step
        self._tell_resumed(folder, manifest)
        return manifest.step

    def after_step(self, step: int, batches: Batches) -> None:
        """Save if it is time, and tell how the one before went."""
        if self._writing is not None and self._writing.wait(0):
            self._join()
        if self.config.every and step % self.config.every == 0:
            self.save(step, batches)

    def save(self, step: int, batches: Batches) -> None:
        """Copy the state of now, and write it while training goes on (or at once, as set). Raises
        PeerError, and writes nothing, if the ranks have come to differ."""
        self._join()
        assert self._claim is not None
        claim = self._claim
        claim.check()
        tensors = state_tensors(self.session)
        check_state(self.session, step, batches, tensors, self._group)
        if self._pieces is None:
            self._pieces = plan_pieces(tensors, self._group)
        staged = self._pieces.stage(tensors)
        manifest = Manifest(
            step=step,
            mesh=mesh_of(self.session),
            config=self.session.asked.as_dict(),
            state=plain_state(self.session, batches),
            files=(),
            tensors=self._pieces.tensors,
            epoch=claim.epoch,
        )
        self._saved_step = step
        keep, group = self.config.keep, self._group
        self._writing = Background(lambda: write_checkpoint(manifest, staged, claim, keep, group))
        if not self.config.background:
            self._join()

    def finish(self, step: int, batches: Batches) -> None:
        """Save the last state, wait for it; RunError if it could not be written."""
        if self.config.every and step > self._saved_step:
            self.save(step, batches)
        self._join()
        if self._last is not None and self._last.error:
            steps = files.saved_steps(self.directory)
            newest = f"the newest good one is {files.folder_name(steps[0])}" if steps else ""
            raise RunError(str(self._last), hint=newest)

    def close(self) -> None:
        """Give a checkpoint that is being written the time to get done, and let go of the group."""
        if self._writing is not None and not self._writing.wait(LAST_WRITE_S):
            return
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _join(self) -> None:
        """Wait for the writing thread, and tell what it did."""
        if self._writing is None:
            return
        outcome = self._last = self._writing.outcome()
        self._writing = None
        self._tell(
            str(outcome), {"action": "failed" if outcome.error else "saved"} | asdict(outcome)
        )
        if self._claim is not None and (outcome.error or outcome.warning):
            self._claim.check()  # a full disk passes, a directory that was taken over does not

    def _tell_resumed(self, folder: Path, manifest: Manifest) -> None:
        changes = changed_settings(self.session.asked, manifest)
        text = f"resumed from {folder}, after step {manifest.step}"
        if changes:
            text += f"; settings differ: {', '.join(changes)}"
        values = {"action": "resumed", "step": manifest.step, "folder": folder, "changed": changes}
        self._tell(text, values)

    def _open_directory(self) -> list[int]:
        """Clear what a killed run left; the steps saved there, newest first. The first rank does
        it for all."""
        said: Any = None
        if self.session.rank == 0:
            try:
                done = self._recover()
                said = [files.saved_steps(self.directory), done, ""]
            except OSError as error:
                said = [[], [], f"{error.strerror or error}"]
        steps, done, error = gather_json(said, self._group)[0]
        if error:
            raise InputError(
                f"checkpoint.directory = {str(self.directory)!r} cannot be used: {error}",
                hint="set checkpoint.directory to a folder that can be written",
            )
        if done:
            text = f"{self.directory}: a run was cut off while writing: {'; '.join(done)}"
            self._tell(text, {"action": "recovered", "done": done})
        return steps

    def _recover(self) -> list[str]:
        """A run that only reads leaves the directory of a live one alone."""
        if self._claim is not None:
            self._claim.check()
            return files.recover(self.directory)
        return [] if holder(self.directory) else files.recover(self.directory)

    def _newest_good(self, steps: list[int]) -> tuple[Path | None, Manifest | None]:
        damaged: list[Path] = []
        for step in steps:
            folder = self.directory / files.folder_name(step)
            manifest, reason = self._checked(folder)
            if manifest is not None:
                self._set_aside(damaged)
                return folder, manifest
            damaged.append(folder)
            text = f"checkpoint {folder} is damaged: {reason}; trying the one before"
            self._tell(text, {"action": "damaged", "step": step, "reason": reason})
        if steps:
            raise InputError(
                f"none of the {len(steps)} checkpoints in {self.directory} is sound",
                hint="move them away to start afresh",
            )
        return None, None

    def _set_aside(self, damaged: list[Path]) -> None:
        """Else they would count as the newest when old ones are removed."""
        if self._claim is not None and self.session.rank == 0:
            self._claim.check()
            for folder in damaged:
                files.set_aside(folder)

    def _named(self) -> tuple[Path, Manifest]:
        folder = Path(self.config.resume)
        manifest, reason = self._checked(folder)
        if manifest is None:
            raise Damaged(folder, reason)
        return folder, manifest

    def _checked(self, folder: Path) -> tuple[Manifest | None, str]:
        """The manifest if all files are sound; else why not. Each file is looked at by one of the
        ranks that see one folder: hosts with a disk of their own look at all of theirs."""
        manifest, digest, reason = None, "", ""
        views = gather_json(files.view_of(folder), self._group)
        seen_alike = [rank for rank, view in enumerate(views) if view == views[self.session.rank]]
        try:
            manifest = files.read_manifest(folder)
            digest = files.digest_of(asdict(manifest))
            own = manifest.files[seen_alike.index(self.session.rank) :: len(seen_alike)]
            for file in own:
                files.check_file(folder, file)
            check_headers(folder, manifest, [file.name for file in own])
        except Damaged as error:
            reason = error.reason
        everyone = gather_json([digest, reason], self._group)
        odd = odd_ones({rank: seen for rank, (seen, _) in enumerate(everyone)})
        if odd is not None:
            raise RunError(
                f"the ranks do not see the same {folder / MANIFEST}: not ranks {odd.usual} and "
                f"{odd.ranks[0]}",
                hint="keep checkpoints in a folder that all hosts share",
            )
        found = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyone) if text]
        return (None, found[0]) if found else (manifest, "")
