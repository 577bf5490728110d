#!/usr/bin/env bash
# Everything that wants a GPU, within ten minutes: tests marked `gpu`, the forward against its ceiling, scaling, and the
# serving and training figures against the peers whose python is named. What fails is reported and does not stop the rest.
#
#     bash benchmarks/gpu.sh [RESULTS_FOLDER] [DATA.jsonl]
#
# PYTHON is our environment's python (with a CUDA build of torch); BETTERTHAN_VLLM_PYTHON and BETTERTHAN_TRL_PYTHON name
# the peers', and a peer without one is left out. Serving uses 16-bit weights on both sides.
set -u
cd "$(dirname "$0")/.."
results=${1:-gpu-results}
data=${2:-}
python=${PYTHON:-python}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$results"
failed=0

step() { # name, seconds, command...
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    if timeout "$seconds" "$@" >"$results/$name.out" 2>"$results/$name.err"; then
        tail -n 1 "$results/$name.out"
    else
        echo "failed or over $seconds s: $name (exit $?)"
        tail -n 5 "$results/$name.err" "$results/$name.out"
        failed=1
    fi
}

"$python" - <<'PY' || exit 2
import torch
assert torch.cuda.is_available(), "torch finds no CUDA device"
print(torch.cuda.get_device_name(), torch.__version__)
PY
# The bundled model is converted once, outside of what is timed.
"$python" -c "from rm_core.smollm2 import bundled_model_path as path; print(path())" || exit 2
step tests 190 "$python" -m pytest tests/gpu -m gpu -rs
step ceiling 45 "$python" benchmarks/ceiling.py --device cuda
step scaling 45 "$python" benchmarks/scaling.py --device cuda --rounds 3
if [ -n "${BETTERTHAN_VLLM_PYTHON:-}" ]; then
    step serving 210 "$python" benchmarks/serve_vs_vllm.py --device cuda --workloads ACF --rounds 3
fi
if [ -n "$data" ] && [ -n "${BETTERTHAN_TRL_PYTHON:-}" ]; then
    step training 110 "$python" benchmarks/train_vs_trl.py "$data" --device cuda --rounds 1 --pairs 256
fi
exit "$failed"
