"""What vLLM has to be started with so that it takes adapters of one rank.

Not covered: loading them (`bridge/modes`).
Source: `MaxLoRARanks` in `vllm/config/lora.py`, vLLM 0.26 to 0.33.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bridge.errors import UsageError
from cli import vllm_flags

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of a slot that vLLM has."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Flags and variables for one adapter at a time."""

    argv: tuple[str, ...] = ()
    """Flags of vLLM."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of vLLM."""
    notes: tuple[str, ...] = ()
    """What was derived and why, a line each."""

    @classmethod
    def of(cls, rank: int | None, flags: Sequence[str]) -> "Adapters":
        """Return what adapters of `rank` need beside the user's own `flags`; None: there are none.

        Raises:
            UsageError: vLLM has no slot as large as that.
        """
        if rank is None:
            return cls()
        size = next((size for size in RANKS if size >= rank), None)
        if size is None:
            raise UsageError(
                f"--max-lora-rank {rank}: vLLM takes adapters up to rank {RANKS[-1]}",
                remedy=f"--lora-r {RANKS[-1]}, or train all weights with --mode shared_vllm",
            )
        wanted = {"--enable-lora": [], "--max-lora-rank": [str(size)], "--max-loras": ["1"]}
        missing = wanted.keys() - vllm_flags.names(flags)
        note = f"--max-lora-rank {size}: the smallest slot of vLLM's that takes rank {rank}"
        return cls(
            argv=tuple(part for flag, value in wanted.items() if flag in missing for part in (flag, *value)),
            environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            notes=(note,) if size != rank and "--max-lora-rank" in missing else (),
        )
