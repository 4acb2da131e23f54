"""`bridge report`: the page of complete, partial and broken runs, of several runs, and what it refuses."""

import html.parser
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bokeh.models import ColumnDataSource

from bridge.checkpoints.metric_table import METRICS, SECTIONS, Total
from bridge.checkpoints.metrics import StepMetrics
from bridge.checkpoints.run_directory import RunDirectory
from bridge.core import folder_claim, json_lines
from bridge_cli import main
from bridge_cli.report import charts, names, record
from bridge_cli.report.page import choices, figures
from tests.cli import report_runs
from tests.cli.test_help import run_python


class Page(html.parser.HTMLParser):
    """A page as a browser parses it: elements and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.words = " ".join(self.text.split())
        self.charts = [
            str(element["aria-label"]).split(". ")[0] for element in self.all("div") if element.get("role") == "img"
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)
        self.text += " " if tag in ("td", "th", "li") else ""

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def written(*runs: Path, out: Path) -> Page:
    assert main.answer(["report", *map(str, runs), "--out", str(out)]) == 0
    return Page(out.read_text())


def drawing(title: str, run: Path) -> charts.Drawing:
    """Draw one chart: all of them take a second."""
    opened = {run.name: record.read(run)}
    metrics = [metric for section in charts.sections(opened.values()).values() for metric in section]
    titled = [metric for metric in metrics if title.startswith(metric.title)]
    (found,) = [drawn for metric in titled for drawn in charts.Artist(opened).drawings(metric) if drawn.title == title]
    return found


def curve(run: Path, title: str, name: str) -> list[float]:
    (line,) = [line for line in drawing(title, run).lines if line.name == name]
    return [float(value) for value in line.values]


def rewrite(run: RunDirectory, *changes: tuple[int, dict[str, Any]]) -> None:
    """Change lines of `metrics.jsonl`, by their index."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for index, change in changes:
        lines[index] |= change
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_page_and_json_of_a_complete_run_have_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=60)
    report_runs.write_rollouts(run, report_runs.groups(60, num_problems=12))
    rewrite(run, *((index, {"my_ratio": index / 60, "scores": {"a": index}}) for index in range(60)))
    assert main.answer(["report", str(run.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (figures,) = document["runs"]
    assert (document["report"], figures["steps"], figures["weight_bytes"]) == (str(run.report), 60, 0)
    assert figures["held_out_before"] == pytest.approx(0.26)
    assert figures["held_out_after"] > 0.6
    assert 20 < figures["fence_ms"] < 30
    assert {"reward_first", "reward_last", "training_s", "fence_p90_ms"} <= figures.keys()
    assert {metric.name for metric in METRICS.values() if metric.over_run} <= figures.keys()
    page = Page(run.report.read_text())
    for heading in ("Learning", "Two engines, one policy", "Time and memory", "Completions over time",
                    "Configuration", "Events", "Other metrics"):  # fmt: skip
        assert heading in page.text
    assert {
        "Mean reward", "Parts of the reward", "Completion length, tokens", "Truncated completions, %", "Entropy, nats",
        "Tokens clipped, %", "Tokens clipped low, %", "Tokens clipped high, %", "Gradient norm", "Loss",
        "Weights changed, %", "Retried requests", "|Δ log-probability|, nats",
        "|Δ log-probability|, max, nats", "Tokens by mismatch, %", "Importance weight",
        "Effective sample size", "Tokens corrected, %", "Time of a step, s", "Rollouts, s", "Training, s",
        "Fence, ms", "Pause, ms", "Tokens generated per second", "Tokens trained on per second", "Tokens generated",
        "Peak memory of the trainer, GiB", "my_ratio", "scores: a",
    } <= set(page.charts)  # fmt: skip
    assert sum("data-root-id" in attributes for attributes in page.all("div")) == len(page.charts)
    for expected in ("Qwen/Qwen2.5-7B-Instruct", "shared_vllm", "--lr", "2e-06", "0 bytes", "finished", "step 30"):
        assert expected in page.text
    assert "KL from the reference, nats: 0" in page.text
    assert "Unscored completions: 0" in page.text
    assert not [attributes for _, attributes in page.elements if {"src", "onclick", "onerror"} & attributes.keys()]
    assert not page.all("link") + page.all("img") + page.all("iframe")
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert str(policy).startswith("default-src 'none'")


def test_derived_value_is_not_listed_as_chosen(tmp_path: Path) -> None:
    path = report_runs.make(tmp_path / "run", num_steps=1).path
    for derived in ((), ("lr",)):
        run = replace(record.read(path), config={"mode": "lora_only", "lr": 1e-5}, derived=derived)
        changed, unchanged = choices(run)[""]
        (row,) = [choice for choice in (unchanged if derived else changed) if choice[0] == "--lr"]
        assert row[1] == "1e-05"


def test_software_and_device_of_runs_are_compared(tmp_path: Path) -> None:
    old, new = (report_runs.make(tmp_path / name, num_steps=1) for name in ("old", "new"))
    for run, vllm in ((old, "0.26.0"), (new, "0.33.0")):
        run.append_start(
            {"command": "bridge run --model m", "vllm": vllm, "torch": "2.13.0", "commit": "abc with changes"}
        )
    alone = written(new.path, out=tmp_path / "one.html").text
    for expected in ("What it ran on", "bridge run --model m", "0.33.0", "2.13.0", "abc with changes"):
        assert expected in alone
    differing = written(old.path, new.path, out=tmp_path / "two.html").text.partition("Differences in configuration")[2]
    table = differing.partition("Learning")[0]
    assert ("0.26.0" in table, "0.33.0" in table, "2.13.0" in table) == (True, True, False)


def test_prompt_of_a_group_is_shown_once(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    problem = {"prompt": [{"role": "user", "content": "two plus two"}], "plain_prompt": "two plus two", "answer": "4"}
    lines = [{"step": step, "problem": problem, "completions": [{"text": "4", "reward": 1.0}]} for step in (1, 2)]
    report_runs.write_rollouts(run, iter(lines))
    text = written(run.path, out=run.report).text
    assert "plain_prompt" not in text
    assert "two plus two" in text


@pytest.mark.parametrize("derived", [7, True, "lr", ["lr", 3], None])
def test_malformed_derived_values_are_ignored(tmp_path: Path, derived: object) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    for file in (run.config, run.server_config):
        file.write_text(json.dumps({"model_name": "m", "derived": derived}))
    assert "Configuration" in written(run.path, out=run.report).text


HOSTILE = "<script>alert(1)</script></div>{{ 7 * 7 }}\x00\x1b[31m\u202etxt.exe\u2066 \ud800 مرحبا"


def test_untrusted_text_never_becomes_markup(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "<b>run", num_steps=5, environment="<i>env")
    completion = {"text": HOSTILE, "reward": 1.0, "parts": {HOSTILE: 1.0}, "tokens": 9, "finish_reason": HOSTILE}
    line = {
        "step": 1,
        "problem": {"prompt": [{"role": HOSTILE, "content": HOSTILE}], "answer": HOSTILE},
        "completions": [completion, completion | {"reward": 0.0}],
        "unscored": [{"text": HOSTILE, "fault": HOSTILE}],
    }
    report_runs.write_rollouts(run, iter([line]))
    run.events.write_text(f"2026-11-21T10:00:00+0000 step 3 {HOSTILE[:-8]}\n")
    rewrite(run, *((index, {"reward_parts": {HOSTILE: index}, HOSTILE: index}) for index in range(5)))
    page = written(run.path, out=tmp_path / "page.html")
    assert len(page.all("script")) == 1
    shown = r"<script>alert(1)</script></div>{{ 7 * 7 }}\x00\x1b[31m\u202etxt.exe\u2066 \ud800 مرحبا"
    assert page.text.count(shown) >= 8
    assert "<b>run" in page.text
    assert "<i>env" in page.text
    assert not {character for character in page.text if ord(character) < 32} - {"\n", "\t"}


def test_incomplete_runs_are_shown_with_what_is_missing(tmp_path: Path) -> None:
    begun = report_runs.make(tmp_path / "begun", num_steps=1, planned=50)  # this process uses the directory
    assert f"process {os.getpid()} is at step 1 of 50" in written(begun.path, out=tmp_path / "page.html").text
    run = RunDirectory(shutil.copytree(begun.path, tmp_path / "run"))  # no process uses the directory
    run.evaluations.unlink()
    run.lost_metrics.write_text(run.metrics.read_text())
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "rewa')
    page = written(run.path, out=tmp_path / "page.html")
    for expected in (
        "unfinished", "step 1 of 50", "metrics.jsonl: skipped 1 incomplete or damaged lines",
        "The run has no completions (rollouts.jsonl)", "1 steps were lost and repeated",
    ):  # fmt: skip
        assert expected in page.text
    longer = report_runs.make(tmp_path / "longer", num_steps=6)  # the run's summary is of step 6
    with longer.metrics.open("a") as file:
        file.write(longer.metrics.read_text().splitlines()[-1].replace('"step": 6', '"step": 7') + "\n")
    shutil.copytree(longer.path, tmp_path / "copy")
    assert "stopped after step 7 of 6" in written(tmp_path / "copy", out=tmp_path / "page.html").text


def test_incomplete_steps_of_an_older_version_are_drawn(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=12)
    absent = ("entropy", "reward_parts", "unscored", "completion_tokens_mean")
    lines = [report_runs.older(report_runs.metrics(step, 12), *absent) for step in range(1, 13)]
    run.metrics.write_text("\n".join(lines) + "\n")
    run.config.write_text('{"model_name": "m", "a_choice_of_old": 3}')
    page = written(run.path, out=tmp_path / "page.html")
    assert not {"Entropy, nats", "Parts of the reward", "Completion length, tokens"} & set(page.charts)
    assert {"Gradient norm", "Time of a step, s"} <= set(page.charts)
    assert "This version of Bridge does not know it." in page.text


@pytest.mark.parametrize("missing", ["config", "server_config", "summary", "evaluations", "events"])
def test_every_optional_file_may_be_missing_or_broken(missing: str, tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    path: Path = getattr(run, missing)
    for broken in (b"\xff\x00 no json {", b"[" * 100_000, b'{"derived": null, "reward_before": NaN}\n\n'):
        path.write_bytes(broken)
        written(run.path, out=tmp_path / "page.html")
    path.unlink()
    written(run.path, out=tmp_path / "page.html")


def test_missing_values_are_gaps_and_never_dips(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=8)
    odd: tuple[dict[str, Any], ...] = (
        {"entropy": None}, {"entropy": math.nan}, {"reward_parts": {}}, {"reward_parts": None},
        {"logprob_diff_histogram": [None] * 8, "logprob_diff_mean": None},
        {"grad_norm": 10**400, "lag_shares": [10**400] * 8},  # too large for a float
    )  # fmt: skip
    rewrite(run, *enumerate(odd))
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 10**400}) + "\n")
    assert [
        step for step, value in enumerate(curve(run.path, "Entropy, nats", "smoothed"), 1) if math.isnan(value)
    ] == [1, 2]
    parts = curve(run.path, "Parts of the reward", "correct")
    assert [step for step, value in enumerate(parts, 1) if math.isnan(value)] == [3, 4]
    assert math.isnan(curve(run.path, "|Δ log-probability|, nats", "each step")[4])
    assert [math.isnan(value) for value in curve(run.path, "Gradient norm", "each step")[4:7]] == [False, True, False]
    plot = drawing("Tokens by mismatch, %", run.path).plot
    assert plot is not None
    sources = [source for source in plot.references() if isinstance(source, ColumnDataSource) and "step" in source.data]
    assert [list(source.data["step"]) for source in sources] == [[1, 2, 3, 4, 6, 7, 8]]
    run.evaluations.write_text('{"step": 0, "reward_mean": 1' + "0" * 400 + '}\n{"step": 3}\n')
    run.summary.write_text(json.dumps({"steps": 8, "reward_before": 10**400, "weight_bytes": 10**400}))
    page = written(run.path, out=tmp_path / "page.html")
    assert "NaN" not in page.text
    assert "skipped 1 incomplete" in page.text


def test_page_shows_a_single_step_or_thousands(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "short", num_steps=1)
    run.evaluations.unlink()
    page = written(run.path, out=tmp_path / "page.html")
    assert page.charts == ["Mean reward"]
    assert "The same in every step" in page.text
    run = report_runs.make(tmp_path / "long", num_steps=1500)
    rewrite(run, (1234, {"grad_norm": 55.5}))
    written(run.path, out=tmp_path / "page.html")
    values = curve(run.path, "Gradient norm", "each step")
    assert (len(values), values[1234]) == (1500, 55.5)
    assert (tmp_path / "page.html").stat().st_size < 2_500_000


def test_run_throughput_is_total_tokens_over_total_time(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=3)
    rewrite(run, *((index, {"tokens_generated": 100, "rollout_s": seconds}) for index, seconds in enumerate((8, 1, 1))))
    assert figures(record.read(run.path))["tokens_per_s"][1] == pytest.approx(30.0)


def test_several_runs_share_their_charts_and_tables(tmp_path: Path) -> None:
    one = report_runs.make(tmp_path / "one", num_steps=30)
    other = report_runs.make(tmp_path / "other", num_steps=20, planned=30, seed=1, lr=1e-6, loss="grpo")
    report_runs.write_rollouts(one, report_runs.groups(30))
    rewrite(one, *((index, {"my_ratio": index}) for index in range(30)))
    page = written(one.path, one.path, other.path, out=tmp_path / "page.html")  # a run given twice counts once
    for expected in ("2 runs side by side", "--lr 2e-06 1e-06", "--loss dapo grpo", "one, held out"):
        assert expected in page.words
    assert "--run-dir /" not in page.words.partition("Mean reward")[0]
    assert {
        "Mean reward", "Parts of the reward: correct", "Parts of the reward: format", "Completion length, tokens",
        "|Δ log-probability|, nats", "|Δ log-probability|, max, nats", "Tokens with a large mismatch, %",
        "Time of a step, s", "Fence, ms", "my_ratio",
    } <= set(page.charts)  # fmt: skip
    assert names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names([Path("/a/x/run")]) == ["run"]


def test_page_goes_into_the_run_or_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(report_runs.make(tmp_path / name, num_steps=1).path) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a report may be overwritten
        assert main.answer(["report", runs[0]]) == 0
        assert capsys.readouterr().out == f"{runs[0]}/report.html\n"
    assert main.answer(["report", *runs]) == 0
    assert capsys.readouterr().out == "report.html\n"


def unreadable(path: Path) -> None:
    run = report_runs.make(path, num_steps=1)
    run.metrics.unlink()
    run.metrics.symlink_to("/proc/self/mem")  # whose first page is unreadable


@pytest.mark.parametrize(("make", "message"), [
    (lambda path: None, "is not a directory"),
    (lambda path: path.mkdir(), "is not a run directory"),
    (lambda path: path.write_text("a file"), "is not a directory"),
    (lambda path: (path.mkdir(), (path / "metrics.jsonl").write_text('{"step": 1, "rew')), "has no complete step"),
    (lambda path: report_runs.make(path / "inside", num_steps=1), "is not a run directory, but contains some"),
    (unreadable, "cannot read"),
])  # fmt: skip
def test_anything_but_a_run_is_refused_in_one_line(
    make: Callable[[Path], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a given"
    make(path)
    assert main.answer(["report", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert message in shown.err.splitlines()[0]
    if "contains some" in message:
        hint = shown.err.splitlines()[-1].removeprefix("hint: ")
        assert shlex.split(hint) == ["bridge", "report", str(path / "inside")]


def test_other_files_are_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    precious = tmp_path / "page.html"
    precious.write_text("<html>mine, made by bridge report</html>")
    assert main.answer(["report", str(run.path), "--out", str(precious)]) == 2
    assert "exists and is not a report" in capsys.readouterr().err
    assert precious.read_text() == "<html>mine, made by bridge report</html>"
    assert main.answer(["report", str(run.path), "--out", str(tmp_path)]) == 2
    assert main.answer(["report", *(str(tmp_path / str(number)) for number in range(9))]) == 2
    assert "9 runs do not fit on one page" in capsys.readouterr().err


def test_help_and_report_load_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "jinja2", "bokeh", "numpy")
    code = (
        "import sys; from bridge_cli.main import answer; answer(['report', '--help']); answer(['--help']);"
        f"sys.stderr.write(' '.join(name for name in {heavy!r} if name in sys.modules))"
    )
    done = run_python(code)
    assert done.stderr == ""
    assert "--out" in done.stdout
    assert "report.html in the run" in " ".join(done.stdout.split())
    assert "…" not in done.stdout
    given = ["report", str(report_runs.make(tmp_path / "run", num_steps=1).path)]
    code = f"import sys; from bridge_cli.main import answer; answer({given!r}); sys.exit('torch' in sys.modules)"
    assert run_python(code).returncode == 0


def test_every_metric_of_a_step_is_recorded_and_charted_once() -> None:
    names = [metric.name for section in SECTIONS.values() for metric in section]
    assert len(names) == len(set(names))
    assert {*report_runs.metrics(1, 9)} - {*names} == {
        "step",
        "weight_version",
        "fence_prepare_s",
        "objective",
        "rollouts",
        "device",
        "train_flops",
        "peak_flops",
    }
    totals = [metric.derive for metric in METRICS.values() if isinstance(metric.derive, Total)]
    assert [name for derived in totals for name in derived.names if name not in METRICS] == []
    assert StepMetrics(json.loads(json_lines.line(report_runs.metrics(1, 9)))).fence_s < 0.03


def test_process_using_a_run_directory_is_found(tmp_path: Path) -> None:
    folder_claim.make(tmp_path / "run", what="run directory", flag="--run-dir")
    assert folder_claim.holder((tmp_path / "run").stat().st_ino) == str(os.getpid())


# Completions over time


def read(path: Path, *groups: dict[str, Any], notes: list[str] | None = None, **choices: int) -> record.Samples:
    path.write_text("".join(json.dumps(group_) + "\n" for group_ in groups))
    return record.samples(path, [] if notes is None else notes, **choices)


def group(step: int, prompt: str, *rewards: float, text: str = "so", **changed: Any) -> dict[str, Any]:
    completions = [{"text": f"{text} {reward}", "reward": reward} for reward in rewards]
    line = {"step": step, "problem": {"prompt": prompt, "answer": "1"}, "completions": completions, "unscored": []}
    return line | changed


def test_report_shows_recurring_problems_or_spread_steps(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    lines = [group(step, f"problem {step % 2}", 0.0, 0.5, 1.0) for step in range(1, 21)]
    page = read(path, *lines, group(20, "once", 0.0))
    assert [series["problem"]["prompt"] for series in page.series] == ["problem 1", "problem 0"]
    assert [step["number"] for step in page.series[0]["steps"]] == list(range(1, 20, 2))
    page = read(path, *(group(step, f"{step}-{number}", 0.0, 1.0) for step in range(1, 101) for number in range(2)))
    (series,) = page.series
    numbers = [step["number"] for step in series["steps"]]
    assert (numbers[0], numbers[-1], len(numbers)) == (1, 100, record.NUM_STEPS)
    assert not series["problem"]
    assert series["steps"][0]["rewards"] == [0.0, 0.0, 1.0, 1.0]
    assert (page.num_groups, page.num_steps) == (200, 100)
    lost = [group(step, f"a{step}", 0.0, text="lost") for step in range(1, 6)]
    kept = [group(step, f"b{step}", 1.0, text="kept") for step in range(3, 8)]  # the run resumed
    (series,) = read(path, *lost, *kept).series
    assert [step["completions"][0]["text"] for step in series["steps"]] == ["lost 0.0"] * 2 + ["kept 1.0"] * 5
    assert record.samples(tmp_path / "none.jsonl", []) == record.Samples()


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        (group(1, "p", 0.5, -1.0, 2.0, 0.1, 0.7), {"best": 2.0, "median": 0.5, "worst": -1.0}),
        (group(1, "p", 1.0, 1.0, 1.0), {"all rewards equal": 1.0}),
        (group(1, "p", unscored=[{"text": "x", "fault": "ZeroDivisionError"}]), {"unscored": None}),
    ],
)
def test_best_median_and_worst_completions_are_shown(
    line: dict[str, Any], labels: dict[str, float | None], tmp_path: Path
) -> None:
    (series,) = read(tmp_path / "r.jsonl", line).series
    assert {one["label"]: one.get("reward") for one in series["steps"][0]["completions"]} == labels


def test_long_texts_are_truncated_in_the_middle(tmp_path: Path) -> None:
    line = group(1, "begin" + "p" * 90_000 + "end", 0.0, text="begin" + "x" * 90_000)
    (series,) = read(tmp_path / "r.jsonl", line, longest=3_000).series
    (shown,) = series["steps"][0]["completions"]
    for text, start, end in ((shown["text"], "beginx", " 0.0"), (shown["problem"]["prompt"], "beginp", "pend")):
        assert len(text) < 3_100
        assert text.startswith(start)
        assert text.endswith(end)
    line["completions"][0]["turns"] = [{"role": "assistant", "text": "x" * 90_000}] * 100  # the limit of one text
    (series,) = read(tmp_path / "r.jsonl", line).series
    (shown,) = series["steps"][0]["completions"]
    mark = "\n[… 89,700 characters left out …]\n"
    assert {len(turn["text"]) for turn in shown["turns"]} == {record.SHORTEST_TURN + len(mark)}


TURNS = [
    {"role": "assistant", "text": "I look it up.", "tool_calls": [{"name": "look_up"}], "reward": 0.25},
    {"role": "tool", "name": "look_up", "text": "nothing there", "is_error": True},
    {"sequence": 2, "role": "repeated", "text": "", "messages": 3},
    {"role": "assistant", "text": "half \ud83d a pair"},
]
ODD: dict[str, Any] = {"text": None, "reward": None, "parts": None, "tokens": 10**400, "weight_version": {}}
SOME: dict[str, Any] = {"text": 5, "reward": 1, "parts": {"a": 10**30, "b": None, "c": "well"}, "tokens": None}
BROKEN: tuple[dict[str, Any], ...] = (
    {"step": 10**400}, {"problem": None}, {"completions": None}, {"completions": [7]},
    {"completions": [{"text": "x", "reward": 10**400}]}, {"unscored": "none"},
)  # fmt: skip
ODD_TURNS: list[Any] = [7, "turns", [], [7, "x", None], [{}], [{"text": 7, "tool_calls": [7]}], {"a": 1}]
SHOWN: list[tuple[list[dict[str, Any]], list[str]]] = [
    *(
        ([group(1, "", 1.0, problem={"prompt": prompt, "answer": 317})], [shown, "answer 317"])
        for prompt, shown in (
            ("plain text", "plain text"), ([{"role": "user", "content": "hello"}], "userhello"),
            ([{"role": "user", "content": [{"type": "image"}]}], '[{"type": "image"}]'),
            ([None, 7, "text", {"content": None}], "null7textnull"), (None, "null"), (10**400, str(10**400)),
            ({"a": 1}, '{"a": 1}'),
        )
    ),
    *(
        ([group(1, "the problem", completions=[{"text": "x", "reward": 1.0, "turns": turns}])], ["the problem"])
        for turns in ODD_TURNS
    ),
    ([group(1, "p", 0.0) | broken for broken in BROKEN] + [group(1, "the good one", 0.0)],
     [f"rollouts.jsonl: skipped {len(BROKEN)} incomplete or damaged lines", "the good one", "1 groups from 1 steps"]),
    ([group(1, "p", completions=[ODD, SOME], unscored=[ODD])],
     [f"a {10**30}", "b –", "c well", "(an empty completion)", f"{10**400} tokens"]),
    ([group(1, "p", problem={"prompt": "p", "hidden": 42}, completions=[
        {"text": "no", "reward": 1.0, "turns": TURNS, "staleness": 3, "weight_version": 7}])],
     ["hidden 42", "assistant reward 0.25 calls look_up", "I look it up.", "look_up error nothing there",
      "sequence 3 its first 3 messages", "weights v7, staleness 3", r"half \ud83d a pair"]),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), SHOWN)
def test_completions_in_any_format_are_shown(lines: list[dict[str, Any]], expected: list[str], tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=1)
    report_runs.write_rollouts(run, iter(lines))
    page = written(run.path, out=run.report)
    for text in expected:
        assert text in page.words, text


def test_damaged_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path, notes = tmp_path / "r.jsonl", list[str]()
    good = "".join(json.dumps(group(step, f"{step}", 1.0)) + "\n" for step in (1, 2)).encode()
    path.write_bytes(b"\n".join([b"{", b"[1]", b'"x"', b"\xff\xfe"]) + b"\n" + good + b'{"step": 5, "comp')
    (series,) = record.samples(path, notes).series
    assert notes == ["r.jsonl: skipped 5 incomplete or damaged lines"]
    assert [step["number"] for step in series["steps"]] == [1, 2]


def test_losses_of_a_warm_up_are_named_with_their_steps(tmp_path: Path) -> None:
    run = report_runs.make(tmp_path / "run", num_steps=6)
    assert record.read(run.path).about["loss"] == "dapo"
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    warm = [{**row, "objective": "sft" if row["step"] <= 2 else "grpo", "reward_mean": None} for row in rows]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in warm))
    assert record.read(run.path).about["loss"] == "sft in steps 1 to 2, grpo in steps 3 to 6"
    page = written(run.path, out=tmp_path / "report.html")
    assert "sft in steps 1 to 2, grpo in steps 3 to 6" in page.words
    older = [{name: value for name, value in row.items() if name != "objective"} for row in rows]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in older))
    assert record.read(run.path).about["loss"] == ""
