// Codes chosen by error feedback: rows -> four candidate ranges -> scale, offset and codes of the best, packed.
//
// The definition is rotationzoo/codec/feedback.py; codes, scales and offsets are the same bit by bit. The macros
// are those of int2.cu, CLIP and ROTATE being 0.
//
// A channel waits for the errors of all that come before it, so that a row is one chain of D steps. Its D^2 / 2 multiplications
// and subtractions a range are what takes time. A thread therefore has a row to itself, in all ranges at once: a weight that it
// reads serves four sums, nothing is exchanged between threads, and the four chains hide each other's latency. The sums of WIDTH
// channels are in registers. The errors before them are computed again from their codes, which takes less than keeping them.

#include "int2.cu"

constexpr int RANGES = 4, WIDTH = 16, ROWS = 32;  // rows of a block: one warp, so that few rows still reach all multiprocessors
constexpr int RESIDENT = 8;  // that a multiprocessor should hold: registers for that many, without spilling any
// Rows that are too long for shared memory, beside the codes, are read where they are.
constexpr bool TILED = ROWS * (D * sizeof(Element) + 4 * CODES + FINE / 2) <= 48 << 10;
constexpr int STRIDE = TILED ? ROWS : 1;  // from one channel of a thread's row to the next

// What the errors of one channel do to the channels of a block, from the `first` on. `weights` are its row of the factor there.
__device__ void feed_back(float (&moved)[RANGES][WIDTH], const float (&error)[RANGES], const float* weights, int first) {
  alignas(16) float weight[WIDTH];
#pragma unroll
  for (int k = 0; k < WIDTH; k += 4) copy<16>(weight + k, weights + k);
#pragma unroll
  for (int k = 0; k < WIDTH; k++)
    if (k >= first)
#pragma unroll
      for (int r = 0; r < RANGES; r++) moved[r][k] = __fsub_rn(moved[r][k], __fmul_rn(error[r], weight[k]));
}

// Four codes of two bits each, to bits 0, 8, 16 and 24.
__device__ unsigned spread(unsigned codes) {
  codes = (codes | codes << 12) & 0x000f000f;
  return (codes | codes << 6) & 0x03030303;
}

