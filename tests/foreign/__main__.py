"""Run TRL's own tests of its trainers with every trainer on one live server: `make test-foreign TRL=/path/to/trl`.

TRL's packages do not include its tests, so a clone of TRL is needed. Models and data that the tests load from the hub
are replaced by tiny stand-ins, in folders of the same names. One server runs at a time: first for the model that most
tests train, then one for each other model that a test turned out to train. Flags of pytest may follow.

Not covered: what a test's result means (`tests/foreign/trl_on_bridge.py`), and tests of images and of GPUs.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from benchmarks import _results
from tests import scenarios
from tests.models import chat, tiny
from tests.models.families import FAMILIES

HERE = Path(__file__).parent
CLONE = "git clone --depth 1 --branch v1.16.0 https://github.com/huggingface/trl /path/to/trl"
SUITES = (
    "tests/test_grpo_trainer.py", "tests/test_rloo_trainer.py", "tests/test_distillation_trainer.py",
    "tests/experimental/test_gmpo_trainer.py", "tests/experimental/test_server_distillation_trainer.py",
    "tests/experimental/test_sdft_trainer.py", "tests/experimental/test_sdpo_trainer.py",
    "tests/experimental/test_self_distillation_trainer_behavior.py", "tests/experimental/test_gold_trainer.py",
    "tests/experimental/test_iw_opd_trainer.py",
)  # fmt: skip
"""Their imports must fit the installed TRL: another version's may not."""
OTHERS = "VLM or Slow or vlm or image"
"""Tests of vision-language models, and those that TRL runs on GPUs alone."""
NAMES = Path("trl-internal-testing")
MODELS: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "tiny-Qwen2ForCausalLM-2.5": (tiny.qwen2, "qwen2_5"),
    "tiny-Qwen3ForCausalLM": (FAMILIES["Qwen3"], "qwen3"),
    "tiny-Qwen3MoeForCausalLM": (FAMILIES["Qwen3-MoE"], "qwen3"),
    "tiny-Gemma2ForCausalLM": (FAMILIES["Gemma 2"], "gemma"),
    "tiny-Glm4MoeForCausalLM": (FAMILIES["GLM-4.5"], "qwen3"),
    "tiny-LlamaForCausalLM-3.2": (tiny.llama, "llama3_2"),
}
"""Models that the tests train, in the order in which they are served -> their configuration and chat template."""
REWARDS: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "tiny-Qwen2ForSequenceClassification-2.5": (tiny.qwen2, "qwen2_5"),
    "tiny-Qwen3ForSequenceClassification": (FAMILIES["Qwen3"], "qwen3"),
    "tiny-LlamaForSequenceClassification-3.2": (tiny.llama, "llama3_2"),
}
"""Models that the tests reward with."""
LLAMA_PAD = "<|finetune_right_pad_id|>"
"""The token that a test pads Llama's rewards with."""
COLORS = ("Red", "Blue", "Green", "White", "Black", "Brown", "Pink", "Gray", "Gold", "Cyan", "Teal", "Navy", "Plum")
PROMPTS = [f"{color} is better than" for color in (*COLORS, "Ruby", "Rose", "Sand", "Mint", "Lime", "Sky")]
ASSISTANT = [{"role": "assistant", "content": "ugly."}]
ROWS: dict[str, Callable[[str], dict[str, Any]]] = {
    "standard_prompt_only": lambda text: {"prompt": text},
    "conversational_prompt_only": lambda text: {"prompt": user(text)},
    "conversational_prompt_completion": lambda text: {"prompt": user(text), "completion": ASSISTANT},
    "conversational_language_modeling": lambda text: {"messages": [*user(text), *ASSISTANT]},
}
"""Configuration of the data set -> a row with this text."""
OUTCOMES = (
    "passed", "creates no trainer", "refused by name", "fails on stock TRL, too", "needs another model",
    "skipped by TRL", "broken",
)  # fmt: skip
"""What can become of a test; `trl_on_bridge.py` decides."""
RANK = 8
"""Of PEFT's adapters by default."""
NUM_TRAIN = 17
"""Rows of the data set of the same name on the hub; it has two more to evaluate on."""


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def main() -> int:
    """Run the tests of the clone, and return 0, 1 if one is broken, or 2 if they cannot run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trl", nargs="?", default="", help=f"TRL's repository: {CLONE}")
    parser.add_argument("--suites", nargs="+", default=SUITES, metavar="FILE", help="test files of the repository")
    parser.add_argument("--max-steps", type=int, default=0, help="stop trainers that would train whole epochs")
    parser.add_argument("--out", type=Path, help="JSON file for the outcome of each test")
    options, arguments = parser.parse_known_args()
    repository = Path(options.trl).absolute()
    suites = [suite for suite in options.suites if (repository / suite).is_file()]
    if not options.trl or not suites:
        named = f"{repository} has no {SUITES[0]}" if options.trl else "TRL's repository is not named"
        sys.stderr.write(f"error: {named}\nhint: {CLONE}, and make test-foreign TRL=/path/to/trl\n")
        return 2
    for suite in sorted({*options.suites} - {*suites}):
        sys.stderr.write(f"the repository has no {suite}\n")
    with tempfile.TemporaryDirectory(prefix="bridge-foreign-") as name:
        folder = Path(name)
        if fault := misfit(repository, suites, folder):
            version = importlib.metadata.version("trl")
            fitting = CLONE.replace("v1.16.0", f"v{version}")
            sys.stderr.write(
                f"error: the tests do not fit TRL {version}, which is installed: {fault}\nhint: {fitting}, or choose"
                " test files with --suites\n"
            )
            return 2
        stand_ins(folder)
        code, outcomes, fences = run_on_each(repository, suites, folder, options.max_steps, arguments)
    by_suite = {suite: {name: outcome for name, outcome in outcomes.items() if suite in name} for suite in suites}
    for suite, of_suite in by_suite.items():
        line = ", ".join(f"{count} {outcome}" for outcome, count in counts_of(of_suite).items() if count)
        sys.stdout.write(f"{suite}: {line}\n")
    if options.out is not None:
        tests = {suite: {name.partition("::")[2]: why for name, why in own.items()} for suite, own in by_suite.items()}
        counts = {name_of(suite): counts_of(own) for suite, own in tests.items()}
        results = {"max_steps": options.max_steps, "fences": fences, "counts": counts, "tests": tests}
        command = f"python -m tests.foreign /path/to/trl --max-steps {options.max_steps} --suites {' '.join(suites)}"
        document = {**_results.document("trl_suites", results), "command": command}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return code


def name_of(suite: str) -> str:
    """Return what a test file is about: `grpo` for tests/test_grpo_trainer.py."""
    return Path(suite).stem.removeprefix("test_").removesuffix("_behavior").removesuffix("_trainer")


def counts_of(outcomes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the number of tests with each outcome, zeros included."""
    counted = Counter(outcome for outcome, _ in outcomes.values())
    return {outcome: counted[outcome] for outcome in OUTCOMES}


