#!/bin/sh
# Everything that wants a GPU, in one go: the whole suite, the GPU tests by name, and what a calibration costs there.
#     scripts/check_gpu.sh [MODEL [DATA]]
set -u
cd "$(dirname "$0")/.."
python3 -c "import torch, transformers; print(torch.__version__, transformers.__version__, torch.cuda.get_device_name())"
python3 -m pytest -m gpu -v -rs
python3 -m pytest -n 8 -m "not gpu" --deselect tests/test_style.py
for model in demo ${1-}; do
    python3 scripts/check_statistics.py "$model" --data "${2-bundled}" --dtype float32
    python3 scripts/benchmark_calibrate.py "$model" --data "${2-bundled}" --tokens 65536
done