// Rows `[heads, length, D]` and factors `[heads, D, D]`, float32: U, and on its diagonal d -> codes `[heads, length, ROW]` and
// metadata `[heads, length, D/GROUP, NUMBERS]`. Launch with a grid of (length / ROWS rounded up, heads) and ROWS threads. Sets
// `refused` if a row is not finite or exceeds 1e18: its scales are then no numbers.
extern "C" __global__ void __launch_bounds__(ROWS, RESIDENT) quantize_with_feedback(
    const Element* rows, long long length, const float* __restrict__ factors, unsigned char* codes, Metadata* metadata,
    int* refused) {
  // A column of each is one thread's. Byte r of an entry of `chosen` has the codes of OF_BYTE channels in range r, and four bits of
  // an entry of `thirds` have the third bits of four.
  __shared__ unsigned chosen[CODES][ROWS];
  __shared__ unsigned short thirds[FINE ? FINE / 4 : 1][ROWS];
  __shared__ Element tile[TILED ? D : 1][ROWS];
  const int thread = threadIdx.x;
  const long long number = blockIdx.x * (long long)ROWS + thread;
  const long long row = blockIdx.y * length + min(number, length - 1);
  const float* factor = factors + blockIdx.y * (long long)D * D;
  const Element* x = rows + row * D;
  if (TILED) {
    constexpr int RUN = 16 / sizeof(Element);
#pragma unroll 1
    for (int j = 0; j < D; j += RUN) {
      alignas(16) Element run[RUN];
      copy<16>(run, x + j);
      for (int i = 0; i < RUN; i++) tile[j + i][thread] = run[i];
    }
    x = &tile[0][thread];
  }

  // The candidate ranges of each group.
  const float cuts[RANGES] = {0.0f, 0.05f, 0.1f, 0.15f};  // of either end: RANGES of the definition
  float scale[GROUPS][RANGES], offset[GROUPS][RANGES], total[RANGES] = {}, top = 0.0f;
#pragma unroll 1
  for (int g = 0; g < GROUPS; g++) {
    float low = INFINITE, high = -INFINITE;
#pragma unroll 4
    for (int i = 0; i < GROUP; i++) {
      float exact = widen(x[STRIDE * (g * GROUP + i)]);
      low = min_nan(low, exact), high = max_nan(high, exact);
    }
    top = max_nan(top, max_nan(-low, high));
#pragma unroll
    for (int r = 0; r < RANGES; r++) {
      float cut = __fmul_rn(__fsub_rn(high, low), cuts[r]);
      const Range range(__fadd_rn(low, cut), __fsub_rn(high, cut));
      scale[g][r] = range.scale, offset[g][r] = range.offset;
    }
  }

#pragma unroll 1  // what is inside fills the instruction cache once
  for (int block = 0; block < D; block += WIDTH) {
    float moved[RANGES][WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
#pragma unroll
      for (int r = 0; r < RANGES; r++) moved[r][k] = widen(x[STRIDE * (block + k)]);

#pragma unroll 1
    for (int j = 0; j < block; j += OF_BYTE) {
      const int group = j / GROUP;
      const bool fine = is_fine(j);
      const unsigned together = chosen[j / OF_BYTE][thread], lowest = fine ? thirds[(j - FIRST_FINE) / 4][thread] : 0;
#pragma unroll
      for (int i = 0; i < OF_BYTE; i++) {
        float error[RANGES], exact = widen(x[STRIDE * (j + i)]);
#pragma unroll
        for (int r = 0; r < RANGES; r++) {
          unsigned code = together >> (8 * r + BITS * i) & (LEVELS - 1);
          if (fine) code = 2 * code | (lowest >> (4 * r + i) & 1);
          const float step = step_of(scale[group][r], fine), zero = zero_of(offset[group][r], fine);
          error[r] = __fsub_rn(restore(0x4b000000 | code, step, zero), exact);
        }
        feed_back(moved, error, factor + (j + i) * D + block, 0);
      }
    }

    // Now the block's own channels, one after another.
    const bool fine = is_fine(block);
#pragma unroll
    for (int j = 0; j < WIDTH; j += OF_BYTE) {
      const int group = (block + j) / GROUP;
      unsigned together = WITHOUT_CODES, lowest = 0;
#pragma unroll
      for (int i = j; i < j + OF_BYTE; i++) {
        const float* weights = factor + (block + i) * D + block;
        float error[RANGES], exact = widen(x[STRIDE * (block + i)]);
#pragma unroll
        for (int r = 0; r < RANGES; r++) {
          const float step = step_of(scale[group][r], fine), zero = zero_of(offset[group][r], fine);
          const Steps<false> steps{Divisor<false>(step), zero};
          unsigned bits = code_bits(steps(moved[r][i]), 0, ceiling_of(fine));
          float restored = restore(bits, step, zero);
          float residual = __fsub_rn(restored, moved[r][i]);
          total[r] = __fadd_rn(total[r], __fmul_rn(weights[i], __fmul_rn(residual, residual)));
          error[r] = __fsub_rn(restored, exact);
          if (fine) lowest |= (bits & 1) << (4 * r + i - j), bits = upper_bits(bits);
          together += bits << (8 * r + BITS * (i - j));
        }
        feed_back(moved, error, weights, i + 1);
      }
      chosen[(block + j) / OF_BYTE][thread] = together;
      if (fine) thirds[(block + j - FIRST_FINE) / 4][thread] = lowest;
    }
  }

  int best = 0;
#pragma unroll
  for (int r = 1; r < RANGES; r++) {
    if (total[r] < total[0]) best = r;
    total[0] = min_nan(total[0], total[r]);
  }
  if (number < length) {
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int r = 0; r < RANGES; r++)
        if (r == best) store(metadata + (row * GROUPS + g) * NUMBERS, top <= LARGEST ? scale[g][r] : NOT_A_NUMBER, offset[g][r]);
#pragma unroll 1
    for (int j = 0; j < CODES; j += 4) {
      unsigned bytes = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (!STRIDED) bytes |= (chosen[j + k][thread] >> 8 * best & 0xff) << 8 * k;
        else if (BITS == 2) bytes |= spread(chosen[(k * QUARTER + j) / 4][thread] >> 8 * best & 0xff) << 2 * k;
        else
          for (int f = 0; f < OF_BYTE; f++) {
            const int channel = f * CODES + j + k;
            const unsigned code = chosen[channel / OF_BYTE][thread] >> (8 * best + BITS * (channel % OF_BYTE)) & (LEVELS - 1);
            bytes |= code << (8 * k + BITS * f);
          }
      }
      copy_codes<4>(codes + row * ROW + j, &bytes);
    }
#pragma unroll 1
    for (int j = 0; j < FINE; j += 16) {
      unsigned bytes = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) bytes |= (thirds[j / 4 + k][thread] >> 4 * best & 15) << 4 * k;
      copy<2>(codes + row * ROW + CODES + j / 8, &bytes);
    }
  }
  if (!(top <= LARGEST)) *refused = 1;
}

