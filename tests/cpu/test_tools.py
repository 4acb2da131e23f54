"""The calculators of docs/environments.md on the real vLLM on the CPU: a model learns to call their tool."""

import json
import re
from pathlib import Path

import pytest

from bridge_cli import demo_model
from tests import scenarios

DOCUMENT = Path(__file__).parents[2] / "docs" / "environments.md"
TASK = """
from NAME import KIND


class Task(KIND):
    def __iter__(self):
        return (row for index, row in enumerate(super().__iter__()) if index % 20)

    def held_out(self):
        return [row for index, row in enumerate(super().__iter__()) if index % 20 == 0]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("calculator", "Calculator"), ("agent", "Adder")])
def test_model_learns_to_use_the_calculator(tmp_path: Path, name: str, kind: str) -> None:
    model = demo_model.write_tiny(tmp_path / "model")
    block = re.search(rf"```python\n# {name}.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / f"{name}.py").write_text(block[1])
    (tmp_path / "task.py").write_text(TASK.replace("NAME", name).replace("KIND", kind))
    with scenarios.served(model, tmp_path / "server") as server:
        scenarios.trained(
            server,
            tmp_path,
            *("--environment", "task.py:Task", "--max-turns", "3", "--max-new-tokens", "32", "--reward-processes", "8"),
            *("--eval-samples", "1", "--batch-size", "64", "--group-size", "8", "--lr", "2e-4"),
            steps=12,
        )
    before, after = [
        json.loads(line)["reward_mean"] for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()
    ]
    assert before < 0.6
    assert after >= before + 0.2
    steps = scenarios.metrics(tmp_path / "run")
    assert steps[0]["turns_mean"] < steps[-1]["turns_mean"] <= 3
    diffs = [step["logprob_diff_mean"] for step in steps if step["logprob_diff_mean"] is not None]
    assert len(diffs) > 6, "a step teaches nothing only once all is learnt"
    assert max(diffs) < scenarios.PARITY_LIMIT, "the tokens that were sampled are those that are trained on"
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    ends = [completion["turns"][-3:] for row in rows for completion in row["completions"]]
    called = [end for end in ends if [turn["role"] for turn in end] == ["assistant", "tool", "assistant"]]
    assert any(re.fullmatch(r"\d+", end[1]["text"]) and re.fullmatch(r"\d+", end[2]["text"]) for end in called)
    assert all(end[0]["tool_calls"] for end in called)
