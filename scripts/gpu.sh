#!/usr/bin/env bash
# The checks and measurements that need a GPU, run from the working tree; nothing is installed.
#
#     scripts/gpu.sh tests|attention|shared|encoded|decode|retention|retention-encoded|offload|offload-planned
#                    [ARGUMENT...]
#
# tests      the kernels and decode graphs against the reference, and the kernels compiled for sm_90     about 4 minutes
# attention  benchmarks/gpu_attention.py: attention on pages against torch's (--sweep tries launches)    about 2 minutes
# shared     the same script, only its table of decode steps that share a prefix                        about 1 minute
# encoded    benchmarks/gpu_encoded.py: the same on pages of every codec, and what encoding them costs  about 5 minutes
# decode     benchmarks/gpu_decode.py: the Llama-3-8B shape against copy speed and transformers          about 4 minutes
# retention  masks, sums and recovery against the reference, then benchmarks/gpu_retention.py           about 4 minutes
# retention-encoded  the same comparisons where sealed chunks are encoded                               about 5 minutes
# offload    tokens beside a GPU's memory, then benchmarks/gpu_offload.py: the OPT-30B shape in 16 GiB  about 8 minutes
# offload-planned  the same script, only a shape of 2.8 GB in 1.5 GiB: its throughput as planned        about 5 minutes
#
# Needs torch with CUDA, triton, numpy, pytest; `decode` also transformers. Says so and succeeds where there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PYTHON="${PYTHON:-python3}"

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: skipped, torch sees no CUDA device on this machine"
    exit 0
fi

# The settings of pyproject.toml name plugins that need not be there. Compiling takes most of the time, so processes
# share it where pytest-xdist is installed.
pytest=("$PYTHON" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --tb=short --durations=10 -o timeout=120
        -o "markers=gpu: needs a CUDA device")
if "$PYTHON" -c 'import xdist' 2>/dev/null; then
    pytest+=(-n "$(($(nproc) < 14 ? $(nproc) : 14))")
fi

stage="${1:-}"
[ $# -eq 0 ] || shift
case "$stage" in
    tests)
        exec timeout 540 "${pytest[@]}" --ignore tests/gpu/test_retention.py \
            tests/gpu tests/kernels/test_triton_compile.py "$@"
        ;;
    attention) exec timeout 540 "$PYTHON" benchmarks/gpu_attention.py "$@" ;;
    shared) exec timeout 540 "$PYTHON" benchmarks/gpu_attention.py --tables shared "$@" ;;
    encoded) exec timeout 540 "$PYTHON" benchmarks/gpu_encoded.py "$@" ;;
    decode) exec timeout 540 "$PYTHON" benchmarks/gpu_decode.py "$@" ;;
    retention)
        timeout 330 "${pytest[@]}" -k "not encoded" tests/gpu/test_retention.py
        exec timeout 200 "$PYTHON" benchmarks/gpu_retention.py "$@"
        ;;
    retention-encoded)
        exec timeout 540 "${pytest[@]}" -k encoded tests/gpu/test_retention.py "$@"
        ;;
    offload)
        timeout 200 "${pytest[@]}" tests/gpu/test_offload.py
        exec timeout 390 "$PYTHON" benchmarks/gpu_offload.py "$@"
        ;;
    offload-planned)
        exec timeout 590 "$PYTHON" benchmarks/gpu_offload.py --sides planned "$@"
        ;;
    *) sed -n '2,18s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
