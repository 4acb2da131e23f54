"""Word problems on the real vLLM on the CPU: the demo's model, which reads their digits alone, is trained on them.

Not covered: which answers are right (`tests/unit/test_environment_answers.py`), and learning to solve them.
"""

from pathlib import Path

from cli import demo_model
from cli.serve import free_port
from environments.gsm8k import GSM8K
from tests import scenarios


def test_the_bundled_problems_train_the_demos_model_end_to_end(tmp_path: Path) -> None:
    model = demo_model.make(demo_model.cache_folder(), progress=lambda *_: None)
    (tmp_path / "rewards.py").write_text("def digits(problem, completion):\n    return min(len(completion), 4) / 4\n")
    scenarios.bridge(
        *("run", "--model", model, "--environment", "gsm8k", "--data", str(GSM8K.bundled), "--training-steps", "2"),
        *("--reward", "math,format=0.5,rewards.py:digits=0.1", "--eval-samples", "1", "--lr", "2e-4"),
        # It ends nine in ten completions at once, and groups of equal rewards teach nothing: more of them, and hotter.
        *("--temperature", "2", "--batch-size", "128"),
        *("--max-new-tokens", "8", "--device", "cpu", "--port", str(free_port("127.0.0.1"))),
        *("--run-dir", "run", "--save-path", "saved"),
        *("--", *scenarios.EAGER),
        folder=tmp_path,
    )
    scenarios.check_metrics(tmp_path / "run", steps=2)
    assert (tmp_path / "saved" / "step_2").is_dir()
    assert all(
        step["reward_parts"].keys() == {"math", "format", "digits"} for step in scenarios.metrics(tmp_path / "run")
    )
