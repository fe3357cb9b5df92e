// The 2-bit codec on CUDA: rows -> (rotate) -> clip, scale, round, pack; and back.
//
// The definition is rotationzoo/int2.py; codes, scales and dequantized values are the same bit by bit. Every operation is
// float32 and rounded on its own, which is what the _rn intrinsics say: they are never fused.
//
// A row is D channels of one token and KV head, in D/16 columns. Column c is the four chunks of four channels that start at
// k*D/4 + 4c, k = 0..3: whichever way codes are packed, its sixteen codes fill four whole bytes. A few lanes share a row, each
// with one or two of its columns.
//
// Compile with -D: D (multiple of 16, at most 512), GROUP (divides D), TYPE (of the rows: 0 float32, 1 float16, 2 bfloat16),
// CLIP (0: off), ROTATE, and the format: GROUP_CLIP, INTERPOLATED, HALF (metadata in float16), MINIMUM, STRIDED.
// Needs sm_80 or newer. No header is included: NVRTC compiles this file on machines without a CUDA toolkit.

constexpr int QUARTER = D / 4, COLUMNS = D / 16, GROUPS = D / GROUP;
constexpr int WARPS = 4;
// A rotation keeps many sums a row, so lanes take less of a row then, and several rows for each read of the matrix.
constexpr int LANE_COLUMNS = ROTATE ? 1 : 2, LANE_ROWS = ROTATE ? 4 : 1;
constexpr int SHARE = (COLUMNS + LANE_COLUMNS - 1) / LANE_COLUMNS;  // lanes needed for a row, and rounded up to what shuffles take
constexpr int LANES = SHARE <= 2 ? 2 : SHARE <= 4 ? 4 : SHARE <= 8 ? 8 : SHARE <= 16 ? 16 : 32;
constexpr int CHUNKS = 4 * LANE_COLUMNS;
constexpr int WARP_ROWS = 32 / LANES * LANE_ROWS;
constexpr float LARGEST = 1e18f, INFINITE = 1.0f / 0.0f;
constexpr unsigned ALL = 0xffffffffu;

#if TYPE == 0
typedef float4 Chunk;  // four channels
#else
typedef uint2 Chunk;
#if TYPE == 1
#define PAIR "f16x2"
#else
#define PAIR "bf16x2"
#endif
#endif

// ---- conversions -----------------------------------------------------------------------------------------------------------

__device__ float from_half(unsigned bits) {
  float x;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(bits));
  return x;
}

__device__ unsigned to_half(float x) {
  unsigned bits;
  asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(x));
  return bits;
}

#if HALF
typedef unsigned short Metadata;
__device__ float read(Metadata x) { return from_half(x); }
__device__ Metadata write(float x) { return to_half(x); }
// What reading the stored number gives; where the engines overflow or underflow to NaN, the nearest that float16 has.
__device__ float stored_scale(float x) { return from_half(to_half(fminf(fmaxf(x, 5.9604644775390625e-8f), 65504.0f))); }
__device__ float stored_offset(float x) { return from_half(to_half(fminf(fmaxf(x, -65504.0f), 65504.0f))); }
#else
typedef float Metadata;
__device__ float read(Metadata x) { return x; }
__device__ Metadata write(float x) { return x; }
__device__ float stored_scale(float x) { return x; }
__device__ float stored_offset(float x) { return x; }
#endif

