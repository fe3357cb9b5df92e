// A few new tokens, from the model's rows to codes in pages, in one launch: what `LayerPages.store` in pages.py does with a dozen,
// where codes are chosen by error feedback.
//
// The macros are those of feedback.cu, and TOKENS (of a page).

#include "feedback.cu"
#include "launches.cu"

// Bring a head's numbers [D, D] near: a multiprocessor reads them bit by bit, and each time would wait for memory.
__device__ void prefetch(const float* numbers) {
#if __CUDA_ARCH__ >= 800
  constexpr int LINE = 128 / sizeof(float);
  for (int i = threadIdx.x * LINE; i < D * D; i += FEW_THREADS * LINE)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(numbers + i));
#endif
}

struct Side {
  const Element* rows;  // [T, H, D], `stride` elements from one token to the next
  Count stride;
  const float *matrix, *mean, *factors;  // [H, D, D], [H, D] or null, [H, D, D]
  unsigned char* memory;  // the pages
  unsigned long long* bad;  // how many rows were refused, and the place of the last one in tokens
};

// Grid: x = T, y = H, z = sides; FEW_THREADS threads. A page has the sections of either side from these bytes on.
extern "C" __global__ void __launch_bounds__(FEW_THREADS) store_few(
    const Count* pages, const Count* places, Count page_bytes, Count begin_thirds, Count begin_scales, Count begin_offsets,
    const Element* key_rows, Count key_stride, const float* key_matrix, const float* key_mean, const float* key_factors,
    unsigned char* key_memory, unsigned long long* key_bad, const Element* value_rows, Count value_stride, const float* value_matrix,
    const float* value_mean, const float* value_factors, unsigned char* value_memory,
    unsigned long long* value_bad) {
  __shared__ Few few;
  __shared__ float given[D];
  const Side side = blockIdx.z
      ? Side{value_rows, value_stride, value_matrix, value_mean, value_factors, value_memory, value_bad}
      : Side{key_rows, key_stride, key_matrix, key_mean, key_factors, key_memory, key_bad};
  const Count token = blockIdx.x, head = blockIdx.y;
  const float *factor = side.factors + head * D * D, *matrix = side.matrix + head * D * D;
  if (!token) prefetch(matrix), prefetch(factor);
  Ahead ahead;
  ahead.read(factor, 0);
  wait_for_previous();
  const Element* row = side.rows + token * side.stride + head * D;
  const Count at = head * TOKENS + places[token];  // of a page
  for (int i = threadIdx.x; i < D; i += FEW_THREADS) {
    const float x = widen(row[i]);
    given[i] = side.mean ? __fsub_rn(x, side.mean[head * D + i]) : x;
    few.diagonal[i] = factor[i * D + i];
  }
  __syncthreads();
  for (int j = threadIdx.x; j < D; j += FEW_THREADS) {
    float sum = 0.0f;
#pragma unroll 32
    for (int i = 0; i < D; i++) sum = __fmaf_rn(given[i], matrix[i * D + j], sum);
    few.values[j] = sum;
  }
  __syncthreads();
  const int best = choose(few, factor, ahead);
  if (!threadIdx.x && pages[token] && is_refused(few))  // page 0 belongs to nobody
    atomicAdd(side.bad, 1ull), side.bad[1] = pages[token] * TOKENS + places[token];
  unsigned char* page = side.memory + pages[token] * page_bytes;
  Metadata* scales = reinterpret_cast<Metadata*>(page + begin_scales) + at * GROUPS;
  Metadata* offsets = reinterpret_cast<Metadata*>(page + begin_offsets) + at * GROUPS;
  write(few, best, page + at * CODES, page + begin_thirds + at * (FINE / 8), scales, offsets, 1);
}
