#!/usr/bin/env bash
# Everything that only a GPU can show, from the root of the repository or anywhere, in calls of at most ten minutes:
#
#     benchmarks/gpu_first_run.sh CALL [OUT]
#
# What is worth most comes first, and the last call measures what the second has tuned. CALL is one of
#   first   the kernel library, built for this GPU, and its trial; its tests, a process for each file; products at 4 bits in float16 on
#           two shapes, every one checked; counters of three gemm kernels, where ncu is there
#   second  this GPU's constants, written to kernels/devices (bring that file along to the next call); with them, the
#           table of all products; the host's cost of a call
#   third   quantizing blocks of 8B shapes; speed of a model of 8B shapes; tests of whole models; the solver's times;
#           compute-sanitizer's memcheck and racecheck on our kernels
# Nothing needs to be installed but torch, numpy, regex and pytest; tests and quantizing of the third call need
# transformers as in pyproject.toml and gguf too: of wheels, `pip install --target FOLDER`, and FOLDER in PYTHONPATH.
# PYTHON is the interpreter. A machine that forgets between calls builds the library again, which takes about a minute,
# unless it is brought along, built by `kernels/build.py kernels/libgptqkit.so --arch 90` on any machine with nvcc.
# DEADLINE is how many seconds a call may take, 570 if nothing is said: less where the machine is taken away sooner, so
# that the summary is still written.
#
# OUT (benchmarks/results) gets CALL.txt, with a line per step as soon as it has ended, CALL.log, with the last megabyte
# of what each step said, and the steps' own files, which they write as they go. Every step has its own limit of time. A
# step that fails does not stop the others, but for the build; the exit status is 0 if all went well.
set -uo pipefail
cd "$(dirname "$0")/.."

call=${1:-}
case $call in first | second | third) ;; *) echo "CALL is first, second or third" && exit 2 ;; esac
out=${2:-benchmarks/results}
python=${PYTHON:-python3}
deadline=${DEADLINE:-570}
failed=0
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=/tmp/gptqkit_pycache
mkdir -p "$out"
: >"$out/$call.txt" && : >"$out/$call.log" || exit 1
log=$(mktemp) # of the latest step
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,clocks_event_reasons.active --format=csv -l 5 >"$out/clocks-$call.csv" &
clocks=$!
trap 'rm -f "$log"; kill $clocks 2>/dev/null' EXIT

skip() { # name, reason
    echo "== $1: skipped, $2"
    echo "$1: skipped, $2" >>"$out/$call.txt"
}

step() { # name, seconds, command...
    local name=$1 seconds=$2 begin=$SECONDS left=$((deadline - SECONDS)) status
    shift 2
    seconds=$((left < seconds ? left : seconds))
    if [ "$seconds" -lt 10 ]; then # `timeout 0` would be no limit at all
        failed=1
        skip "$name" "no time is left"
        return 1
    fi
    echo "== $name"
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || failed=1
    { echo "== $name" && tail -c 1000000 "$log"; } >>"$out/$call.log"
    echo "$name: status $status after $((SECONDS - begin)) s; $(tail -n 1 "$log" | cut -c 1-160)" >>"$out/$call.txt"
    return "$status"
}

tests() { # seconds, -m, marks, files...: a process each: an illegal access fails whatever comes after it in its process
    local seconds=$1 marks=$3 file
    shift 3
    for file in "$@"; do
        # Warnings of another torch than the one developed with cost only what they are.
        step "$file" "$seconds" "$python" -m pytest -p no:cacheprovider -W default -m "$marks" -v --tb=short --durations=10 "$file"
    done
}

find_tool() { # name
    local each
    for each in "$(command -v "$1")" "/usr/local/cuda/bin/$1" /opt/nvidia/nsight-compute/*/"$1"; do
        [ -x "$each" ] && echo "$each" && return
    done
    return 1
}

step gpu 15 nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,memory.total --format=csv
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 | tr -d .)
step torch 180 "$python" -c 'import torch
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_capability()}")'
# A library of other sources is refused when it is loaded, so what is there may stay.
if ! "$python" -c 'from gptqkit.kernels.library import KernelLibrary, _HERE, FILE_NAME
KernelLibrary(_HERE / FILE_NAME)' 2>/dev/null; then
    step build 180 "$python" kernels/build.py kernels/libgptqkit.so --arch "$capability" || exit 1
fi

case $call in
first)
    step trial 60 "$python" -c 'import torch
from gptqkit.kernels.trial import tried_library
print(tried_library(torch.device("cuda", 0))[1] or "the kernels passed their trial")'
    step subnormals 60 "$python" -m pytest -p no:cacheprovider -W default -m gpu -v --tb=short -k unit_inputs tests/kernels/test_cuda.py
    tests 120 -m gpu tests/kernels/test_{trial,cuda,streams,sweep}.py tests/quantizer/test_rows.py
    step gemm 200 "$python" benchmarks/gemm.py --out "$out" --bits 4 --dtypes float16 --shapes 8192x28672 4096x4096
    if ncu=$(find_tool ncu); then
        # Share of the memory's and the tensor cores' speed, and what warps wait for, of three kernels.
        step ncu 60 "$ncu" --clock-control none --section SpeedOfLight --section WarpStateStats --section Occupancy \
            --kernel-name 'regex:gemm_' --launch-count 3 "$python" benchmarks/sanitize.py --profile
    else
        skip ncu "it is not found"
    fi
    ;;
second)
    step tune 270 "$python" benchmarks/tune.py --out "$out"
    cp kernels/devices/*.json "$out"
    left=$((deadline - SECONDS - 30))
    step gemm "$left" "$python" benchmarks/gemm.py --out "$out" --seconds "$((left - 40))"
    step host 30 "$python" benchmarks/host.py --out "$out"
    ;;
third)
    step quantizing 120 "$python" benchmarks/quantizing.py --out "$out"
    step model 220 "$python" benchmarks/model.py --out "$out" --batches 1 16 --minutes 3
    tests 160 -m gpu tests/test_gpu.py tests/test_transformers.py tests/export/test_bits.py
    step solver 60 "$python" benchmarks/solver.py --repeats 2 --json "$out/solver-gpu.json"
    sanitizer=$(find_tool compute-sanitizer)
    for tool in memcheck racecheck; do
        options=() && [ "$tool" = memcheck ] && options=(--report-api-errors no)
        if [ -n "$sanitizer" ]; then
            # Every tensor is an allocation of its own, so that memcheck sees where it ends.
            step "$tool" 90 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 9 \
                "${options[@]}" --kernel-name kernel_substring=gemm_ --kernel-name kernel_substring=add_large \
                --kernel-name kernel_substring=dequantize --kernel-name kernel_substring=sweep_kernel \
                "$python" benchmarks/sanitize.py
        else
            skip "$tool" "compute-sanitizer is not found"
        fi
    done
    ;;
esac

echo "== summary, $SECONDS s in all"
cat "$out/$call.txt"
exit "$failed"