__device__ unsigned pack_pair(float low, float high) {
  unsigned pair = 0;
#if TYPE
  asm("cvt.rn." PAIR ".f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

__device__ unsigned same_pair(float low, float high) {  // for numbers that came from a pair: no rounding
#if TYPE == 1
  return pack_pair(low, high);
#else
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000);  // the compiler finds the pair again
#endif
}

__device__ void unpack_pair(unsigned pair, float* x) {
#if TYPE == 1
  x[0] = from_half(pair & 0xffff), x[1] = from_half(pair >> 16);
#else
  x[0] = __uint_as_float(pair << 16), x[1] = __uint_as_float(pair & 0xffff0000);
#endif
}

__device__ void load(const Chunk* from, float* x) {
  Chunk chunk = *from;
#if TYPE == 0
  x[0] = chunk.x, x[1] = chunk.y, x[2] = chunk.z, x[3] = chunk.w;
#else
  unpack_pair(chunk.x, x), unpack_pair(chunk.y, x + 2);
#endif
}

__device__ void save(Chunk* to, const float* x) {
#if TYPE == 0
  *to = make_float4(x[0], x[1], x[2], x[3]);
#else
  *to = make_uint2(pack_pair(x[0], x[1]), pack_pair(x[2], x[3]));
#endif
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------------

__device__ float min_nan(float a, float b) {  // NaN if either is, unlike fminf
  float x;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

__device__ float max_nan(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

// Many divisions by one number, each correctly rounded. high + low is 1/s to twice the precision, so the first quotient is off
// by less than an ulp; one correction with high, the correctly rounded reciprocal, then rounds correctly (Markstein 1990).
struct Divisor {
  float s, high, low;

  __device__ explicit Divisor(float s) : s(s) {
    high = __frcp_rn(s);
    low = __fmul_rn(__fmaf_rn(-s, high, 1.0f), high);
  }

  __device__ float divide(float x) const {
    float q = __fmaf_rn(x, high, __fmul_rn(x, low));
    return __fmaf_rn(__fmaf_rn(-q, s, x), high, q);
  }
};

// trunc(y) clamped to 0..3, plus 0x4b000000: the bits of 2^23 + the integer. Floats that are not negative sort like integers.
__device__ unsigned code_bits(float y) {
  float clamped = __int_as_float(max(min(__float_as_int(y), 0x40400000), 0));
  return __float_as_uint(__fadd_rd(clamped, 8388608.0f));
}

// ---- one row, spread over LANES lanes --------------------------------------------------------------------------------------

// A lane's chunks: chunk n belongs to its column n / 4 and is the (n % 4)-th of that column.
struct Lane {
  int index = threadIdx.x % LANES;

  __device__ int column(int n) const { return index + n / 4 * LANES; }
  __device__ bool has(int n) const { return COLUMNS % LANES == 0 || column(n) < COLUMNS; }
  __device__ int channel(int n) const { return n % 4 * QUARTER + 4 * column(n); }
  __device__ int group(int n) const {  // known to the compiler where it can be
    return GROUP % QUARTER == 0 ? n % 4 * QUARTER / GROUP : channel(n) / GROUP;
  }
};

template <class Reduce>
__device__ auto reduce(decltype(Reduce()(0, 0)) x) {
  for (int step = LANES / 2; step; step /= 2) x = Reduce()(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

struct Lower { __device__ float operator()(float a, float b) const { return min_nan(a, b); } };
struct Higher { __device__ float operator()(float a, float b) const { return max_nan(a, b); } };
struct Sum { __device__ unsigned operator()(unsigned a, unsigned b) const { return a + b; } };
struct Least { __device__ unsigned operator()(unsigned a, unsigned b) const { return min(a, b); } };
struct HalfSum {  // of two float16 at once
  __device__ unsigned operator()(unsigned a, unsigned b) const {
    unsigned x;
    asm("add.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
  }
};

// The smallest and the largest value of a group.
__device__ void extremes(const float (&x)[CHUNKS][4], Lane lane, int group, float& low, float& high) {
#if TYPE && !ROTATE  // two at a time
  float lows[2], highs[2];
  unsigned lowest = same_pair(INFINITE, INFINITE), highest = same_pair(-INFINITE, -INFINITE);
#pragma unroll
  for (int n = 0; n < CHUNKS; n++)
    if (lane.has(n) && lane.group(n) == group)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        unsigned pair = same_pair(x[n][i], x[n][i + 1]);
        asm("min.NaN." PAIR " %0, %0, %1;" : "+r"(lowest) : "r"(pair));
        asm("max.NaN." PAIR " %0, %0, %1;" : "+r"(highest) : "r"(pair));
      }
  unpack_pair(lowest, lows), unpack_pair(highest, highs);
  low = min_nan(lows[0], lows[1]), high = max_nan(highs[0], highs[1]);
#else
  low = INFINITE, high = -INFINITE;
#pragma unroll
  for (int n = 0; n < CHUNKS; n++)
    if (lane.has(n) && lane.group(n) == group)
#pragma unroll
      for (int i = 0; i < 4; i++) low = min_nan(low, x[n][i]), high = max_nan(high, x[n][i]);
#endif
  low = reduce<Lower>(low), high = reduce<Higher>(high);
}

#if CLIP
// Magnitudes of a row or group as integers that sort alike; 0 for channels that do not count.
struct Keys {
#if TYPE && !ROTATE
  // Two in a register, compared and counted as float16: bfloat16 sorts the same way read as float16, and what would then be
  // NaN is beyond LARGEST.
  static constexpr unsigned OCTAVE = TYPE == 1 ? 1 << 10 : 1 << 7;
  unsigned pair[2 * CHUNKS];

  __device__ static unsigned key(float x) { return TYPE == 1 ? to_half(x) : __float_as_uint(x) >> 16; }
  __device__ static float value(unsigned key) { return TYPE == 1 ? from_half(key) : __uint_as_float(key << 16); }
  __device__ unsigned get(int i) const { return pair[i / 2] >> 16 * (i % 2) & 0xffff; }
  __device__ void set(int n, const float* x, bool counts) {
    for (int i = 0; i < 2; i++) pair[2 * n + i] = counts ? same_pair(x[2 * i], x[2 * i + 1]) & 0x7fff7fff : 0;
  }

  __device__ bool at_least(unsigned key, int count) const {
    unsigned keys = key * 0x10001u, sum = 0, one;
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
      asm("set.ge.f16x2.f16x2 %0, %1, %2;" : "=r"(one) : "r"(pair[i]), "r"(keys));
      sum = HalfSum()(sum, one);
    }
    sum = reduce<HalfSum>(sum);
    return (HalfSum()(sum, __byte_perm(sum, 0, 0x1032)) & 0xffff) >= to_half(count);
  }
#else
  static constexpr unsigned OCTAVE = 1 << 23;
  unsigned magnitude[4 * CHUNKS];

  __device__ static unsigned key(float x) { return __float_as_uint(x); }
  __device__ static float value(unsigned key) { return __uint_as_float(key); }
  __device__ unsigned get(int i) const { return magnitude[i]; }
  __device__ void set(int n, const float* x, bool counts) {
    for (int i = 0; i < 4; i++) magnitude[4 * n + i] = counts ? __float_as_uint(x[i]) & 0x7fffffff : 0;
  }

  __device__ bool at_least(unsigned key, int count) const {
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; i++) sum += magnitude[i] >= key;
    return reduce<Sum>(sum) >= count;
  }
#endif

  // The `count`-th largest key, where `top` is the largest: down by octaves until enough keys are above, then bit by bit.
  // Every lane of the warp takes part in every count.
  __device__ unsigned largest(unsigned top, int count) const {
    unsigned key = top + 1;
    bool found = false;
    do {
      if (!found) key = key > OCTAVE ? key - OCTAVE : 0;
      found = at_least(key, count) || key == 0;
    } while (!__all_sync(ALL, found));
    for (unsigned step = OCTAVE / 2; step; step /= 2)
      if (at_least(key + step, count)) key += step;
    return key;
  }

  // The entry of this rank among the ascending magnitudes of so many channels; interpolated, `weight` of the way to the next.
  __device__ float threshold(float top, int channels, int rank, float weight) const {
    unsigned found = largest(key(top), channels - rank);
#if INTERPOLATED
    bool repeated = !at_least(found + 1, channels - rank - 1) || rank == channels - 1;
    unsigned next = key(INFINITE);
    for (int i = 0; i < 4 * CHUNKS; i++)
      if (get(i) > found) next = min(next, get(i));
    next = reduce<Least>(next);
    float below = value(found), above = repeated ? below : value(next);
    return __fadd_rn(below, __fmul_rn(weight, __fsub_rn(above, below)));
#else
    return value(found);
#endif
  }
};
#endif

__device__ float clip(float x, float limit) { return CLIP ? fminf(fmaxf(x, -limit), limit) : x; }

// Clip, scale, round and store one row. Returns whether its values are in the domain.
__device__ bool quantize_row(
    const float (&x)[CHUNKS][4], Lane lane, bool exists, int rank, float weight, unsigned char* codes, Metadata* metadata) {
  float low[GROUPS], high[GROUPS], top = 0.0f, limit = INFINITE;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    extremes(x, lane, g, low[g], high[g]);
    top = max_nan(top, max_nan(-low[g], high[g]));
  }
#if CLIP
  Keys keys;
#if !GROUP_CLIP
#pragma unroll
  for (int n = 0; n < CHUNKS; n++) keys.set(n, x[n], lane.has(n));
  limit = keys.threshold(top, D, rank, weight);
#endif
#endif
  unsigned words[LANE_COLUMNS];
  for (int j = 0; j < LANE_COLUMNS; j++) words[j] = 0x19000000;  // makes up for the 0x4b000000 in sixteen shifted code_bits
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
#if CLIP && GROUP_CLIP
#pragma unroll
    for (int n = 0; n < CHUNKS; n++) keys.set(n, x[n], lane.has(n) && lane.group(n) == g);
    limit = keys.threshold(max_nan(-low[g], high[g]), GROUP, rank, weight);
#endif
    float lowest = clip(low[g], limit), range = __fsub_rn(clip(high[g], limit), lowest);
    float scale = __fdiv_rn(fmaxf(range, 1e-8f), 3.0f);
    if (HALF && !MINIMUM) scale = fmaxf(scale, __fmul_rn(fabsf(lowest), 1.0f / 32768.0f));
    scale = stored_scale(scale);
    Divisor by(scale);
    // 0 - x and x + 0, not -x and x: a minimum of zero then has no sign.
    float offset = stored_offset(MINIMUM ? __fadd_rn(lowest, 0.0f) : __fsub_rn(0.0f, by.divide(lowest)));
#pragma unroll
    for (int n = 0; n < CHUNKS; n++)
      if (lane.group(n) == g)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float value = clip(x[n][i], limit);
          float steps = MINIMUM ? by.divide(__fsub_rn(value, offset)) : __fadd_rn(by.divide(value), offset);
          words[n / 4] += code_bits(__fadd_rn(steps, 0.5f)) << (STRIDED ? 8 * i + 2 * (n % 4) : 8 * (n % 4) + 2 * i);
        }
    if (exists && lane.index == 0) metadata[2 * g] = write(scale), metadata[2 * g + 1] = write(offset);
  }
  for (int j = 0; j < LANE_COLUMNS; j++)
    if (exists && lane.has(4 * j)) {
      int column = lane.column(4 * j);
#if STRIDED  // byte 4*column + i has the i-th codes of the column's chunks
      reinterpret_cast<unsigned*>(codes)[column] = words[j];
#else  // byte column + k*D/16 has the codes of its k-th chunk
      for (int k = 0; k < 4; k++) codes[column + k * COLUMNS] = words[j] >> 8 * k;
#endif
    }
  return top <= LARGEST;  // false for NaN
}

// ---- LANE_ROWS rows at once ------------------------------------------------------------------------------------------------

// Rows times a `[D, D]` matrix; `tile` is the warp's own shared memory for WARP_ROWS rows.
__device__ void rotate(float (&x)[LANE_ROWS][CHUNKS][4], Lane lane, const float* matrix, float* tile) {
  tile += threadIdx.x % 32 / LANES * LANE_ROWS * D;
  for (int r = 0; r < LANE_ROWS; r++)
    for (int n = 0; n < CHUNKS; n++)
      for (int i = 0; i < 4; i++) {
        if (lane.has(n)) tile[r * D + lane.channel(n) + i] = x[r][n][i];
        x[r][n][i] = 0.0f;
      }
  __syncwarp();
  for (int j = 0; j < D; j++) {
    float row[CHUNKS][4];
    for (int n = 0; n < CHUNKS; n++) {
      float4 chunk = reinterpret_cast<const float4*>(matrix + j * D)[lane.has(n) ? lane.channel(n) / 4 : 0];
      row[n][0] = chunk.x, row[n][1] = chunk.y, row[n][2] = chunk.z, row[n][3] = chunk.w;
    }
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
      float value = tile[r * D + j];
      for (int n = 0; n < CHUNKS; n++)
        for (int i = 0; i < 4; i++) x[r][n][i] = __fmaf_rn(value, row[n][i], x[r][n][i]);
    }
  }
}

