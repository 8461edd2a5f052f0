"""Pauses a rank at a random moment of its life, again and again, and looks who notices.

    python scripts/pause_at_random.py --pauses 25 --ranks 2 --launcher interlace --seed 1
    python scripts/pause_at_random.py --pauses 25 --launcher torchrun
    python scripts/pause_at_random.py --pauses 0 --healthy 3 --load 4

Every pause (SIGSTOP), from the start of the process to its exit, has to end the job within its
bound, with an error that names the rank; a rank that exits before the signal arrives does not
count. Healthy runs beside `--load` busy processes have to end well. A run takes some 10 s; runs in
which the rank does not join take START_S more.
"""

import argparse
import contextlib
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gloo"))

import psutil
from training import Command, Workplace

START_S = 60.0
END_S = 10.0
SLACK_S = 10.0  # torchrun gives the other ranks time to end, and the machine may be busy
RUN = (
    "train", "run.toml", "--train.steps", "4", "--strands", "1", "--output.record_every", "0",
    "--watchdog.start_s", str(START_S), "--watchdog.end_s", str(END_S),
)  # fmt: skip


def main() -> int:
    """Returns 1 if a pause was not noticed or not named, or a healthy run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = (("pauses", 25), ("ranks", 2), ("seed", 1), ("healthy", 0), ("load", 0))
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--launcher", choices=("interlace", "torchrun"), default="interlace")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="interlace-pauses-") as folder, load(options.load):
        place = Workplace(Path(folder))
        life_s = healthy_s(place, options.launcher)
        print(f"a healthy run takes {life_s:.1f} s")
        for _ in range(options.healthy):
            print(f"healthy: {healthy_s(place, options.launcher):.1f} s", flush=True)
        draw = random.Random(options.seed)
        missed = pauses = 0
        while pauses < options.pauses:
            rank, after_s = draw.randrange(options.ranks), draw.uniform(0.0, life_s)
            noticed = pause(place, options.launcher, rank, after_s)
            pauses += noticed is not None
            missed += noticed is False
    print(f"{missed} of {pauses} pauses were not noticed in time, or not named")
    return int(missed > 0)


def start(place: Workplace, launcher: str) -> Command:
    """A run of two ranks."""
    if launcher == "interlace":
        return place.start(*RUN)
    words = ("--standalone", "--nproc-per-node", "2", "-m", "interlace", *RUN)
    return Command(place.folder, words, place.environment, module="torch.distributed.run")


def healthy_s(place: Workplace, launcher: str) -> float:
    """Seconds that a run takes which nobody disturbs."""
    began = time.monotonic()
    with start(place, launcher).running() as command:
        code, said = command.end()
    if code:
        raise SystemExit(f"a healthy run ended with {code}:\n{said}")
    return time.monotonic() - began


def pause(place: Workplace, launcher: str, rank: int, after_s: float) -> bool | None:
    """Whether that was noticed, named and ended in time; None if the rank had ended before."""
    with start(place, launcher).running() as command:
        process = born(command, rank)
        time.sleep(after_s)
        command.look()
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            process.send_signal(signal.SIGSTOP)
        except psutil.NoSuchProcess:
            return None
        paused_at = time.monotonic()
        limit_s = max(START_S, END_S) + SLACK_S + 30 * (launcher == "torchrun")
        while command.process.poll() is None and time.monotonic() - paused_at < limit_s:
            time.sleep(0.02)
        took_s = time.monotonic() - paused_at
        ended, said = command.process.poll() is not None, command.said()
    errors = [line for line in said.splitlines() if "rror: " in line]
    named = any(f"rank {rank} " in line for line in errors)
    verdict = "ok" if ended and named else "MISSED"
    first = next((line for line in errors if f"rank {rank} " in line), errors[:1] or said[-300:])
    print(f"{verdict}: rank {rank} paused at {after_s:.2f} s, {took_s:.1f} s: {first}", flush=True)
    return ended and named


def born(command: Command, rank: int) -> psutil.Process:
    """The process of a rank, as soon as there is one."""
    while True:
        command.look()
        with contextlib.suppress(AssertionError, psutil.AccessDenied):
            return command.rank(rank)
        time.sleep(0.005)


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that do nothing but use the processor."""
    busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(processes)]
    for each in busy:
        each.start()
    try:
        yield
    finally:
        for each in busy:
            each.kill()


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    sys.exit(main())