// ---- few rows --------------------------------------------------------------------------------------------------------------

// The same for so few rows that their chains, and not the multiprocessors, decide how long it takes: a row has a block of four
// warps, each of which follows one range. A lane has every 32nd channel. All lanes compute the code of the next channel, and what
// its error does to their own ones, in the same order as above. Rows of the factor are read AHEAD of their use, and nothing is
// written before the end, so that reads need not wait.
constexpr int FEW_THREADS = 32 * RANGES, MINE = (D + 31) / 32, AHEAD = 8;

struct Few {  // of a row, in shared memory
  float values[D], diagonal[D], scales[RANGES][GROUPS], offsets[RANGES][GROUPS], totals[RANGES];
  unsigned char chosen[RANGES][D];
};

// A row of the factor, for the lane's channels. The first AHEAD rows may be on their way before the row's values are known.
struct Ahead {
  float weights[AHEAD][MINE];

  __device__ void read(const float* factor, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
      for (int m = 0; m < MINE; m++)
        weights[a][m] = first + a < D && 32 * m + lane < D ? factor[(first + a) * D + 32 * m + lane] : 0.0f;
  }
};

struct Level {  // how channels of one number of bits are rounded
  float step, zero;
  Steps<false> steps;

  __device__ Level(float scale, float offset, bool fine)
      : step(step_of(scale, fine)), zero(zero_of(offset, fine)), steps{Divisor<false>(step), zero} {}
};

// Choose the codes of a row whose values and diagonal are in `few`; returns the best range. Scales of a row that is refused are no
// numbers, as above.
__device__ int choose(Few& few, const float* factor, Ahead ahead) {
  const int lane = threadIdx.x % 32, range = threadIdx.x / 32;
  float moved[MINE], top = 0.0f;
  unsigned codes[MINE] = {};
#pragma unroll
  for (int m = 0; m < MINE; m++) moved[m] = 32 * m + lane < D ? few.values[32 * m + lane] : 0.0f;
  const float cuts[RANGES] = {0.0f, 0.05f, 0.1f, 0.15f};
#pragma unroll 1
  for (int g = 0; g < GROUPS; g++) {
    const float* values = few.values + g * GROUP;
    float low = INFINITE, high = -INFINITE;
    for (int i = lane; i < GROUP; i += 32) low = min_nan(low, values[i]), high = max_nan(high, values[i]);
#pragma unroll
    for (int step = 16; step; step /= 2) {
      low = min_nan(low, __shfl_xor_sync(0xffffffffu, low, step));
      high = max_nan(high, __shfl_xor_sync(0xffffffffu, high, step));
    }
    top = max_nan(top, max_nan(-low, high));
    const float cut = __fmul_rn(__fsub_rn(high, low), cuts[range]);
    const Range kept(__fadd_rn(low, cut), __fsub_rn(high, cut));
    if (!lane) few.scales[range][g] = kept.scale, few.offsets[range][g] = kept.offset;
  }
  if (!lane && !(top <= LARGEST))
    for (int g = 0; g < GROUPS; g++) few.scales[range][g] = NOT_A_NUMBER;
  __syncwarp();

  float total = 0.0f;
  Level coarse(few.scales[range][0], few.offsets[range][0], false), fine(few.scales[range][0], few.offsets[range][0], true);
#pragma unroll
  for (int m = 0; m < MINE; m++) {
    const int channels = D - 32 * m < 32 ? D - 32 * m : 32;
#pragma unroll 1
    for (int first = 0; first < channels; first += AHEAD) {
      const Ahead now = ahead;
      ahead.read(factor, 32 * m + first + AHEAD);
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const int j = 32 * m + first + a;
        if (GROUPS > 1 && j % GROUP == 0) {
          const float scale = few.scales[range][j / GROUP], offset = few.offsets[range][j / GROUP];
          coarse = Level(scale, offset, false), fine = Level(scale, offset, true);
        }
        const Level level = is_fine(j) ? fine : coarse;
        const float before = __shfl_sync(0xffffffffu, moved[m], first + a);
        const unsigned bits = code_bits(level.steps(before), 0, ceiling_of(is_fine(j)));
        const float restored = restore(bits, level.step, level.zero), residual = __fsub_rn(restored, before);
        const float error = __fsub_rn(restored, few.values[j]);
        total = __fadd_rn(total, __fmul_rn(few.diagonal[j], __fmul_rn(residual, residual)));
        if (lane == first + a) codes[m] = bits & 255;
#pragma unroll
        for (int k = m; k < MINE; k++)
          if (k > m || lane > first + a) moved[k] = __fsub_rn(moved[k], __fmul_rn(error, now.weights[a][k]));
      }
    }
  }
