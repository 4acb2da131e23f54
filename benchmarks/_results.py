"""Common flags, progress lines and the JSON file of every benchmark."""

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import bridge
from bridge.checks import software
from bridge_patches.compatibility import installed_version

RIVALS = ("trl", "liger-kernel", "bitsandbytes")
"""Packages whose versions are recorded, if installed."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the module's docstring as help, and --out."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    return made


def count(text: str) -> int:
    """Parse a flag's value as a number that is at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def document(benchmark: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results with command, date, hardware and versions."""
    rivals = {name: importlib.metadata.version(name) for name in RIVALS if software.installed_version(name)}
    versions = {"bridge": bridge.__version__, "vllm": installed_version(), "torch": str(torch.__version__)}
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {**versions, **rivals},
        "results": results,
    }


def write(benchmark: str, results: Mapping[str, Any], out: Path) -> Path:
    """Write the results to a file named by hardware, vLLM version and date, replacing an existing one."""
    made = document(benchmark, results)
    out.mkdir(parents=True, exist_ok=True)
    hardware = made["hardware"].replace(" ", "-").lower()
    path = out / f"{benchmark}-{hardware}-vllm-{made['versions']['vllm']}-{made['date']}.json"
    path.write_text(json.dumps(made, indent=1) + "\n")
    return path


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns; the first one is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)
