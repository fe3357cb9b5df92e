#!/bin/sh
# Everything that wants a GPU, in one go: the GPU tests, the rest of the suite on this machine's
# versions, the statistics against a direct computation, and what a calibration and an evaluation
# cost.
#     scripts/tools/check_gpu.sh [MODEL [DATA]]
set -u
cd "$(dirname "$0")/../.."
failed=0
python3 -c "import torch, transformers as t
print(torch.__version__, t.__version__, torch.cuda.get_device_name())"
python3 -m pytest -m gpu -v -rs || failed=1
# The linter and the type checker say the same on every machine, where they are installed.
python3 -m pytest -n 8 -m "not gpu" --deselect tests/test_style.py || failed=1
for model in demo ${1-}; do
    data="${2-bundled}"
    python3 scripts/bench/check_statistics.py "$model" --data "$data" --dtype float32 || failed=1
    python3 scripts/bench/benchmark_calibrate.py "$model" --data "$data" --tokens 65536 || failed=1
    python3 scripts/bench/benchmark_evaluate.py "$model" --data "$data" --tokens 32768 || failed=1
done
exit $failed