def run_on_each(
    repository: Path, suites: Sequence[str], folder: Path, max_steps: int, arguments: Sequence[str]
) -> tuple[int, dict[str, list[str]], int]:
    """Run the suites on each model that their tests train, in order of discovery.

    Returns:
        0, or 1 if a test is broken, or the code of a pytest without a result; the outcome of each test and why; and the
        number of fences.
    """
    tests: dict[str, list[str]] = {name: [] for name in MODELS}
    tests[next(iter(MODELS))] = [str(repository / suite) for suite in suites]
    outcomes: dict[str, list[str]] = {}
    fences = 0
    for number, name in enumerate(MODELS):
        if not tests[name]:
            continue
        found = folder / f"{name}.json"
        with scenarios.served(folder / NAMES / name, folder / f"server-{number}", max_lora_rank=RANK) as server:
            environment = {
                **os.environ, "BRIDGE_FOREIGN_SERVER": str(server.path), "BRIDGE_FOREIGN_MODEL": str(NAMES / name),
                "BRIDGE_FOREIGN_RESULT": str(found), "BRIDGE_FOREIGN_MAX_STEPS": str(max_steps), "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "TRL_EXPERIMENTAL_SILENCE": "1",
                "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            }  # fmt: skip
            command = [
                sys.executable, "-m", "pytest", *tests[name], "--rootdir", str(repository),
                "-p", "trl_on_bridge", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=300", "-q", "-rfEx",
                "-k", f"not ({OTHERS})", *arguments,
            ]  # fmt: skip
            code = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        if not found.is_file():  # pytest was stopped, or collected nothing
            return code, outcomes, fences
        result = json.loads(found.read_text())
        outcomes |= result["outcomes"]
        fences += result["fences"]
        for test, model in result["of_another_model"].items():
            served = model.removeprefix(f"{NAMES}/")
            if number == 0 and served in MODELS:
                tests[served].append(str(repository / test))
    return int(any(outcome == "broken" for outcome, _ in outcomes.values())), outcomes, fences


def misfit(repository: Path, suites: Sequence[str], folder: Path) -> str:
    """Return why the suites cannot be collected with the installed TRL; empty if they can."""
    command = [
        sys.executable, "-m", "pytest", *(str(repository / suite) for suite in suites), "--rootdir", str(repository),
        "--collect-only", "-q", "-p", "trl", "-p", "no:cacheprovider", "-o", "addopts=",  # the installed TRL
    ]  # fmt: skip
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    faults = [line[1:].strip() for line in ended.stdout.splitlines() if line.startswith("E ")]
    files = [line.removeprefix("ERROR ") for line in ended.stdout.splitlines() if line.startswith("ERROR ")]
    fault = (faults or ended.stdout.splitlines() or ["there are no tests"])[-1]
    return "" if ended.returncode == 0 else f"{fault} ({', '.join(files)})" if files else fault


def stand_ins(folder: Path) -> None:
    """Write what the tests load by name below `folder`."""
    names = folder / NAMES
    for name, (config_of, template) in MODELS.items():
        tokenizer = chat.tokenizer(names / name, template)
        config = config_of()
        config.vocab_size = len(tokenizer)
        tiny.write(config, names / name, std=0.06)
        chat.tokenizer(names / name, template)  # instead of the one that came with the weights
    for name, (config_of, template) in REWARDS.items():
        tokenizer = chat.tokenizer(names / name, template)
        tokenizer.add_tokens(LLAMA_PAD)
        tokenizer.save_pretrained(names / name)
        config = config_of()
        config.vocab_size, config.num_labels, config.pad_token_id = len(tokenizer), 1, tokenizer.eos_token_id
        torch.manual_seed(1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(names / name)
    data = names / "zen"
    data.mkdir()
    configs = []
    for kind, row_of in ROWS.items():
        rows = [row_of(prompt) for prompt in PROMPTS]
        files = {"train": rows[:NUM_TRAIN], "test": rows[NUM_TRAIN:]}
        for split, rows_of_split in files.items():
            (data / f"{kind}_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_split))
        paths = "".join(f"      - split: {split}\n        path: {kind}_{split}.jsonl\n" for split in files)
        configs.append(f"  - config_name: {kind}\n    data_files:\n{paths}")
    (data / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")


if __name__ == "__main__":
    sys.exit(main())
