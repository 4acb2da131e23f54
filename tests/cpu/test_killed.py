"""A trainer killed with -9 while saving a checkpoint resumes on the real vLLM as if it had never been killed.

Not covered: other moments, damaged checkpoints and full disks, which need no vLLM (`tests/cli/test_killed.py`), and
trainers killed inside the fence (`test_restore.py`).
"""

from pathlib import Path

from bridge.checks.one_copy_proof import logprob_diffs
from bridge.passes.prepared_model import PreparedModel
from tests import scenarios
from tests.cli.test_killed import LAST, STEPS, WHILE_IT_SAVES, Run, undisturbed
from tests.scenarios import LiveServer


def test_trainer_killed_while_saving_resumes_exactly(llama: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    problems, run = undisturbed(Run(llama, tmp_path / "undisturbed")), Run(llama, tmp_path / "killed")
    run.killed(WHILE_IT_SAVES)
    lines = run.train("--resume", expect=0)
    assert lines[0] == f"resuming after step 4 from saved/{LAST}"
    assert run.lost() == [5, 6]
    assert run.problems() == problems
    run.check_whole()
    saved = PreparedModel(scenarios.loaded(run.saved / f"step_{STEPS}"))
    assert logprob_diffs(saved, llama.sample()).mean().item() < scenarios.PARITY_LIMIT
