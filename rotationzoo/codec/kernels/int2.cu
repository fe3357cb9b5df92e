// The codec on CUDA: rows -> (rotate) -> clip, scale, round, pack; and back.
//
// The definition is rotationzoo/codec/int2.py; codes, scales and dequantized values are the same bit by bit. Every operation is
// float32 and rounded on its own, which is what the _rn intrinsics say: they are never fused.
//
// A row is D channels of one token and KV head, shared by a few lanes. Each lane holds four runs of RUN neighbouring channels,
// one from each quarter of the row: whichever way codes are packed, the codes of a byte are then in one lane.
//
// Compile with -D: D (multiple of 16, at most 512), GROUP (divides D), TYPE (of the rows: 0 float32, 1 float16, 2 bfloat16),
// CLIP (0: off), ROTATE, and the format: INTERPOLATED, HALF (metadata in float16), MINIMUM, STRIDED.
// Needs sm_80 or newer. No header of CUDA is included: NVRTC compiles this file on machines without a CUDA toolkit.

constexpr int QUARTER = D / 4, GROUPS = D / GROUP, WARPS = 4;
constexpr int CODES = D / 4;  // bytes of a row
// Codes are computed as code_bits, and packed by sums: this makes up for the 0x4b000000 of all that are summed to a word.
constexpr unsigned WITHOUT_CODES = 0x19000000;
// Eight 16-bit channels are the widest access there is. A rotation keeps many sums a row: it takes shorter runs, and several
// rows for each read of the matrix.
constexpr int RUN = ROTATE || !TYPE || QUARTER % 8 || GROUP % 8 ? 4 : 8, LANE_ROWS = ROTATE ? 4 : 1;
constexpr int SHARE = QUARTER / RUN;  // lanes that have something of a row, and rounded up to what shuffles take
constexpr int LANES = SHARE <= 2 ? 2 : SHARE <= 4 ? 4 : SHARE <= 8 ? 8 : SHARE <= 16 ? 16 : 32;
constexpr int WARP_ROWS = 32 / LANES * LANE_ROWS;
// Blocks that a multiprocessor should hold: best of 8 to 12 on an H200, where the registers that leaves are enough.
constexpr int BLOCKS = TYPE == 2 && !ROTATE && !HALF && GROUPS == 1 && SHARE == LANES ? 9 : 1;
constexpr bool NARROW = TYPE && !ROTATE && !MINIMUM;  // only numbers of a 16-bit type are divided
constexpr float LARGEST = 1e18f, INFINITE = 1.0f / 0.0f;
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
constexpr unsigned ALL = 0xffffffffu;

#if TYPE == 0
typedef float Element;
#else
typedef unsigned short Element;
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
__device__ float stored_scale(float x) {
  return from_half(to_half(fminf(fmaxf(x, 5.9604644775390625e-8f), 65504.0f)));
}
__device__ float stored_offset(float x) { return from_half(to_half(fminf(fmaxf(x, -65504.0f), 65504.0f))); }
#else
typedef float Metadata;
__device__ float read(Metadata x) { return x; }
__device__ Metadata write(float x) { return x; }
__device__ float stored_scale(float x) { return x; }
__device__ float stored_offset(float x) { return x; }
#endif

// The numbers of a group.
__device__ void store(Metadata* numbers, float scale, float offset) {
  numbers[0] = write(scale), numbers[1] = write(offset);
}

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

