"""Write what `mx.quantize` makes of rows, for tests/simulation/test_engine_formats.py.

    pip install "mlx[cpu]" numpy
    python scripts/tools/write_mlx_rows.py tests/simulation/mlx_rows.npz

The file has float16 rows, and for each number of bits the rows that MLX restores in float32 from
its codes and its float16 scales and biases.
"""

import sys

import mlx.core as mx
import numpy as np

GROUP = 64  # the default of mlx-lm's --kv-group-size


def main() -> None:
    rows = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float16)
    rows[:, 5] *= 30
    rows[0, :GROUP] = 0
    rows[1], rows[2] = abs(rows[1]), -abs(rows[2])
    restored = {}
    for bits in (2, 3, 4):
        codes, *metadata = mx.quantize(mx.array(rows), group_size=GROUP, bits=bits)
        scales, biases = (numbers.astype(mx.float32) for numbers in metadata)
        each = mx.dequantize(codes, scales, biases, group_size=GROUP, bits=bits)
        restored[f"bits_{bits}"] = np.array(each)
    np.savez_compressed(sys.argv[1], rows=rows, **restored)


if __name__ == "__main__":
    main()
