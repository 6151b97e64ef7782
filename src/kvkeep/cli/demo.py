"""`kvkeep demo`: the main job, shown with a real vLLM, a real model and a real document.

KV outlives the engine that computed it and, on disk, the server too; a dead server or a corrupted
file costs a miss and nothing else, and caching resumes by itself. In fp32, so that an answer from
cached KV must equal the computed one token by token. Every process started here has ended when
`run_demo` returns or raises.
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from kvkeep.backends.base import HEADER_BYTES
from kvkeep.backends.header import Header, decode
from kvkeep.bench.engine_messages import Start
from kvkeep.bench.engine_process import EngineProcess, ServerProcess, require_engine
from kvkeep.bench.engine_scratch import ended_by_signals, scratch
from kvkeep.cli.demo_prompts import (
    QUESTIONS,
    Prompts,
    build_prompts,
    read_document,
    whole_chunk_tokens,
)
from kvkeep.cli.demo_report import (
    DEVICE,
    L1,
    L2,
    MIN_SPEEDUP,
    MIN_SPEEDUP_L2,
    NONE,
    Report,
    Run,
)
from kvkeep.cli.operator import ask
from kvkeep.connectors.vllm.settings import DEFAULT_CHUNK_TOKENS
from kvkeep.errors import ConfigError, KVKeepError
from kvkeep.limits import parse_amount

ANSWER_TOKENS = 32
MAX_MODEL_LEN = 8_192
DTYPE = "float32"
CORRUPTED = 7  # the chunk whose file is corrupted; those before it are still good
L2_CAPACITY = "4GiB"
L2_WAIT_S = 20
PERSIST_S = 120


class CannotWrite(KVKeepError):
    """The result file cannot be written; said before anything is started."""


class DemoFailed(KVKeepError):
    """Something was not as it must be."""


def run_demo(
    json_path: Path,
    *,
    l1_size: str = "2GiB",
    document: Path | None = None,
    model: Path | None = None,
) -> int:
    """Run it, print the table, write `json_path`; 0 when everything was as it must be."""
    if not json_path.absolute().parent.is_dir():
        raise CannotWrite(f"{json_path.absolute().parent} is no folder: --json FILE needs one")
    try:
        parse_amount(l1_size)
    except ValueError as error:
        raise ConfigError(f"--l1-size {l1_size!r} is refused: {error}") from None
    source, text = read_document(document)
    say = _Say()
    say("looking for vLLM and the demo model (made once, about a minute)")
    found = require_engine(model)
    report = Report(l1_size=l1_size)
    with ended_by_signals(), scratch("kvkeep-demo-") as folder, ExitStack() as children:
        demo = _Demo(folder, str(found), report, children, say)
        demo.run(source, text)
        report.show()
        report.write(json_path)
        problems = report.problems()
        for problem in problems:
            print(f"kvkeep: {problem}", file=sys.stderr)
        if problems:
            raise DemoFailed(f"the demo did not show what it must; see {json_path}")
    _conclude(report, json_path)
    return 0


class _Demo:
    """The steps in order; what they start is closed by `children`, last first."""

    def __init__(
        self, folder: Path, model: str, report: Report, children: ExitStack, say: "_Say"
    ) -> None:
        self._folder, self._model, self._report = folder, model, report
        self._children, self._say = children, say
        self._socket = folder / "kvkeep.sock"
        self._storage = folder / "l2"

    def run(self, source: str, text: str) -> None:
        """Everything, from the first server to the last answer."""
        server = self._start_server()
        engine = self._start_engine("engine-1")
        prompts = build_prompts(engine.pieces(text, QUESTIONS), source)
        self._report.document = {
            "source": source,
            "tokens": prompts.document_tokens,
            "used_tokens": prompts.used_tokens,
        }
        self._ask(engine, prompts, 1, "cold", NONE)
        self._say("engine-1 ends")
        engine.leave()

        engine = self._start_engine("engine-2")
        self._ask(engine, prompts, 1, "new engine", L1)
        self._ask(engine, prompts, 1, "again (vLLM's own cache)", DEVICE)
        self._empty(engine)
        self._ask(engine, prompts, 2, "second question", L1)

        self._wait_persisted()
        epoch = engine.settle()
        self._say("the server is killed (SIGKILL)")
        server.kill()
        for question in (1, 2):
            self._empty(engine)
            self._ask(engine, prompts, question, f"server killed, question {question}", NONE)

        server = self._start_server()
        self._say("waiting for the engine to find the server by itself")
        engine.settle(not_epoch=epoch)
        self._empty(engine)
        self._ask(engine, prompts, 2, "server back, L1 is empty", L2)
        self._empty(engine)
        self._ask(engine, prompts, 2, "once more", L1)
        self._say(f"{engine.name} ends, the server is killed once more")
        engine.leave()
        server.kill()

        self._start_server()
        engine = self._start_engine("engine-3")
        self._ask(engine, prompts, 1, "new server, new engine", L2)
        self._corrupt()
        self._empty_all(engine)
        self._ask(engine, prompts, 1, "a file is corrupted", L2, whole_chunks=CORRUPTED)
        self._wait_persisted()
        self._empty_all(engine)
        self._ask(engine, prompts, 1, "and written anew", L2)
        self._say("done; ending the engine and the server")

    def _wait_persisted(self) -> None:
        self._say("waiting until L2 has what was stored")
        answer = ask(str(self._socket), "wait_persisted", str(PERSIST_S), timeout_s=PERSIST_S + 5)
        if not answer["done"]:
            raise DemoFailed(f"L2 does not have everything after {PERSIST_S} s: is the disk slow?")

    def _corrupt(self) -> None:
        """Flip one bit in the file of one chunk of the document."""
        for path in sorted(self._storage.glob("*/*/*.kv")):
            with path.open("r+b") as file:
                found = decode(memoryview(file.read(HEADER_BYTES)))
                if isinstance(found, Header) and found.depth == CORRUPTED:
                    self._say(f"flipping one bit in the file of chunk {CORRUPTED}")
                    file.seek(HEADER_BYTES + found.length // 2)
                    byte = file.read(1)[0]
                    file.seek(-1, 1)
                    file.write(bytes([byte ^ 1]))
                    return
        raise DemoFailed(f"L2 has no file of chunk {CORRUPTED} of the document")

    def _start_server(self) -> ServerProcess:
        self._say(f"starting kvkeep serve with {self._report.l1_size} of L1")
        # On a slow disk a hit is still worth waiting for: computing takes this CPU much longer.
        settings = {
            "l1.size": self._report.l1_size,
            "l2.backends": f"fs://{quote(str(self._storage))}?capacity={L2_CAPACITY}",
            "l2.lookup_wait_s": L2_WAIT_S,
            "l2.get_timeout_s": L2_WAIT_S,
        }
        server = ServerProcess(self._socket, self._folder / "server.log", settings)
        return self._children.enter_context(server)

    def _start_engine(self, name: str) -> EngineProcess:
        self._say(f"starting {name}: vLLM, {DTYPE} (10 to 40 s)")
        start = Start(
            model=self._model,
            socket=str(self._socket),
            dtype=DTYPE,
            max_model_len=MAX_MODEL_LEN,
        )
        log = self._folder / f"{name}.log"
        engine = self._children.enter_context(EngineProcess(name, start, log))
        self._report.versions = {**engine.started().versions, "model": Path(self._model).name}
        engine.settle()
        return engine

    def _empty(self, engine: EngineProcess) -> None:
        """Else the engine would find the document in its own prefix cache."""
        self._say(f"emptying {engine.name}'s own prefix cache")
        engine.reset()

    def _empty_all(self, engine: EngineProcess) -> None:
        """Else L1 would have the document, and L2 would not be asked."""
        self._empty(engine)
        self._say("emptying L1 (kvkeep clear)")
        ask(str(self._socket), "clear")

    def _ask(
        self,
        engine: EngineProcess,
        prompts: Prompts,
        question: int,
        name: str,
        expected: str,
        *,
        whole_chunks: int | None = None,
    ) -> None:
        """`whole_chunks`: how many of them can come from kvkeep, where not all can."""
        self._say(f"{engine.name} answers question {question}: {name}")
        answer = engine.ask(prompts.ids[question - 1], ANSWER_TOKENS)
        l1_tokens = l2_tokens = 0
        if answer.cached_tokens and expected != NONE:  # then a server is there to be asked
            told = ask(str(self._socket), "explain", answer.request)
            l1_tokens = int(told["hit_tokens"]["l1"])
            l2_tokens = sum(told["hit_tokens"]["l2"].values())
        # A chunk is reused when all of it is shared: by both prompts, or by one asked again.
        reusable = prompts.shared_tokens if question > 1 else answer.prompt_tokens - 1
        whole = whole_chunk_tokens(min(reusable, answer.prompt_tokens - 1))
        if whole_chunks is not None:
            whole = whole_chunks * DEFAULT_CHUNK_TOKENS
        run = Run(
            name,
            question,
            expected,
            answer,
            l1_tokens,
            l2_tokens,
            whole,
            partial=whole_chunks is not None,
        )
        self._report.runs.append(run)
        self._say(
            f"  first token after {answer.ttft_s:.2f} s, {answer.cached_tokens} tokens cached"
        )


def _conclude(report: Report, json_path: Path) -> None:
    l1, l2 = report.cold_over(L1) or 0.0, report.cold_over(L2) or 0.0
    print(
        f"Every answer equals the computed one. First token in a new engine: {l1:.0f} times sooner "
        f"from L1, {l2:.0f} times sooner from L2 after the server's death. Written: {json_path}"
    )
    for tier, ratio, least in ((L1, l1, MIN_SPEEDUP), (L2, l2, MIN_SPEEDUP_L2)):
        if ratio < least:
            print(f"kvkeep: expected {least:.0f} times or more from {tier}: is the machine busy?")


class _Say:
    """Progress on stderr, with the time since the start."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, text: str) -> None:
        now_s = time.monotonic() - self._started_s
        print(f"[{now_s:4.0f} s] {text}", file=sys.stderr, flush=True)
