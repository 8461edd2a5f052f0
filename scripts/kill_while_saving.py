"""Kills a training run at random moments, again and again, and looks at what its checkpoints are.

    python scripts/kill_while_saving.py --kills 20 --ranks 2 --seed 1

After each SIGKILL of all ranks every visible checkpoint must be sound, and none that was told as
saved may be gone; the run that finally gets through must have the bits of an undisturbed one.
Takes about 10 s per kill.
"""

import argparse
import random
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gloo"))

from checkpoint_runs import Runs, differing

from interlace.checkpoint.to_hugging_face import sound_manifest

STEPS = 200


def main() -> int:
    """Returns 1 if any promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("kills", 20), ("ranks", 2), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="interlace-kills-") as folder:
        return _kill(Runs(Path(folder)), options.kills, options.ranks, options.seed)


def _kill(runs: Runs, kills: int, ranks: int, seed: int) -> int:
    draw = random.Random(seed)
    settings = {
        "train__steps": STEPS, "checkpoint__every": 1, "checkpoint__resume": "latest",
        "output__record_every": 0, "train__micro_batches": 2,
    }  # fmt: skip
    inside = broken = last = done = 0
    while done < kills and last < STEPS - 20:
        wait_s = draw.uniform(0, 0.3)
        if not runs.end("killed", ranks, signal.SIGKILL, last + 1, wait_s, **settings):
            break
        done += 1
        saved = [event["step"] for event in runs.actions("killed", "saved")]
        steps = runs.steps("killed")
        unfinished = list(runs.checkpoints("killed").glob(".step-*.tmp"))
        inside += bool(unfinished)
        for step in steps:
            sound_manifest(runs.checkpoint("killed", step))
        broken += steps[-1] < max(saved, default=0)
        last = steps[-1]
        print(f"kill {done}: steps {steps} sound{', inside a save' if unfinished else ''}")
    # From here on saves are rare, or their fsyncs would take most of the time.
    runs.train("killed", ranks, **(settings | {"checkpoint__every": STEPS // 2}))
    runs.train("whole", ranks, **(settings | {"checkpoint__every": STEPS // 2}))
    damaged = runs.actions("killed", "damaged")
    same = runs.losses("killed") == runs.losses("whole")
    odd = differing(runs.checkpoint("killed", STEPS), runs.checkpoint("whole", STEPS))
    print(
        f"{done} kills, {inside} inside a save; {len(damaged)} damaged, {broken} lost; losses of "
        f"{STEPS} steps {'equal' if same else 'DIFFER'}; {len(odd)} tensors differ"
    )
    return int(bool(damaged or broken or odd or not same or done < kills))


if __name__ == "__main__":
    sys.exit(main())
