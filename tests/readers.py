"""Check that other programs can read what Bridge saves: checkpoints and exports of every family.

    python -m tests.readers FOLDER [--transformers4 PYTHON] [--vllm VERSION] [--record]

Each family's tiny model is saved as a checkpoint, as an export of it, and, where PEFT can adapt it, as an export of an
adapter, from a source in the form of transformers 5 and, where transformers 4 has the class, from one that
transformers 4 wrote. Each folder is then read by every environment, which reports its configuration and log-probs in
float32. `make readers` installs the environments and runs this.

vLLM runs without its kernels: its code reads the configuration and derives from it what an engine is built from. The
sources as transformers 5 writes them are read by transformers 4, too, which shows that a difference is seen.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from bridge.checkpoints.model_export import export
from bridge.weights import loaded, model_folder, skeleton
from tests import family_results
from tests.contract import wheels
from tests.models import tiny
from tests.models.families import FAMILIES, INSIDE, ON_GPUS

READER = Path(__file__).parent / "models" / "reader.py"
TOLERANCE = 2e-4
"""Nats between two versions of transformers in float32."""
ALL = {**FAMILIES, **ON_GPUS}
OURS = "transformers 5"
Report = dict[str, Any]


def trained(source: Path) -> PreTrainedModel:
    """Load a model and change each of its weights, as training would."""
    config = AutoConfig.from_pretrained(source)
    model: PreTrainedModel = skeleton.auto_class(config).from_pretrained(source, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.rand(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def adapter(source: Path, folder: Path) -> None:
    """Save an adapter of every linear layer with random numbers, as PEFT writes it."""
    import peft

    model = loaded.from_pretrained(str(source), torch.bfloat16)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "o_proj", "qkv_proj", "q_b_proj"])
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(str(folder))


def saved(source: Path, folder: Path, *, is_inside: bool) -> Iterator[Path]:
    """Save the model in `source` in each way, and yield the folders."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    model = trained(source)
    assert model_folder.save(model, source, checkpoint) == []
    yield checkpoint
    yield export(checkpoint, folder / "export").folder
    if not is_inside:
        adapter(source, folder / "adapter")
        yield export(folder / "adapter", folder / "merged").folder


def read(python: str, folders: list[Path], *, form: str, path: str = "") -> dict[str, Report]:
    """Let a different Python interpreter read the folders, and return its report on each."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/tmp",
        "PYTHONPATH": path,
    }
    command = [python, "-P", str(READER), form, *map(str, folders)]
    ended = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"{python} could not read them: exit status {ended.returncode}")
    return {line["folder"]: line for line in map(json.loads, ended.stdout.splitlines())}


def differences(ours: Report, theirs: Report) -> list[str]:
    """Return the differences between two readers' reports on a folder."""
    if "error" in theirs:
        return [theirs["error"]]
    found = [
        f"{name}: {theirs['config'][name]}, expected {value}"
        for name, value in ours["config"].items()
        if theirs["config"].get(name, value) != value
    ]
    if "logprobs" in ours and "logprobs" in theirs:
        most = max(abs(a - b) for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=True))
        theirs["most"] = most
        if most > TOLERANCE:
            found.append(f"log-probs differ by {most:.2g} nats")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models are written; it is emptied first")
    parser.add_argument("--transformers4", metavar="PYTHON", help="an interpreter with transformers 4")
    parser.add_argument("--vllm", metavar="VERSION", help="a vLLM, whose Python files are downloaded")
    parser.add_argument("--record", action="store_true", help="write docs/families.md from what is found")
    parser.add_argument("--families", nargs="*", default=[*ALL])
    chosen = parser.parse_args()
    shutil.rmtree(chosen.folder, ignore_errors=True)
    sources: dict[str, dict[str, Path]] = {}
    for number, family in enumerate(chosen.families):
        source = tiny.write(ALL[family](), chosen.folder / f"{number:02}" / "source")
        sources[family] = {"5": source}
    if chosen.transformers4:  # the same models in transformers 4's format
        rewritten = read(chosen.transformers4, [each["5"] for each in sources.values()], form="rewrite")
        for each in sources.values():
            if "error" not in rewritten[str(each["5"])]:
                each["4"] = Path(rewritten[str(each["5"])]["written"])
    folders: dict[str, dict[str, list[Path]]] = {}
    for family, each in sources.items():
        folders[family] = {
            form: [*saved(source, source.parent / f"from-{form}", is_inside=family in INSIDE)]
            for form, source in each.items()
        }
    everything = [folder for by_form in folders.values() for made in by_form.values() for folder in made]
    written = [each["5"] for each in sources.values()]
    reports = {OURS: read(sys.executable, [*everything, *written], form="transformers")}
    if chosen.transformers4:
        reports["transformers 4"] = read(chosen.transformers4, [*everything, *written], form="transformers")
    if chosen.vllm:
        source_of_vllm = str(wheels.fetch_python(chosen.vllm))
        reports["vLLM"] = read(sys.executable, [*everything, *written], form="vllm", path=source_of_vllm)
    versions = ", ".join(f"{name} {next(iter(read_by.values()))['version']}" for name, read_by in reports.items())
    results: dict[str, dict[str, object]] = {}
    for family, by_form in folders.items():
        made = [folder for of_form in by_form.values() for folder in of_form]
        results[family] = {"folders": len(made), "versions": f"{datetime.now(UTC):%Y-%m-%d}: {versions}"}
        for name, column in (("transformers 4", "transformers_4"), ("vLLM", "vllm")):
            results[family][column] = judged(made, reports, name) if name in reports else "not run"
        if "error" in reports.get("vLLM", {}).get(str(sources[family]["5"]), {}):  # all copies fail, too
            results[family]["vllm"] = "refuses the source, too"
        alone = [sources[family]["5"]]
        known = shortest(judged(alone, reports, "transformers 4")) if chosen.transformers4 else "not run"
        results[family]["source"] = known
        sys.stdout.write(f"{family}: {results[family]}\n")
    if chosen.record:
        family_results.record_readers(results)
    sys.exit(any("DIFFERS" in str(found[name]) for found in results.values() for name in ("transformers_4", "vllm")))


def shortest(found: object) -> object:
    """Return the number of nats in a text, or the reason of the failure in a few words."""
    if not isinstance(found, str):
        return found
    named = re.search(r"log-probs differ by (\S+) nats", found)
    return float(named[1]) if named else found.removeprefix("DIFFERS: ").partition(":")[0]


def judged(made: list[Path], reports: Mapping[str, Mapping[str, Report]], name: str) -> object:
    """Return a reader's difference from transformers 5: nats, None if it lacks the class, or an error text."""
    theirs = [reports[name][str(folder)] for folder in made]
    if all(report.get("error", "").startswith("absent") for report in theirs):
        return None
    pairs = zip(made, theirs, strict=True)
    if found := [line for folder, report in pairs for line in differences(reports[OURS][str(folder)], report)]:
        return f"DIFFERS: {'; '.join(found[:4])}"
    return max((report["most"] for report in theirs if "most" in report), default="the same")


if __name__ == "__main__":
    main()