#pragma unroll
  for (int m = 0; m < MINE; m++)
    if (32 * m + lane < D) few.chosen[range][32 * m + lane] = codes[m];
  if (!lane) few.totals[range] = total;
  __syncthreads();

  int best = 0;
  float least = few.totals[0];
#pragma unroll
  for (int r = 1; r < RANGES; r++) {
    if (few.totals[r] < least) best = r;
    least = min_nan(least, few.totals[r]);
  }
  return best;
}

__device__ bool is_refused(const Few& few) { return few.scales[0][0] != few.scales[0][0]; }

// Write the codes of the best range, its third bits, and its scales and offsets, `apart` numbers from one to the next.
__device__ void write(
    const Few& few, int best, unsigned char* codes, unsigned char* thirds, Metadata* scales, Metadata* offsets, int apart) {
  for (int g = threadIdx.x; g < GROUPS; g += FEW_THREADS) {
    scales[g * apart] = write(few.scales[best][g]);
    if (!SYMMETRIC) offsets[g * apart] = write(few.offsets[best][g]);
  }
  for (int i = threadIdx.x; i < CODES; i += FEW_THREADS) {
    unsigned byte = 0;
#pragma unroll
    for (int k = 0; k < OF_BYTE; k++) {
      const int channel = STRIDED ? k * CODES + i : OF_BYTE * i + k;
      byte |= few.chosen[best][channel] >> is_fine(channel) << BITS * k;
    }
    codes[i] = byte;
  }
  for (int i = threadIdx.x; i < FINE / 8; i += FEW_THREADS) {
    unsigned byte = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) byte |= (few.chosen[best][FIRST_FINE + 8 * i + k] & 1) << k;
    thirds[i] = byte;
  }
}

// Launch with a grid of (length, heads) and FEW_THREADS threads.
extern "C" __global__ void __launch_bounds__(FEW_THREADS) quantize_few_with_feedback(
    const Element* rows, long long length, const float* __restrict__ factors, unsigned char* codes, Metadata* metadata,
    int* refused) {
  __shared__ Few few;
  const long long row = blockIdx.y * length + blockIdx.x;
  const float* factor = factors + blockIdx.y * (long long)D * D;
  Ahead ahead;
  ahead.read(factor, 0);
  for (int i = threadIdx.x; i < D; i += FEW_THREADS)
    few.values[i] = widen(rows[row * D + i]), few.diagonal[i] = factor[i * D + i];
  __syncthreads();
  const int best = choose(few, factor, ahead);
  if (!threadIdx.x && is_refused(few)) *refused = 1;
  Metadata* numbers = metadata + row * GROUPS * NUMBERS;
  write(few, best, codes + row * ROW, codes + row * ROW + CODES, numbers, numbers + 1, NUMBERS);
}
