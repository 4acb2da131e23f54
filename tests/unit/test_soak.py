"""Which faults a soak chooses, and how it counts and reports; no server, and no trainer.

Not covered: the faults themselves (`tests/cli/test_fault_matrix.py`).
"""

from itertools import islice
from typing import Any, cast

from tests import soak
from tests.disturbed import FAULTS
from tests.ground import Ground, NotWholeError, Proof


class FakeGround:
    """Returns the given proofs, in order."""

    def __init__(self, proofs: list[Proof | NotWholeError]) -> None:
        self.calls: list[str] = []
        self._proofs = iter(proofs)

    def disturb(self, *_: Any) -> "FakeGround":
        self.calls.append("disturb")
        return self

    exit_code = -9

    def check_checkpoints(self) -> None:
        self.calls.append("check")

    def prove(self) -> Proof:
        self.calls.append("prove")
        proof = next(self._proofs)
        if isinstance(proof, NotWholeError):
            raise proof
        return proof

    def start_again(self) -> None:
        self.calls.append("start again")


def test_seed_decides_the_faults_and_all_of_them_occur() -> None:
    first, repeated, other = (list(islice(soak.disturbances(seed), 3000)) for seed in (3, 3, 4))
    assert first == repeated != other
    fault_phases = {(disturbance.fault, disturbance.phase) for disturbance, _ in first}
    assert fault_phases == {(fault, phase) for fault, phases in FAULTS.items() for phase in phases}


def test_each_fault_is_one_line_and_violations_are_counted() -> None:
    fake = FakeGround([Proof("whole", "version 3"), NotWholeError("3 of 14 differ"), Proof("torn", "r")])
    lines: list[str] = []
    outcomes = soak.soak(cast(Ground, fake), 0, lambda number: number == 3, lines.append)
    assert outcomes == {"whole": 1, soak.VIOLATION: 1, "torn": 1}
    assert len(lines) == 3
    assert lines[1].endswith("VIOLATION: 3 of 14 differ")
    assert fake.calls == ["disturb", "check", "prove"] * 2 + ["start again"] + ["disturb", "check", "prove"]
