#!/usr/bin/env bash
# Run real clients, unmodified, against `quire serve smollm2` on this machine: openai, instructor, LangChain,
# LlamaIndex, lm-eval, guidellm and, where scripts/peers.sh has installed vLLM, `vllm bench serve`. Prints a table; the
# exit status is 1 when anything failed.
#
#     scripts/clients.sh [--only openai,instructor,...] [--logs DIR]        see benchmarks/clients/run.py
#
# The clients are installed once into .peers/clients (about 2 GB), and the frameworks, which need an older openai, into
# .peers/frameworks (about 300 MB); a changed version below is installed anew. The
# server runs with .venv's Python, or with PYTHON. After the installation nothing is fetched. On Linux pip may choose
# PyTorch's multi-gigabyte CUDA build: to avoid that, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds first.
set -euo pipefail

# torch comes with lm-eval and guidellm: without a version beside them pip would take the newest.
PACKAGES=(torch==2.13.0 openai==3.51.0 "lm-eval[api]==0.4.13" guidellm==0.8.1 transformers==5.23.0 datasets==5.2.0
          tokenizers==0.23.3 numpy==2.4.6)
FRAMEWORKS=(instructor==1.17.0 langchain-openai==1.7.4 llama-index-llms-openai-like==0.8.1 openai==2.54.0)

die() { echo "clients.sh: $*" >&2; exit 1; }

root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" > /dev/null || die "no $python: make install, or set PYTHON"
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m quire pull smollm2 > /dev/null

mkdir -p "$root/.peers/stamps"
echo '*' > "$root/.peers/.gitignore"

install() {  # folder, packages
    local name="$1" stamp="$root/.peers/stamps/$1"
    shift
    [ "$(cat "$stamp" 2> /dev/null)" != "$*" ] || return 0
    echo "Installing into .peers/$name" >&2
    rm -rf "$stamp" "$root/.peers/$name"
    "$python" -m venv "$root/.peers/$name"
    "$root/.peers/$name/bin/pip" install --quiet "$@"
    echo "$*" > "$stamp"
}

install clients "${PACKAGES[@]}"
install frameworks "${FRAMEWORKS[@]}"
exec "$python" "$root/benchmarks/clients/run.py" "$@"
