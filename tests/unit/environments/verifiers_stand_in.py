"""Stands in for `bridge_environments/verifiers_program.py`: it speaks the same protocol, and can be made to fail.

Its environments are named after their behavior.
"""

import contextlib
import json
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

NUM_TASKS = 150


def listed(index: int) -> dict[str, Any]:
    return {"prompt": f"task {index}", "task": {"idx": index}}


class Host:
    def __init__(self, config: dict[str, Any], held_out: dict[str, Any] | None) -> None:
        self._name, self._held_out = config["taskset"]["id"], held_out
        self._read: dict[int, int] = {}
        if self._name == "unknown":
            raise RuntimeError("taskset 'unknown' not found")
        if self._name == "two seats":
            raise ValueError("2 of its agents use the trained model")

    def tasks(self, number: int, count: int, held_out: bool = False) -> list[dict[str, Any]]:
        if self._name == "unlisted":
            raise RuntimeError("no data")
        if self._name == "slow":
            time.sleep(60)
        num_tasks = (self._held_out or {})["num"] if held_out else NUM_TASKS
        begin = self._read.get(number, 0)
        self._read[number] = end = min(begin + count, num_tasks)
        return [listed(index) for index in range(begin, end)]

    def run(self, task: dict[str, Any], base_url: str) -> dict[str, float]:
        if self._name == "crashing" and task["idx"] == 1:
            os._exit(3)
        if task["idx"] == 2:
            raise RuntimeError("ProviderError: no model")
        sys.stdout.write(f"{base_url}\n")
        sys.stdout.flush()
        os.write(1, b"noise\n")
        return {"pid": float(os.getpid()), "place": float(task["idx"])}


def main() -> None:
    host: Any = None
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(connection.recv_bytes())
            try:
                if request["method"] == "load":
                    host, result = Host(**request["given"]), None
                else:
                    result = getattr(host, request["method"])(**request["given"])
                answer = {"result": result}
            except (RuntimeError, ValueError) as error:
                answer = {"error": str(error), "refused": isinstance(error, ValueError)}
            connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
