#!/usr/bin/env bash
# Everything that only a GPU can show, in one command and under 9 minutes, from the root of the repository or anywhere:
#
#     benchmarks/gpu_first_run.sh [OUT]
#
# 1. the kernel library, built for this GPU unless kernels/libgptqkit.so is there; 2. the proof that the tensor cores
# multiply subnormal float16 operands; 3. the GPU tests; 4. compute-sanitizer's memcheck and racecheck; 5. this GPU's
# constants, written to kernels/devices; 6. with them, the times of products; 7. the solver's times; 8. the speed of a
# model of 8B shapes. Nothing needs to be installed but torch and pytest; tests of whole models need transformers too.
# PYTHON is the interpreter.
#
# OUT (benchmarks/results) gets summary.txt, with a line per step as soon as it has ended; first_run.log, with the last
# megabyte of what each step said; a copy of the constants; gemm.json, gemm.png, solver-gpu.json and model.json. Every
# step has its own limit of time, and all together have 530 s. A step that fails does not stop the others; the exit
# status is 0 if all went well.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${1:-benchmarks/results}
deadline=530
failed=0
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
mkdir -p "$out"
: >"$out/summary.txt" && : >"$out/first_run.log" || exit 1
log=$(mktemp)   # of the latest step
begun=$(mktemp) # as old as this run
trap 'rm -f "$log" "$begun"' EXIT

skip() { # name, reason
    echo "== $1: skipped, $2"
    echo "$1: skipped, $2" >>"$out/summary.txt"
}

step() { # name, seconds, command...
    local name=$1 seconds=$2 begin=$SECONDS left=$((deadline - SECONDS)) status
    shift 2
    if [ "$left" -lt 10 ] || [ "$seconds" -lt 10 ]; then
        failed=1
        skip "$name" "no time is left"
        return
    fi
    echo "== $name"
    timeout --kill-after=5 "$((left < seconds ? left : seconds))" "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || failed=1
    { echo "== $name" && tail -c 1000000 "$log"; } >>"$out/first_run.log"
    echo "$name: status $status after $((SECONDS - begin)) s; $(tail -n 1 "$log" | cut -c 1-160)" >>"$out/summary.txt"
}

has() { # modules
    timeout 30 "$python" -c "import $1" 2>/dev/null
}

step gpu 15 nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,memory.total --format=csv
step torch 40 "$python" -c 'import torch
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
print("{}{}".format(*torch.cuda.get_device_capability()))'
capability=$(grep -xE '[0-9]{2,3}' "$log")

if [ -e kernels/libgptqkit.so ]; then
    skip build "kernels/libgptqkit.so is there"
elif [ -n "$capability" ]; then
    step build 120 "$python" kernels/build.py kernels/libgptqkit.so --arch "$capability"
else
    skip build "torch names no GPU to build for"
fi

# Warnings of another torch than the one developed with, and a file that cannot be imported, cost only what they are.
pytest=("$python" -m pytest -p no:cacheprovider -W default --continue-on-collection-errors -m gpu)
if has pytest; then
    step subnormals 30 "${pytest[@]}" -k unit_inputs tests/kernels/test_cuda.py
    step tests 100 "${pytest[@]}" tests/kernels/test_{cuda,streams,sweep}.py
    if has "gptqkit.quantizing"; then
        step models 40 "${pytest[@]}" tests/test_kernels_in_models.py tests/test_gpu.py
    else
        skip models "a package that gptqkit needs is not installed"
    fi
else
    skip tests "pytest is not installed"
fi

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
for tool in memcheck racecheck; do
    if [ -n "$sanitizer" ]; then
        # Every tensor is an allocation of its own, so that memcheck sees where it ends.
        step "$tool" 50 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" benchmarks/sanitize.py
    else
        skip "$tool" "compute-sanitizer is not found"
    fi
done

step tune 80 "$python" benchmarks/tune.py
find kernels/devices -name '*.json' -newer "$begun" -exec cp {} "$out" \;

left=$((deadline - SECONDS - 130)) # 30 for the solver, 100 for the model
step gemm "$left" "$python" benchmarks/gemm.py --out "$out" --seconds "$((left - 25))"
step solver 30 "$python" benchmarks/solver.py --repeats 1 --json "$out/solver-gpu.json"
step model "$((deadline - SECONDS))" "$python" benchmarks/model.py --out "$out" --minutes 1

echo "== summary, $SECONDS s in all"
cat "$out/summary.txt"
exit "$failed"
