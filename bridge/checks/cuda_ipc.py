"""Check that one process can open and write the GPU memory of another, by doing it.

Not covered: the two processes (`cuda_ipc_trial.py`), the weights of a live server (`bridge verify`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.checks.child import Ended, run_module
from bridge.checks.result import Check, failed, passed, skipped

NAME = "CUDA IPC"
EXPECTED = "a second process writes into the first one's GPU memory"
TRIAL_TIMEOUT_S = 90.0
MARK = 20_261
"""What the second process writes."""
READ = "read "
"""What the exporter's last line begins with; the value that it read follows."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A known reason why the driver refuses."""

    signs: tuple[str, ...]
    """Any of these in the error, in lower case, tells it from the others."""
    meaning: str
    """The reason in words."""
    remedy: str
    """What mends it."""


SURE = (
    Cause(
        signs=("busy or unavailable", "exclusive"),
        meaning="the GPU takes one process at a time (compute mode)",
        remedy="sudo nvidia-smi -c DEFAULT",
    ),
    Cause(
        signs=("out of memory",),
        meaning="no memory is left on the GPU for two small processes",
        remedy="nvidia-smi names the processes that use the GPU: stop yours, or lower --gpu-memory-utilization",
    ),
    Cause(
        signs=("no space left", "shared memory", "shm"),
        meaning="/dev/shm, which holds torch's reference counters, is full or missing",  # noqa: S108  a name
        remedy="docker run --shm-size=1g ..., or: df -h /dev/shm",
    ),
)
"""Their signs have no other meaning."""
LIKELY = (
    Cause(
        signs=("pidfd", "operation not permitted", "permission denied"),
        meaning="the kernel forbids one process to reach into the other (ptrace rules)",
        remedy="docker run --cap-add=SYS_PTRACE ..., or on the host: sudo sysctl kernel.yama.ptrace_scope=0",
    ),
    Cause(
        signs=("invalid", "mapping", "os call failed", "not supported", "peer"),
        meaning="the two processes do not share the namespaces that the driver needs, or the platform has no CUDA IPC",
        remedy="docker run --ipc=host --pid=host ... (or container:NAME for both); in WSL 2 update the driver",
    ),
)
"""Their signs also appear when the allocator's segments are expandable."""


def two_processes_share(uuid: str | None, environment: Mapping[str, str]) -> Check:
    """Run the trial on the GPU `uuid` and judge it."""
    if uuid is None:
        return skipped(NAME, "needs a GPU", EXPECTED)
    return judge(run_module("bridge.checks.cuda_ipc_trial", "export", uuid, timeout_s=TRIAL_TIMEOUT_S), environment)


def judge(trial: Ended, environment: Mapping[str, str]) -> Check:
    """Tell from the exporter's end whether the memory was one, and if not, why."""
    trouble = trial.trouble()
    if trouble is None:
        found = trial.stdout.strip().rpartition("\n")[2].removeprefix(READ)
        if found == str(MARK):
            return passed(NAME, "a second process wrote, the first one read it", EXPECTED)
        return failed(
            NAME,
            f"the handle opened, but the first process read {found or 'nothing'} where the second wrote {MARK}",
            EXPECTED,
            "run both on the same GPU driver: bridge doctor inside the container that serves",
        )
    for cause in (*SURE, *_expandable(environment), *LIKELY):
        if any(sign in trouble.lower() for sign in cause.signs):
            return failed(NAME, f"{trouble}: {cause.meaning}", EXPECTED, cause.remedy)
    remedy = "run it by hand for the whole error: python -m bridge.checks.cuda_ipc_trial export GPU-UUID"
    return failed(NAME, trouble, EXPECTED, remedy)


def _expandable(environment: Mapping[str, str]) -> list[Cause]:
    """Return the cause that holds for any error while an allocator variable asks for expandable segments."""
    return [
        Cause(signs=("",), meaning=f"{variable} asks for expandable segments", remedy=f"unset {variable}")
        for variable in ALLOCATOR_VARIABLES
        if "expandable_segments:True" in environment.get(variable, "")
    ]
