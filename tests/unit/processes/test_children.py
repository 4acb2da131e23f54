import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from bridge.processes import children, leash, server_log
from tests import scenarios

LIMIT_S = 60.0
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
STUBBORN = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(999)"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", code])
print(child.pid, flush=True)
time.sleep(999)
"""


STARTER = """
import os, sys, time
from pathlib import Path
from bridge.processes import children
child = children.start([sys.executable, "-c", sys.argv[1]], os.environ, Path(sys.argv[2]))
while not child.log.read_text().endswith("\\n"):
    time.sleep(0.02)
print(child.process.pid, flush=True)
print(child.log.read_text(), end="", flush=True)
time.sleep(60)
"""
"""Starts a child, prints its pid and output, and waits."""


def start(code: str, tmp_path: Path) -> children.Child:
    return children.start([sys.executable, "-c", code], os.environ, tmp_path / "log")


def grandchild(child: children.Child) -> int:
    """Wait until the child has printed the pid of its own child, and return it."""
    return int(grandchild_line(child))


def grandchild_line(child: children.Child) -> str:
    """Wait until the child has printed a line, and return it."""
    deadline = time.monotonic() + LIMIT_S
    while not (text := child.log.read_text()).endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return text


def gone_within(limit_s: float, pids: set[int]) -> None:
    deadline = time.monotonic() + limit_s
    while left := {pid for pid in pids if not is_gone(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def getsid(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_child_leads_its_own_session(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchild(child)
    assert os.getsid(child.process.pid) == child.process.pid != os.getsid(0)
    assert child.is_alive()
    assert child.exit_code() is None
    children.stop(child, grace_s=0.5)
    assert not child.is_alive()


def test_stop_ends_the_entire_process_tree(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    pid = grandchild(child)
    children.stop(child, grace_s=1)
    assert is_gone(child.process.pid)
    assert is_gone(pid)


def test_stop_kills_children_that_ignore_sigterm(tmp_path: Path) -> None:
    child = start(STUBBORN, tmp_path)
    pid = grandchild(child)
    children.stop(child, grace_s=0.3)
    assert child.exit_code() == -signal.SIGKILL
    assert is_gone(pid)


def test_stop_waits_for_several_children_concurrently(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    started = [start(code, folder) for code, folder in zip((STUBBORN, FAMILY, STUBBORN), folders, strict=True)]
    pids = [grandchild(child) for child in started]
    children.stop(*started, grace_s=0.3)
    assert [child.exit_code() for child in started] == [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGKILL]
    assert all(map(is_gone, pids))
    children.stop()


def test_stop_finds_the_orphans_of_a_dead_child(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    pid = grandchild(child)
    os.kill(child.process.pid, signal.SIGKILL)
    while child.is_alive():
        time.sleep(0.01)
    assert not is_gone(pid)
    children.stop(child, grace_s=0.3)
    assert is_gone(pid)


def test_stop_leaves_unrelated_processes_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    children.stop(start(FAMILY, tmp_path), grace_s=0.3)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_shared_memory_of_a_killed_child_is_removed(tmp_path: Path) -> None:
    code = (
        "import signal, time; from multiprocessing.shared_memory import SharedMemory\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(SharedMemory(create=True, size=64).name, flush=True); time.sleep(60)"
    )
    child = start(code, tmp_path)
    while not (name := child.log.read_text()).endswith("\n"):
        time.sleep(0.02)
    segment = Path("/dev/shm") / name.strip()
    assert segment.exists()
    children.stop(child, grace_s=0.2)
    assert child.exit_code() == -signal.SIGKILL
    assert not segment.exists()


def test_second_interrupt_ends_the_grace_period(tmp_path: Path) -> None:
    hears = "lambda *_: print('asked to end', flush=True))\nchild"
    child = start(STUBBORN.replace("signal.SIG_IGN)\nchild", hears), tmp_path)
    pid = grandchild(child)

    def interrupt() -> None:
        while "asked to end" not in child.log.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt, daemon=True)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        children.stop(child, grace_s=999)
    presser.join()
    assert is_gone(child.process.pid)
    assert is_gone(pid)


def test_interrupt_before_sigterm_kills_the_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = start(STUBBORN, tmp_path)
    pid = grandchild(child)
    tree_of, presses = children._tree, iter([KeyboardInterrupt])

    def pressed(of: children.Child) -> set[psutil.Process]:
        for press in presses:
            raise press
        return tree_of(of)

    monkeypatch.setattr(children, "_tree", pressed)
    with pytest.raises(KeyboardInterrupt):
        children.stop(child, grace_s=999)
    assert is_gone(child.process.pid)
    assert is_gone(pid)


def test_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import os, sys, time; from pathlib import Path; from bridge.processes import children\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(999)']\n"
        f"child = children.start(sleeper, os.environ, Path({str(log)!r}))\n"
        "time.sleep(0.5); print(child.process.pid, flush=True); time.sleep(60)"
    )
    us = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert us.stdout is not None
    pid = int(us.stdout.readline())
    assert not is_gone(pid)
    us.kill()
    us.wait()
    while not is_gone(pid):
        time.sleep(0.02)


def test_child_ignoring_sigterm_does_not_outlive_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    us = subprocess.Popen(
        [sys.executable, "-c", STARTER, STUBBORN, str(log)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert us.stdout is not None
    pid = int(us.stdout.readline())
    others = {int(us.stdout.readline()), *(child.pid for child in psutil.Process(pid).children())}
    us.kill()
    us.wait()
    assert not is_gone(pid), "it should ignore SIGTERM"
    gone_within(leash.GRACE_S + 10, {pid, *others})


def test_orphans_of_a_killed_child_do_not_outlive_the_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    us = subprocess.Popen([sys.executable, "-c", STARTER, FAMILY, str(log)], stdout=subprocess.PIPE, text=True)
    assert us.stdout is not None
    pid, orphan = int(us.stdout.readline()), int(us.stdout.readline())
    os.kill(pid, signal.SIGKILL)
    us.kill()
    us.wait()
    gone_within(leash.GRACE_S + 10, {pid, orphan})


def test_child_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    started: list[children.Child] = []
    thread = threading.Thread(target=lambda: started.append(start(FAMILY, tmp_path)))
    thread.start()
    thread.join()
    grandchild(started[0])
    time.sleep(0.5)
    assert started[0].is_alive()
    children.stop(*started, grace_s=0.5)


def test_guard_process_exits_with_its_child(tmp_path: Path) -> None:
    child = start("print(1, flush=True)", tmp_path)
    guards = [process for process in psutil.process_iter() if getsid(process.pid) == child.process.pid]
    assert not children.wait_until(child, lambda: False, limit_s=20, progress=lambda _: None)
    assert psutil.wait_procs([guard for guard in guards if guard.pid != child.process.pid], timeout=20)[1] == []
    children.stop(child, grace_s=0.5)


def test_guard_is_not_a_child_of_the_program(tmp_path: Path) -> None:
    child = start("import os, time; print(os.listdir('/proc/self/fd'), flush=True); time.sleep(60)", tmp_path)
    grandchild_line(child)
    assert psutil.Process(child.process.pid).children() == [], "the guard must not be its child"
    assert len(ast.literal_eval(child.log.read_text())) == 4, "three streams, and the directory being listed"
    children.stop(child, grace_s=0.5)


def test_output_of_children_is_in_order(tmp_path: Path) -> None:
    for word in ("one", "two"):
        child = start(f"print({word!r})", tmp_path)
        assert not children.wait_until(child, lambda: False, limit_s=20, progress=lambda _: None)
        children.stop(child, grace_s=0.5)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_wait_notices_an_exit_and_keeps_the_exit_code(tmp_path: Path) -> None:
    child = start("import sys; sys.exit(7)", tmp_path)
    assert not children.wait_until(child, lambda: False, limit_s=20, progress=lambda _: None)
    assert child.exit_code() == 7
    children.stop(child, grace_s=0.5)


def test_wait_ends_at_its_limit_or_at_readiness(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    progress: list[float] = []
    assert not children.wait_until(child, lambda: False, limit_s=0.5, progress=progress.append)
    assert progress == sorted(progress)
    assert children.wait_until(child, lambda: True, limit_s=0.5, progress=progress.append)
    children.stop(child, grace_s=0.5)


LOG = """\
(APIServer pid=10) INFO 11-20 11:03:00 [utils.py:300] starting
(Worker pid=12) ERROR 11-20 11:26:04 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=12) ERROR 11-20 11:26:04 [multiproc_executor.py:953]     raise RuntimeError(
(Worker pid=12) ERROR 11-20 11:26:04 [multiproc_executor.py:953] RuntimeError: Cannot find any model weights
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
(APIServer pid=10) last words
"""


def test_root_error_is_the_first_one_without_vllms_prefix(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    assert server_log.root_error(tmp_path / "log") == "RuntimeError: Cannot find any model weights"
    assert server_log.last_line(tmp_path / "log") == "last words"
    assert server_log.own_error(tmp_path / "log") is None


BARE = """\
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95]   File "/x/core.py", line 88, in run_engine_core
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95]     engine_core = EngineCoreProc(*args)
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95]                   ^^^^^^^^^^^^^^^^^^^^^
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95]   File "/x/triton_scaled_mm.py", line 164, in triton_scaled_mm
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95]     assert scale_a.shape[1] == 1
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95]            ^^^^^^^^^^^^^^^^^^^^^
(EngineCore pid=9) ERROR 11-27 02:12:56 [core.py:95] AssertionError
(APIServer pid=8) Traceback (most recent call last):
(APIServer pid=8)   File "/x/utils.py", line 1272, in wait_for_engine_startup
(APIServer pid=8) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_error_without_a_message_names_its_location(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(BARE)
    error = server_log.root_error(tmp_path / "log")
    frame = 'File "/x/triton_scaled_mm.py", line 164, in triton_scaled_mm, assert scale_a.shape[1] == 1'
    assert error == f"AssertionError, {frame}"
    (tmp_path / "log").write_text('  File "/x/other.py", line 1, in warn\n    warn()\nINFO ready\nAssertionError\n')
    assert server_log.root_error(tmp_path / "log") == "AssertionError", "that traceback is another error's"


def test_tests_show_the_engines_traceback_not_the_servers(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(BARE)
    shown = scenarios.why_it_ended(tmp_path / "log").splitlines()
    assert shown[0].startswith("AssertionError, File")
    assert (shown[2], shown[-1]) == (BARE.splitlines()[0], BARE.splitlines()[8])
    (tmp_path / "log").write_text("one\ntwo\n")
    assert scenarios.why_it_ended(tmp_path / "log").splitlines()[-2:] == ["one", "two"]


def test_log_without_an_error_reports_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\n\ntwo\n")
    assert server_log.root_error(tmp_path / "log") == "no error in its log, which ends with: two"
    (tmp_path / "log").write_text("")
    assert server_log.root_error(tmp_path / "log") == "it printed nothing"


def test_pydantic_errors_are_reported_in_full(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, max_model_len is too long [type=value_error, input_value=...]\n"
        "    For further information visit x\n"
    )
    assert server_log.root_error(tmp_path / "log").endswith("for ModelConfig Value error, max_model_len is too long")


LINE = "(EngineCore pid=12) INFO 11-24 10:00:00 [core.py:7] "


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        ((), "importing packages"),
        (("a warning of torch",), "importing packages"),
        ((f"{LINE}Initializing a V1 LLM engine (v0.26.0) with config: x",), "starting the engine"),
        ((f"{LINE}Starting to load model m...", f"{LINE}something else"), "loading weights"),
        (("Loading safetensors checkpoint shards:  50% Completed | 1/2",), "loading weights"),
        ((f"{LINE}Loading weights took 1.2 seconds", f"{LINE}Model loading took 14 GiB and 2.1 seconds"), "compiling"),
        ((f"{LINE}Dynamo bytecode transform time: 4.2 s", f"{LINE}torch.compile took 20 s"), "sizing the KV cache"),
        (("Capturing CUDA graphs (PIECEWISE):   3%|", "\rCapturing CUDA graphs: 6%"), "capturing graphs"),
        ((f"{LINE}Graph capturing finished in 3 secs", "INFO:  Application startup complete."), "opening its port"),
    ],
)
def test_last_phase_line_determines_the_start_phase(tmp_path: Path, lines: tuple[str, ...], phase: str) -> None:
    (tmp_path / "log").write_text(f"{LINE}Capturing CUDA graphs\n")
    server_log.begin_log(tmp_path / "log", "started")  # what an earlier server logged does not count
    with (tmp_path / "log").open("a") as log:
        log.writelines(f"{line}\n" for line in lines)
    assert server_log.current_phase(tmp_path / "log") == phase


