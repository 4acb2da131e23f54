"""Run TRL's own tests of `GRPOTrainer` with every trainer on one live server: `make test-foreign TRL=/path/to/trl`.

TRL's packages do not include its tests, so a clone of TRL is needed. Models and data that the tests load from the hub
are replaced by tiny stand-ins, in folders of the same names. One server runs at a time: first for the model that most
tests train, then one for each other model that a test turned out to train.

Not covered: what a test's result means (`tests/foreign/trl_on_bridge.py`), and tests of images and of GPUs.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from tests import scenarios
from tests.models import chat, tiny
from tests.models.families import FAMILIES

HERE = Path(__file__).parent
CLONE = "git clone --depth 1 --branch v1.16.0 https://github.com/huggingface/trl /path/to/trl"
SUITE = "tests/test_grpo_trainer.py"
"""Its imports must fit the installed TRL: another version's may not."""
OTHERS = "VLM or Slow or vlm or image"
"""Tests of vision-language models, and those that TRL runs on GPUs alone."""
NAMES = Path("trl-internal-testing")
MODELS: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "tiny-Qwen2ForCausalLM-2.5": (tiny.qwen2, "qwen2_5"),
    "tiny-Qwen3ForCausalLM": (FAMILIES["Qwen3"], "qwen3"),
    "tiny-Qwen3MoeForCausalLM": (FAMILIES["Qwen3-MoE"], "qwen3"),
    "tiny-Gemma2ForCausalLM": (FAMILIES["Gemma 2"], "gemma"),
    "tiny-Glm4MoeForCausalLM": (FAMILIES["GLM-4.5"], "qwen3"),
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
RANK = 8
"""Of PEFT's adapters by default."""
NUM_TRAIN = 17
"""Rows of the data set of the same name on the hub; it has two more to evaluate on."""


def main() -> int:
    """Run the tests of the clone named by the first argument, and return pytest's exit code."""
    repository = Path(sys.argv[1] if len(sys.argv) > 1 else "").absolute()
    if not (repository / SUITE).is_file():
        named = f"{repository} has no {SUITE}" if len(sys.argv) > 1 and sys.argv[1] else "TRL's repository is not named"
        sys.stderr.write(f"error: {named}\nhint: {CLONE}, and make test-foreign TRL=/path/to/trl\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="bridge-foreign-") as name:
        folder = Path(name)
        if fault := misfit(repository, folder):
            version = importlib.metadata.version("trl")
            fitting = CLONE.replace("v1.16.0", f"v{version}")
            sys.stderr.write(
                f"error: {SUITE} does not fit TRL {version}, which is installed: {fault}\nhint: {fitting}\n"
            )
            return 2
        stand_ins(folder)
        return run_on_each(repository, folder)


def run_on_each(repository: Path, folder: Path) -> int:
    """Run the suite on each model that its tests train, in order of discovery; return the first failure's code."""
    tests: dict[str, list[str]] = {name: [] for name in MODELS} | {next(iter(MODELS)): [str(repository / SUITE)]}
    totals: Counter[str] = Counter()
    code = 0
    for number, name in enumerate(MODELS):
        if not tests[name]:
            continue
        found = folder / f"{name}.json"
        with scenarios.served(folder / NAMES / name, folder / f"server-{number}", max_lora_rank=RANK) as server:
            environment = {
                **os.environ, "BRIDGE_FOREIGN_SERVER": str(server.path), "BRIDGE_FOREIGN_MODEL": str(NAMES / name),
                "BRIDGE_FOREIGN_RESULT": str(found), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                "HF_DATASETS_CACHE": str(folder / "cache"),
                "TRL_EXPERIMENTAL_SILENCE": "1",
                "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            }  # fmt: skip
            command = [
                sys.executable, "-m", "pytest", *tests[name], "--rootdir", str(repository),
                "-p", "trl_on_bridge", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=300", "-q", "-rfEx",
                "-k", f"not ({OTHERS})", *sys.argv[2:],
            ]  # fmt: skip
            code = code or subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        if not found.is_file():  # pytest was stopped, or collected nothing
            return code
        result = json.loads(found.read_text())
        totals.update(result["counts"])
        for test, model in result["of_another_model"].items():
            served = model.removeprefix(f"{NAMES}/")
            if number == 0 and served in MODELS:
                totals["needs another model"] -= 1
                tests[served].append(str(repository / test))
    sys.stdout.write(f"all models: {', '.join(f'{count} {outcome}' for outcome, count in totals.items())}\n")
    return code


def misfit(repository: Path, folder: Path) -> str:
    """Return why the suite cannot be collected with the installed TRL; empty if it can."""
    command = [
        sys.executable, "-m", "pytest", str(repository / SUITE), "--rootdir", str(repository), "--collect-only", "-q",
        "-p", "trl", "-p", "no:cacheprovider", "-o", "addopts=",  # the installed TRL, not the repository's
    ]  # fmt: skip
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    faults = [line[1:].strip() for line in ended.stdout.splitlines() if line.startswith("E ")]
    return "" if ended.returncode == 0 else (faults or ended.stdout.splitlines() or ["it has no tests"])[-1]


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
    for kind in ("standard", "conversational"):
        rows = [
            {"prompt": prompt if kind == "standard" else [{"role": "user", "content": prompt}]} for prompt in PROMPTS
        ]
        files = {"train": rows[:NUM_TRAIN], "test": rows[NUM_TRAIN:]}
        for split, rows_of_split in files.items():
            (data / f"{kind}_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_split))
        paths = "".join(f"      - split: {split}\n        path: {kind}_{split}.jsonl\n" for split in files)
        configs.append(f"  - config_name: {kind}_prompt_only\n    data_files:\n{paths}")
    (data / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")


if __name__ == "__main__":
    sys.exit(main())
