"""Inject random faults into trainers on a real server, and check after each that no half-written weights are served.

    python -m tests.soak --minutes 10 --seed 0        (make soak MINUTES=10 SEED=0)

Prints one line per fault and a summary; exits with 1 if a check failed. The seed determines the order of the faults,
and the time limit determines how many there are.

Not covered: the proof (`ground.py`), and each fault's effect on the trainer (`tests/cli/test_fault_matrix.py`).
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bridge.errors import BridgeError
from tests import scenarios
from tests.disturbed import ENDS_THE_SERVER, FAULTS, Disturbance
from tests.ground import STEPS, Ground, NotWholeError
from tests.models import tiny

LONGEST_DELAY_S = 0.03
"""Largest delay in seconds, about as long as a pause or a publication."""
MOST_PIECES = 12
VIOLATION = "VIOLATION"
OTHERS_WEIGHT = 4
"""Weight of faults that leave the server alive: starting another server takes as long as ten rounds."""
IN_FLIGHT = ("keep", "wait", "abort")
Tell = Callable[[str], None]


def disturbances(seed: int) -> Iterator[tuple[Disturbance, str]]:
    """Yield faults forever, each with a choice for in-flight requests; they depend only on the seed."""
    chance = random.Random(seed)
    weights = [1 if fault in ENDS_THE_SERVER else OTHERS_WEIGHT for fault in FAULTS]
    while True:
        (fault,) = chance.choices(list(FAULTS), weights)
        disturbance = Disturbance(
            fault=fault,
            phase=chance.choice(FAULTS[fault]),
            step=chance.randint(1, STEPS),
            delay_s=chance.uniform(0, LONGEST_DELAY_S),
            num_pieces=chance.randint(1, MOST_PIECES),
        )
        yield disturbance, chance.choice(IN_FLIGHT)


def soak(ground: Ground, seed: int, is_over: Callable[[int], bool], tell: Tell) -> Counter[str]:
    """Disturb and check until `is_over(num_rounds)`; return the count of each outcome."""
    began, outcomes = time.monotonic(), Counter[str]()
    for number, (disturbance, in_flight) in enumerate(disturbances(seed), start=1):
        if is_over(number - 1):
            return outcomes
        what = f"{disturbance.fault}, {disturbance.phase}, step {disturbance.step}, --in-flight {in_flight}"
        try:
            round_ = ground.disturb(disturbance, "--in-flight", in_flight, "--keep-last", "2")
            round_.check_checkpoints()
            proof = ground.prove()
            outcomes[proof.outcome] += 1
            text = f"exit code {round_.exit_code}; {proof.text}"
        except (NotWholeError, BridgeError) as error:
            outcomes[VIOLATION] += 1
            text = f"{VIOLATION}: {error}"
            ground.start_again()
        tell(f"{time.monotonic() - began:7.1f} s  {number:4d}  {what}: {text}")
    raise AssertionError("faults never end")


def main() -> int:
    """Soak a vLLM that this program starts."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Random faults on a real server.")
    parser.add_argument("--minutes", type=float, default=10.0, help="duration (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="bridge-soak-") as name, ground_of_vllm(Path(name)) as ground:
        outcomes = soak(ground, options.seed, lambda _: time.monotonic() > end, partial(print, flush=True))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"seed {options.seed}: {outcomes.total()} faults: {counts}")  # noqa: T201  the summary
    return 1 if outcomes[VIOLATION] or not outcomes else 0


def ground_of_vllm(folder: Path) -> Ground:
    """Return a ground on vLLM with a tiny model."""
    return Ground(folder, tiny.write(tiny.llama(), folder / "model"), scenarios.served)


if __name__ == "__main__":
    sys.exit(main())