def test_seconds_of_each_start_phase_add_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    phases = server_log.StartPhases(log)
    assert phases.summary() == ""
    assert [phases.measure(5.0), phases.measure(9.0)] == ["importing packages (5 s)", "importing packages (9 s)"]
    log.write_text(f"{LINE}Starting to load model m...\n")
    assert phases.measure(9.5) == "loading weights (0 s)"
    log.write_text(f"{LINE}Model loading took 2 GiB\n")
    assert phases.measure(30.0) == "compiling (20 s)"
    assert phases.summary() == ": importing packages 9 s, compiling 20 s"


def test_argparse_error_is_a_root_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --x\nbye\n")
    assert server_log.root_error(tmp_path / "log") == "api_server.py: error: unrecognized arguments: --x"


def test_bridge_error_inside_vllm_keeps_its_class(tmp_path: Path) -> None:
    prefix = "(EngineCore pid=12) ERROR 11-20 11:26:04 [core.py:95] "
    (tmp_path / "log").write_text(
        f"{prefix}bridge.errors.UnsupportedModelError: lm_head.weight is repacked\n{prefix}hint: serve it in bfloat16\n"
    )
    error = server_log.own_error(tmp_path / "log")
    assert error is not None
    assert (type(error).__name__, error.exit_code) == ("UnsupportedModelError", 4)
    assert (error.message, error.hint) == ("lm_head.weight is repacked", "serve it in bfloat16")


