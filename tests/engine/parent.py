"""Runs one scenario of the engine tests in a child process and returns its answer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engine.child import ANSWER
from tests.servers import kvkeep_env

ROOT = Path(__file__).resolve().parents[2]


def start(name: str, socket: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Begin a scenario; `answer` waits for it."""
    command = [sys.executable, "-m", "tests.engine.child", name, str(socket), json.dumps(options)]
    env = kvkeep_env(PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def answer(child: subprocess.Popen[str]) -> Any:
    """Its answer; fails with its output when there is none."""
    try:
        out, err = child.communicate(timeout=580)
    except subprocess.TimeoutExpired:
        child.kill()
        raise
    lines = [line for line in out.splitlines() if line.startswith(ANSWER)]
    assert lines, f"exit {child.returncode}\n{out[-3000:]}\n{err[-6000:]}"
    return json.loads(lines[-1].removeprefix(ANSWER))


def scenario(name: str, socket: str | Path, **options: Any) -> Any:
    """Run one scenario to its end."""
    return answer(start(name, socket, **options))