// The first of the rows that this lane works on.
__device__ long long first_row() {
  return (blockIdx.x * (long long)WARPS + threadIdx.x / 32) * WARP_ROWS + threadIdx.x % 32 / LANES * LANE_ROWS;
}

// Rows `[heads, count, D]` -> codes `[heads, count, D/4]` and metadata `[heads, count, D/GROUP, 2]`: scale and offset. Launch with
// a grid of (count / (4 * WARP_ROWS) rounded up, heads) and 128 threads. `rotation` is `[heads, D, D]` float32; `ranks` and
// `weights` `[heads]` place the clip threshold; `rotated`, if not null, receives the rotated rows in float32. Sets `refused` if
// a row, after the rotation, is not finite or exceeds 1e18.
extern "C" __global__ void __launch_bounds__(32 * WARPS) quantize(
    const Chunk* rows, long long count, const float* rotation, const int* ranks, const float* weights, unsigned char* codes,
    Metadata* metadata, float* rotated, int* refused) {
  Lane lane;
  int head = blockIdx.y;
  long long first = first_row();
  float x[LANE_ROWS][CHUNKS][4];
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    long long row = head * count + min(first + r, count - 1);
#pragma unroll
    for (int n = 0; n < CHUNKS; n++)
      if (lane.has(n))
        load(rows + (row * D + lane.channel(n)) / 4, x[r][n]);
      else
        for (int i = 0; i < 4; i++) x[r][n][i] = 0.0f;
  }