def test_refusal_printed_by_the_server_is_shown(tmp_path: Path) -> None:
    prefix = "(APIServer pid=12) "
    lines = ("error: lm_head.weight: stride (1, 8) is not contiguous", "", "hint: use --mode none", "INFO shutdown")
    (tmp_path / "log").write_text("\n".join(prefix + line for line in lines))
    error = server_log.own_error(tmp_path / "log")
    assert error is not None
    assert (type(error).__name__, error.exit_code) == ("AttachError", 4)
    assert (error.message, error.hint) == (lines[0].removeprefix("error: "), "use --mode none")
    assert server_log.root_error(tmp_path / "log") == lines[0]


def test_error_of_another_program_is_not_a_refusal(tmp_path: Path) -> None:
    """Compilers print such errors while vLLM builds kernels at its start, which it may not need."""
    lines = "error: no member named 'bf16'", "torch.OutOfMemoryError: CUDA out of memory", "INFO shutdown"
    (tmp_path / "log").write_text("\n".join(lines))
    assert server_log.own_error(tmp_path / "log") is None


def test_guard_process_keeps_no_secrets(tmp_path: Path) -> None:
    environment = os.environ | {"SOME_TOKEN": "hidden-1"}
    child = children.start(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], environment, tmp_path / "log"
    )
    try:
        assert grandchild_line(child) == "up\n"
        session = [process for process in psutil.process_iter() if _session(process.pid) == child.process.pid]
        guards = [process for process in session if process.pid != child.process.pid]
        assert len(guards) == 1
        assert b"hidden" in Path(f"/proc/{child.process.pid}/environ").read_bytes()
        assert b"hidden" not in Path(f"/proc/{guards[0].pid}/environ").read_bytes()
    finally:
        children.stop(child)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None