template <int BYTES> struct Word;
template <> struct Word<1> { typedef unsigned char type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

// Copy BYTES, at most 16, from and to addresses that divide by their number.
template <int BYTES>
__device__ void copy(void* to, const void* from) {
  typedef typename Word<BYTES>::type Access;
  *static_cast<Access*>(to) = *static_cast<const Access*>(from);
}

__device__ float widen(Element x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return from_half(x);
#else
  return __uint_as_float((unsigned)x << 16);
#endif
}

__device__ void load(const Element* from, float (&x)[RUN]) {
#if TYPE == 0
  copy<4 * RUN>(x, from);
#else
  alignas(16) unsigned pairs[RUN / 2];
  copy<2 * RUN>(pairs, from);
  for (int i = 0; i < RUN / 2; i++) unpack_pair(pairs[i], x + 2 * i);
#endif
}

__device__ void save(Element* to, const float (&x)[RUN]) {
#if TYPE == 0
  copy<4 * RUN>(to, x);
#else
  alignas(16) unsigned pairs[RUN / 2];
  for (int i = 0; i < RUN / 2; i++) pairs[i] = pack_pair(x[2 * i], x[2 * i + 1]);
  copy<2 * RUN>(to, pairs);
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

// Many divisions by one number, each correctly rounded: a first quotient, its exact remainder, and a correction with `high`, the
// correctly rounded reciprocal, which rounds correctly if the first is off by less than an ulp (Markstein 1990). high + low is
// 1/s to twice the precision, so that it is. For x of a 16-bit type `high` alone does: tests/codec/test_cuda.py tries every one.
// Only where a remainder is subnormal may the last bit differ: then the quotient is far too small to change a code.
template <bool NARROW>
struct Divisor {
  float s, high, low;

  __device__ explicit Divisor(float s) : s(s), high(__frcp_rn(s)), low(__fmul_rn(__fmaf_rn(-s, high, 1.0f), high)) {}

  __device__ float divide(float x) const {
    float q = NARROW ? __fmul_rn(x, high) : __fmaf_rn(x, high, __fmul_rn(x, low));
    return __fmaf_rn(__fmaf_rn(-q, s, x), high, q);
  }
};

// trunc(y) clamped to the codes, plus 0x4b000000: the bits of 2^23 + the integer. `bottom` and `top` are the
// limits for y, or tighter ones, as integers: floats that are not negative sort alike.
__device__ unsigned code_bits(float y, int bottom, int top) {
  return __float_as_uint(__fadd_rd(__int_as_float(max(min(__float_as_int(y), top), bottom)), 8388608.0f));
}

// How a group of these extremes is rounded: with the scale and offset as they are stored.
struct Range {
  float scale, offset;

  __device__ Range(float lowest, float highest) {
    scale = stored_scale(Divisor<false>(3.0f).divide(fmaxf(__fsub_rn(highest, lowest), 1e-8f)));
    // 0 - x and x + 0, not -x and x: a minimum of zero then has no sign.
    offset = stored_offset(MINIMUM ? __fadd_rn(lowest, 0.0f) : __fsub_rn(0.0f, __fdiv_rn(lowest, scale)));
  }
};

// y = x in steps of a group, plus a half; its integer part is the code.
template <bool NARROW>
struct Steps {
  Divisor<NARROW> by;
  float offset;

  __device__ float operator()(float x) const {
    return __fadd_rn(MINIMUM ? by.divide(__fsub_rn(x, offset)) : __fadd_rn(by.divide(x), offset), 0.5f);
  }
};

// What a reader makes of a code, which is given as the bits of 2^23 + the integer.
__device__ float restore(unsigned code_bits, float scale, float offset) {
  float code = __uint_as_float(code_bits) - 8388608.0f;
  return MINIMUM ? __fadd_rn(__fmul_rn(code, scale), offset) : __fmul_rn(__fsub_rn(code, offset), scale);
}

// Where the code of the i-th channel of the k-th run is among the lane's, in bits.
__device__ constexpr int position(int k, int i) { return STRIDED ? 8 * i + 2 * k : 2 * (RUN * k + i); }

// ---- one row, spread over LANES lanes --------------------------------------------------------------------------------------

struct Lane {
  int index = threadIdx.x % LANES;
  bool active = SHARE == LANES || index < SHARE;  // the others only take part in the shuffles

  __device__ int channel(int k) const { return k * QUARTER + RUN * index; }  // the first of the k-th run
  __device__ int group(int k) const {  // of the k-th run; known to the compiler where it can be
    return GROUP % QUARTER == 0 ? k * QUARTER / GROUP : min(channel(k), D - 1) / GROUP;
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
__device__ void extremes(const float (&x)[4][RUN], Lane lane, int group, float& low, float& high) {
#if TYPE && !ROTATE  // two at a time
  float lows[2], highs[2];
  unsigned lowest = same_pair(INFINITE, INFINITE), highest = same_pair(-INFINITE, -INFINITE);
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (lane.active && lane.group(k) == group)
#pragma unroll
      for (int i = 0; i < RUN; i += 2) {
        unsigned pair = same_pair(x[k][i], x[k][i + 1]);
        asm("min.NaN." PAIR " %0, %0, %1;" : "+r"(lowest) : "r"(pair));
        asm("max.NaN." PAIR " %0, %0, %1;" : "+r"(highest) : "r"(pair));
      }
  unpack_pair(lowest, lows), unpack_pair(highest, highs);
  low = min_nan(lows[0], lows[1]), high = max_nan(highs[0], highs[1]);
#else
  low = INFINITE, high = -INFINITE;
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (lane.active && lane.group(k) == group)
#pragma unroll
      for (int i = 0; i < RUN; i++) low = min_nan(low, x[k][i]), high = max_nan(high, x[k][i]);
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
  unsigned pair[2 * RUN];

  __device__ static unsigned key(float x) { return TYPE == 1 ? to_half(x) : __float_as_uint(x) >> 16; }
  __device__ static float value(unsigned key) { return TYPE == 1 ? from_half(key) : __uint_as_float(key << 16); }
  __device__ unsigned get(int i) const { return pair[i / 2] >> 16 * (i % 2) & 0xffff; }
  __device__ void set(int k, const float (&x)[RUN], bool counts) {
    for (int i = 0; i < RUN / 2; i++)
      pair[k * RUN / 2 + i] = counts ? same_pair(x[2 * i], x[2 * i + 1]) & 0x7fff7fff : 0;
  }

  __device__ bool at_least(unsigned key, int count) const {
    unsigned keys = key * 0x10001u, sum = 0, one;
#pragma unroll
    for (int i = 0; i < 2 * RUN; i++) {
      asm("set.ge.f16x2.f16x2 %0, %1, %2;" : "=r"(one) : "r"(pair[i]), "r"(keys));
      sum = HalfSum()(sum, one);
    }
    sum = reduce<HalfSum>(sum);
    return (HalfSum()(sum, __byte_perm(sum, 0, 0x1032)) & 0xffff) >= to_half(count);
  }
#else
  static constexpr unsigned OCTAVE = 1 << 23;
  unsigned magnitude[4 * RUN];

  __device__ static unsigned key(float x) { return __float_as_uint(x); }
  __device__ static float value(unsigned key) { return __uint_as_float(key); }
  __device__ unsigned get(int i) const { return magnitude[i]; }
  __device__ void set(int k, const float (&x)[RUN], bool counts) {
    for (int i = 0; i < RUN; i++) magnitude[k * RUN + i] = counts ? __float_as_uint(x[i]) & 0x7fffffff : 0;
  }

  __device__ bool at_least(unsigned key, int count) const {
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < 4 * RUN; i++) sum += magnitude[i] >= key;
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

  // The entry of this rank among the ascending magnitudes; interpolated, `weight` of the way to the next.
  __device__ float threshold(float top, int rank, float weight) const {
    unsigned found = largest(key(top), D - rank);
#if INTERPOLATED
    bool repeated = !at_least(found + 1, D - rank - 1) || rank == D - 1;
    unsigned next = key(INFINITE);
    for (int i = 0; i < 4 * RUN; i++)
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

__device__ float clip(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }

// Clip, scale, round and store one row. Returns whether its values are in the domain; if not, what is stored reads back as no number.
__device__ bool quantize_row(
    const float (&x)[4][RUN], Lane lane, bool exists, int rank, float weight, unsigned char* codes, Metadata* metadata) {
  float low[GROUPS], high[GROUPS], top = 0.0f, limit = INFINITE;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    extremes(x, lane, g, low[g], high[g]);
    top = max_nan(top, max_nan(-low[g], high[g]));
  }
#if CLIP
  Keys keys;
#pragma unroll
  for (int k = 0; k < 4; k++) keys.set(k, x[k], lane.active);
  limit = keys.threshold(top, rank, weight);
#endif
  alignas(8) unsigned words[RUN / 4];
  for (unsigned& word : words) word = WITHOUT_CODES;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    float lowest = CLIP ? clip(low[g], limit) : low[g], highest = CLIP ? clip(high[g], limit) : high[g];
    const Range range(lowest, highest);
    const Steps<NARROW> steps{Divisor<NARROW>(range.scale), range.offset};
    int bottom = 0, ceiling = __float_as_int(3.0f);
#if CLIP  // steps never falls where x rises, so clamping x is clamping y between the steps of the limits: one clamp for both
    bottom = max(min(ceiling, __float_as_int(steps(-limit))), 0);
    ceiling = max(min(ceiling, __float_as_int(steps(limit))), bottom);
#endif
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (lane.group(k) == g)
#pragma unroll
        for (int i = 0; i < RUN; i++)
          words[position(k, i) / 32] += code_bits(steps(x[k][i]), bottom, ceiling) << position(k, i) % 32;
    if (exists && lane.index == 0) store(metadata + 2 * g, top <= LARGEST ? range.scale : NOT_A_NUMBER, range.offset);
  }
  if (exists && lane.active) {
#if STRIDED
    copy<RUN>(codes + RUN * lane.index, words);
#else
    for (int k = 0; k < 4; k++) copy<RUN / 4>(codes + lane.channel(k) / 4, reinterpret_cast<unsigned char*>(words) + k * RUN / 4);
#endif
  }
  return top <= LARGEST;  // false for NaN
}

// ---- LANE_ROWS rows at once ------------------------------------------------------------------------------------------------

// Rows times a `[D, D]` matrix; `tile` is the warp's own shared memory for WARP_ROWS rows.
__device__ void rotate(float (&x)[LANE_ROWS][4][RUN], Lane lane, const float* matrix, float* tile) {
  tile += threadIdx.x % 32 / LANES * LANE_ROWS * D;
  for (int r = 0; r < LANE_ROWS; r++)
    for (int k = 0; k < 4; k++)
      for (int i = 0; i < RUN; i++) {
        if (lane.active) tile[r * D + lane.channel(k) + i] = x[r][k][i];
        x[r][k][i] = 0.0f;
      }
  __syncwarp();
  for (int j = 0; j < D; j++) {
    alignas(16) float row[4][RUN];
#pragma unroll
    for (int k = 0; k < 4; k++) copy<16>(row[k], matrix + j * D + (lane.active ? lane.channel(k) : 0));
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < RUN; i++) x[r][k][i] = __fmaf_rn(tile[r * D + j], row[k][i], x[r][k][i]);
  }
}

// The first of the rows that this lane works on.
__device__ long long first_row() {
  return (blockIdx.x * (long long)WARPS + threadIdx.x / 32) * WARP_ROWS + threadIdx.x % 32 / LANES * LANE_ROWS;
}

// Rows `[heads, length, D]` -> codes `[heads, length, CODES]` and metadata `[heads, length, D/GROUP, 2]`. Launch with a
// grid of (length / (4 * WARP_ROWS) rounded up, heads) and 128 threads. `rotation` is `[heads, D, D]` float32; `ranks` and
// `weights` `[heads]` place the clip threshold; `rotated`, if not null, receives the rotated rows in float32. Sets `refused` if
// a row, after the rotation, is not finite or exceeds 1e18: its scales are then no numbers.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) quantize(
    const Element* rows, long long length, const float* rotation, const int* ranks, const float* weights, unsigned char* codes,
    Metadata* metadata, int* refused, float* rotated) {
  Lane lane;
  int head = blockIdx.y;
  long long first = first_row();
  alignas(16) float x[LANE_ROWS][4][RUN] = {};
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (lane.active) load(rows + (head * length + min(first + r, length - 1)) * D + lane.channel(k), x[r][k]);
#if ROTATE
  __shared__ float tiles[WARPS][WARP_ROWS * D];
  rotate(x, lane, rotation + (long long)head * D * D, tiles[threadIdx.x / 32]);
#endif
  bool valid = true;
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    long long row = head * length + first + r;
    bool exists = first + r < length;
    if (ROTATE && rotated && exists && lane.active)
      for (int k = 0; k < 4; k++) copy<16>(rotated + row * D + lane.channel(k), x[r][k]);
    valid &= quantize_row(
        x[r], lane, exists, CLIP ? ranks[head] : 0, CLIP ? weights[head] : 0.0f, codes + row * CODES, metadata + row * 2 * GROUPS);
  }
  if (!valid) *refused = 1;
}

// What a lane has of a row, from the row's codes and numbers of groups, which are `apart` from one group to the next.
__device__ void dequantize_row(
    float (&x)[4][RUN], Lane lane, const unsigned char* codes, const Metadata* scales, const Metadata* offsets, int apart) {
  alignas(8) unsigned words[RUN / 4] = {};
  if (lane.active) {
#if STRIDED
    copy<RUN>(words, codes + RUN * lane.index);
#else
    for (int k = 0; k < 4; k++) copy<RUN / 4>(reinterpret_cast<unsigned char*>(words) + k * RUN / 4, codes + lane.channel(k) / 4);
#endif
  }
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int at = lane.group(k) * apart;
    const float scale = read(scales[at]), offset = read(offsets[at]);
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      const unsigned code = words[position(k, i) / 32] >> position(k, i) % 32 & 3;
      x[k][i] = restore(0x4b000000 | code, scale, offset);
    }
  }
}

// The inverse: codes and metadata as above -> rows `[heads, length, D]`; `rotation` is the transposed matrices.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) dequantize(
    const unsigned char* codes, const Metadata* metadata, long long length, const float* rotation, Element* rows) {
  Lane lane;
  int head = blockIdx.y;
  long long first = first_row();
  alignas(16) float x[LANE_ROWS][4][RUN] = {};
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++) {
    const long long row = head * length + min(first + r, length - 1);
    const Metadata* numbers = metadata + row * GROUPS * 2;
    dequantize_row(x[r], lane, codes + row * CODES, numbers, numbers + 1, 2);
  }
#if ROTATE
  __shared__ float tiles[WARPS][WARP_ROWS * D];
  rotate(x, lane, rotation + (long long)head * D * D, tiles[threadIdx.x / 32]);
#endif
#pragma unroll
  for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (first + r < length && lane.active) save(rows + (head * length + first + r) * D + lane.channel(k), x[r][k]);
}