#if ROTATE
  __shared__ float tiles[WARPS][WARP_ROWS * D];
  rotate(x, lane, rotation + (long long)head * D * D, tiles[threadIdx.x / 32]);
#endif
  bool fine = true;
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    long long row = head * count + first + r;
    bool exists = first + r < count;
    if (ROTATE && rotated && exists)
      for (int n = 0; n < CHUNKS; n++)
        for (int i = 0; i < 4; i++)
          if (lane.has(n)) rotated[row * D + lane.channel(n) + i] = x[r][n][i];
    fine &= quantize_row(
        x[r], lane, exists, CLIP ? ranks[head] : 0, CLIP ? weights[head] : 0.0f, codes + row * (D / 4),
        metadata + row * 2 * GROUPS);
  }
  if (!fine) *refused = 1;
}

// The inverse: codes and metadata as above -> rows `[heads, count, D]`; `rotation` is the transposed matrices.
extern "C" __global__ void __launch_bounds__(32 * WARPS) dequantize(
    const unsigned char* codes, const Metadata* metadata, long long count, const float* rotation, Chunk* rows) {
  Lane lane;
  int head = blockIdx.y;
  long long first = first_row();
  float x[LANE_ROWS][CHUNKS][4];
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    long long row = head * count + min(first + r, count - 1);
    const unsigned char* bytes = codes + row * (D / 4);
    unsigned words[LANE_COLUMNS] = {};
    for (int j = 0; j < LANE_COLUMNS; j++)
      if (lane.has(4 * j)) {
        int column = lane.column(4 * j);
#if STRIDED
        words[j] = reinterpret_cast<const unsigned*>(bytes)[column];
#else
        for (int k = 0; k < 4; k++) words[j] |= (unsigned)bytes[column + k * COLUMNS] << 8 * k;
#endif
      }
#pragma unroll
    for (int n = 0; n < CHUNKS; n++) {
      const Metadata* group = metadata + (row * GROUPS + (lane.has(n) ? lane.group(n) : 0)) * 2;
      float scale = read(group[0]), offset = read(group[1]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        unsigned code = words[n / 4] >> (STRIDED ? 8 * i + 2 * (n % 4) : 8 * (n % 4) + 2 * i) & 3;
        float value = __uint_as_float(0x4b000000 | code) - 8388608.0f;
        x[r][n][i] = MINIMUM ? __fadd_rn(__fmul_rn(value, scale), offset) : __fmul_rn(__fsub_rn(value, offset), scale);
      }
    }
  }
#if ROTATE
  __shared__ float tiles[WARPS][WARP_ROWS * D];
  rotate(x, lane, rotation + (long long)head * D * D, tiles[threadIdx.x / 32]);
#endif
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
    for (int n = 0; n < CHUNKS; n++)
      if (first + r < count && lane.has(n)) save(rows + ((head * count + first + r) * D + lane.channel(n)) / 4, x[r][n]);
}
