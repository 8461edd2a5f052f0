"""Kills a rank of a job under torchrun, again and again, and counts the restarts that came back.

    python scripts/kill_and_restart.py --kills 20 --store torchrun
    python scripts/kill_and_restart.py --kills 20 --store rank-0 --agents 2

`--store` is where the ranks meet: at torchrun's own store, which every attempt shares, or at one
that rank 0 hosts; `--agents` is how many torchrun processes, as on several hosts, share two ranks.
After each SIGKILL of a rank drawn at random, at a random moment, the first attempt to follow must
go on from a checkpoint. Takes about 15 s per kill.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gloo"))

import psutil
from processes import free_port
from training import Workplace

RANKS = 2
LIMIT_S = 400
SETTINGS = (
    "--strands=1", "--train.steps=1000000", "--checkpoint.every=5", "--checkpoint.resume=latest",
    "--output.record_every=0", "--plan.profile_repeats=1",
    "--watchdog.dead_after_s=30",  # a busy machine is not a dead one; a death is seen at once
)  # fmt: skip


class Job:
    """torchrun, one process per agent, and what its ranks write."""

    def __init__(self, place: Workplace, agents: int, kills: int, store: str) -> None:
        self.place = place
        environment = place.environment
        if store == "rank-0":
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.errors = place.folder / "errors"
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={agents}",
            f"--nproc-per-node={RANKS // agents}", f"--max-restarts={kills}", "--rdzv-id=kills",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            "-m", "interlace", "train", "run.toml", *SETTINGS,
        ]  # fmt: skip
        with self.errors.open("wb") as errors:
            self.agents = [
                psutil.Popen(
                    command, cwd=place.folder, env=environment,
                    stdout=subprocess.DEVNULL, stderr=errors,
                )
                for _ in range(agents)
            ]  # fmt: skip

    def ranks(self) -> dict[int, tuple[psutil.Process, int]]:
        """The live ranks and which restart of their agent they belong to."""
        found = {}
        for agent in self.agents:
            for process in agent.children():
                try:
                    names = process.environ()
                    if "RANK" in names and process.status() != psutil.STATUS_ZOMBIE:
                        count = int(names["TORCHELASTIC_RESTART_COUNT"])
                        found[int(names["RANK"])] = (process, count)
                except psutil.NoSuchProcess:
                    continue
        return found

    def checkpoints(self, action: str) -> int:
        """How many checkpoints were saved, or resumed from, so far."""
        path = self.place.folder / "out" / "metrics.jsonl"
        return path.read_text().count(f'"action":"{action}"') if path.exists() else 0

    def wait_for(self, action: str, count: int) -> float:
        """Wait until so many were; the seconds that took. SystemExit if that cannot be."""
        began = time.monotonic()
        while self.checkpoints(action) < count:
            ended = any(agent.poll() is not None for agent in self.agents)
            if ended or time.monotonic() - began > LIMIT_S:
                print(self.errors.read_text(errors="replace")[-8000:])
                raise SystemExit(f"never {action} {count} times")
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self) -> None:
        """SIGTERM, as a scheduler does it; SIGKILL for what is left."""
        left = [process for process, _ in self.ranks().values()]
        for agent in self.agents:
            agent.terminate()
        _, alive = psutil.wait_procs([*self.agents, *left], timeout=40)
        for process in alive:
            process.kill()


def main() -> int:
    """Returns 1 if any kill took more than one restart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--store", choices=("torchrun", "rank-0"), default="torchrun")
    parser.add_argument("--agents", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.pop("RANK", None)
    with tempfile.TemporaryDirectory(prefix="interlace-restarts-") as folder:
        job = Job(Workplace(Path(folder)), options.agents, 3 * options.kills, options.store)
        try:
            return _kill(job, options.kills, random.Random(options.seed))
        finally:
            job.end()


def _kill(job: Job, kills: int, draw: random.Random) -> int:
    first = restarts = 0
    back_s = []
    for number in range(1, kills + 1):
        job.wait_for("saved", job.checkpoints("saved") + 1)
        time.sleep(draw.uniform(0, 1))
        victim = draw.randrange(RANKS)
        resumed = job.checkpoints("resumed")
        job.ranks()[victim][0].send_signal(signal.SIGKILL)
        back_s.append(job.wait_for("resumed", resumed + 1))
        # The agent of the victim counts each of its attempts.
        taken = max(count for _, count in job.ranks().values()) - restarts
        restarts += taken
        first += taken == 1
        print(f"kill {number} of rank {victim}: {taken} restart(s), back in {back_s[-1]:.1f} s")
    back_s.sort()
    print(
        f"{first} of {kills} came back at the first restart, in {back_s[len(back_s) // 2]:.1f} s "
        f"(median; {back_s[0]:.1f} to {back_s[-1]:.1f} s)"
    )
    return int(first < kills)


if __name__ == "__main__":
    sys.exit(main())
