"""Disturb trainers on a real server at random, and prove after each fault that nothing half-written is served.

    python -m tests.soak --minutes 10 --seed 0        (make soak MINUTES=10 SEED=0)

One line per fault, a summary, and exit code 1 if a proof failed. The seed decides which faults come in which order; how
many of them depends on the time.

Not covered: what is proved (`ground.py`), and what each fault does to the trainer (`tests/cli/test_fault_matrix.py`).
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
"""A pause, or a publication, takes about as long."""
MOST_PIECES = 12
VIOLATION = "VIOLATION"
OTHERS_WEIGHT = 4
"""How much likelier a fault is that leaves the server alive: another one takes as long to start as ten rounds."""
IN_FLIGHT = ("keep", "wait", "abort")
Tell = Callable[[str], None]


def disturbances(seed: int) -> Iterator[tuple[Disturbance, str]]:
    """Yield faults for ever, each with what happens to requests in flight; always the same ones for the same seed."""
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
    """Disturb and prove until `is_over`, asked with the number of rounds so far; return how often each outcome came."""
    began, outcomes = time.monotonic(), Counter[str]()
    for number, (disturbance, in_flight) in enumerate(disturbances(seed), start=1):
        if is_over(number - 1):
            return outcomes
        what = f"{disturbance.fault}, {disturbance.phase}, step {disturbance.step}, --in-flight {in_flight}"
        try:
            found = ground.disturb(disturbance, "--in-flight", in_flight, "--keep-last", "2")
            found.check_checkpoints()
            proof = ground.prove()
            outcomes[proof.outcome] += 1
            text = f"exit code {found.exit_code}; {proof.text}"
        except (NotWholeError, BridgeError) as error:
            outcomes[VIOLATION] += 1
            text = f"{VIOLATION}: {error}"
            ground.start_again()
        tell(f"{time.monotonic() - began:7.1f} s  {number:4d}  {what}: {text}")
    raise AssertionError("there is no end of faults")


def main() -> int:
    """Soak a vLLM of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Random faults on a real server.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="which faults (default: 0)")
    chosen = parser.parse_args()
    end = time.monotonic() + 60 * chosen.minutes
    with tempfile.TemporaryDirectory(prefix="bridge-soak-") as name, ground_of_vllm(Path(name)) as ground:
        outcomes = soak(ground, chosen.seed, lambda _: time.monotonic() > end, partial(print, flush=True))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"seed {chosen.seed}: {outcomes.total()} faults: {counts}")  # noqa: T201  the summary
    return 1 if outcomes[VIOLATION] or not outcomes else 0


def ground_of_vllm(folder: Path) -> Ground:
    """Return a ground whose servers are vLLM's, with a tiny model."""
    return Ground(folder, tiny.write(tiny.llama(), folder / "model"), scenarios.served)


if __name__ == "__main__":
    sys.exit(main())
