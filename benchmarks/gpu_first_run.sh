#!/usr/bin/env bash
# Everything that only a GPU can show, in one command and under 9 minutes, from the root of the repository or anywhere:
#
#     benchmarks/gpu_first_run.sh [OUT]
#
# 1. the kernel library, built for this GPU unless kernels/libgptqkit.so is there; 2. the proof that the tensor cores
# multiply subnormal float16 operands; 3. the GPU tests; 4. compute-sanitizer's memcheck and racecheck; 5. the sweep of
# products. Logs, JSON and the plot go to OUT (benchmarks/results). Nothing needs to be installed but torch and pytest;
# tests of whole models need transformers too. PYTHON is the interpreter. A step that fails does not stop the others;
# the last lines say how each ended, and the exit status is 0 if all went well.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${1:-benchmarks/results}
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
mkdir -p "$out"
summary=()
failed=0

step() { # name, seconds, command...
    local name=$1 seconds=$2 begin=$SECONDS status
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || failed=1
    summary+=("$name: status $status after $((SECONDS - begin)) s")
}

skip() { # name, reason
    echo "== $1: skipped, $2"
    summary+=("$1: skipped, $2")
}

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,memory.total --format=csv | tee "$out/gpu.log"
"$python" -c 'import torch; print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")' | tee -a "$out/gpu.log"
capability=$("$python" -c 'import torch; print("{}{}".format(*torch.cuda.get_device_capability()))') || exit 1

if [ -e kernels/libgptqkit.so ]; then
    skip build "kernels/libgptqkit.so is there"
else
    step build 150 "$python" kernels/build.py kernels/libgptqkit.so --arch "$capability"
fi

# Warnings of another torch than the one developed with, and a file that cannot be imported, cost only what they are.
pytest=("$python" -m pytest -p no:cacheprovider -W default --continue-on-collection-errors -m gpu)
kernel_tests=(tests/kernels/test_{gemm,ops,cuda_backend,streams,sweep}.py)
model_tests=()
if "$python" -c 'import transformers, accelerate' 2>/dev/null; then
    model_tests=(tests/test_kernels_in_models.py tests/test_quantizing.py)
fi
if "$python" -c 'import pytest' 2>/dev/null; then
    step subnormals 30 "${pytest[@]}" -k unit_inputs tests/kernels/test_gemm.py
    step tests 100 "${pytest[@]}" "${kernel_tests[@]}"
    if [ ${#model_tests[@]} -gt 0 ]; then
        step models 40 "${pytest[@]}" "${model_tests[@]}"
    else
        skip models "transformers or accelerate are not installed"
    fi
else
    skip subnormals "pytest is not installed"
    skip tests "pytest is not installed"
fi

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        # Every tensor is an allocation of its own, so that memcheck sees where it ends.
        step "$tool" 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" benchmarks/sanitize.py
    done
else
    skip memcheck "compute-sanitizer is not found"
    skip racecheck "compute-sanitizer is not found"
fi

left=$((520 - SECONDS)) # the steps before take at most 440 s
step gemm "$left" "$python" benchmarks/gemm.py --out "$out" --seconds "$((left - 30))"

echo "== summary, $SECONDS s in all"
printf '%s\n' "${summary[@]}" | tee "$out/summary.log"
exit "$failed"
