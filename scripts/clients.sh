#!/usr/bin/env bash
# Run real clients, unmodified, against `quire serve` on this machine: openai, litellm, pydantic-ai, instructor,
# LangChain, LlamaIndex, the Vercel AI SDK, lm-eval, guidellm and, where scripts/peers.sh has installed vLLM, `vllm bench
# serve`. Prints a table; the exit status is 1 when anything failed.
#
#     scripts/clients.sh [--model NAME|FILE]... [--only openai,instructor,...] [--logs DIR]
#
# --model is what `quire serve` takes (default: smollm2), --only names the clients; see benchmarks/clients/run.py.
#
# Each client is installed once into .peers, where --only names it or is not given: lm-eval and guidellm into clients
# (about 2 GB), openai, litellm and pydantic-ai into agents, the frameworks, which need an older openai, into frameworks
# (about 300 MB each), and the AI SDK into ai-sdk, with npm (30 MB). A changed version below is installed anew. The server
# runs with .venv's Python, or with PYTHON. After the installation nothing is fetched. On Linux pip may choose PyTorch's
# multi-gigabyte CUDA build: to avoid that, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds first.
set -euo pipefail

# torch comes with lm-eval and guidellm: without a version beside them pip would take the newest.
CLIENTS=(torch==2.13.0 "lm-eval[api]==0.4.13" guidellm==0.8.1 transformers==5.23.0 datasets==5.2.0 tokenizers==0.23.3
         numpy==2.4.6)
AGENTS=(openai==3.51.0 litellm==1.110.2 "pydantic-ai-slim[openai]==2.68.0")
FRAMEWORKS=(instructor==1.17.0 langchain-openai==1.7.4 llama-index-llms-openai-like==0.8.1 openai==2.54.0)
# The newest that runs with Node.js 18 and 20: ai 7 needs 22.
AI_SDK=(ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7)

die() { echo "clients.sh: $*" >&2; exit 1; }

root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" > /dev/null || die "no $python: make install, or set PYTHON"
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m quire pull smollm2 > /dev/null

only=""
for ((i = 1; i <= $#; i++)); do
    case "${!i}" in
        --only) next=$((i + 1)); only="${!next-}" ;;
        --only=*) only="${!i#--only=}" ;;
    esac
done

wants() {  # clients: whether one of them is to run
    local name
    [ -n "$only" ] || return 0
    for name; do
        case ",$only," in *",$name,"*) return 0 ;; esac
    done
    return 1
}

mkdir -p "$root/.peers/stamps"
echo '*' > "$root/.peers/.gitignore"

install() {  # folder, function that installs into it, packages
    local name="$1" into="$2" stamp="$root/.peers/stamps/$1"
    shift 2
    [ "$(cat "$stamp" 2> /dev/null)" != "$*" ] || return 0
    echo "Installing into .peers/$name" >&2
    rm -rf "$stamp" "$root/.peers/$name"
    "$into" "$root/.peers/$name" "$@"
    echo "$*" > "$stamp"
}

with_pip() {  # folder, packages
    local folder="$1"
    shift
    "$python" -m venv "$folder"
    "$folder/bin/pip" install --quiet "$@"
}

with_npm() {  # folder, packages
    local folder="$1"
    shift
    mkdir -p "$folder"
    echo '{"private": true}' > "$folder/package.json"
    npm install --prefix "$folder" --silent --no-audit --no-fund --save-exact "$@"
}

! wants lm-eval guidellm || install clients with_pip "${CLIENTS[@]}"
! wants openai litellm pydantic-ai || install agents with_pip "${AGENTS[@]}"
! wants instructor langchain llamaindex || install frameworks with_pip "${FRAMEWORKS[@]}"
if ! wants ai-sdk; then
    :
elif command -v node > /dev/null && command -v npm > /dev/null; then
    install ai-sdk with_npm "${AI_SDK[@]}"
else
    echo "clients.sh: the AI SDK is left out: node or npm is missing" >&2
fi
exec "$python" "$root/benchmarks/clients/run.py" "$@"
