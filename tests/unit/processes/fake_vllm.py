"""A small stand-in for vLLM: it writes a manifest, reports its health, and has an engine process that can be killed.

It is run by path and imports nothing slow.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--template", type=Path, help="the manifest without the server's identity")
    parser.add_argument("--manifest", type=Path, help="where to write it")
    parser.add_argument("--status", type=int, default=200, help="status code of each answer")
    parser.add_argument("--answer-after-s", type=float, default=0.0, help="delay of each answer")
    parser.add_argument("--no-health", action="store_true", help="only serve /v1/models")
    parser.add_argument("--slow-start-s", type=float, default=0.0, help="start time of any model but `first`")
    parser.add_argument("--fail-with", help="error to raise for any model but `first`")
    return parser.parse_args()


def write_manifest(template: Path, manifest: Path) -> None:
    """Write the manifest with this process as the server."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    document = json.loads(template.read_text())
    document["server"] = {**document["server"], "pid": os.getpid(), "start_ticks": ticks}
    manifest.with_suffix(".new").write_text(json.dumps(document))
    manifest.with_suffix(".new").rename(manifest)


def serve(given: argparse.Namespace) -> None:
    """Serve until a signal arrives."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(given.answer_after_s)
            known = self.path == "/v1/models" or not given.no_health
            self.send_response(given.status if known else 404)
            self.end_headers()
            self.wfile.write(f"{given.model} as {given.served_model_name}".encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", given.port), Answers)
    engine = subprocess.Popen(["/bin/sleep", "600"])

    def end(*_: object) -> None:
        engine.kill()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    sys.stdout.write(f"ready {given.model} engine {engine.pid}\n")
    sys.stdout.flush()
    if given.template:
        write_manifest(given.template, given.manifest)
    server.serve_forever()


if __name__ == "__main__":
    given = arguments()
    if given.model != "first":
        if given.fail_with:
            raise MemoryError(given.fail_with)
        time.sleep(given.slow_start_s)
    serve(given)
