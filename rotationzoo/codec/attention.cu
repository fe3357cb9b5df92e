// Attention of one or a few query tokens over packed keys and values: three kernels, in the order `prepare`, `attend`, `finish`.
// This file has the first, and what the second does with a tile of packed tokens. attention_parts.cu continues it with the
// second and the third: both are compiled as one program with the same macros.
//
// The definition is rotationzoo/codec/attention.py. Nothing is dequantized. With x = scale * code + offset,
//     q . k = scale * (q . codes) + offset * sum(q)   and   sum_t p_t v_t = sum_t (p_t * scale_t) codes_t + sum_t p_t * offset_t,
// so tensor cores multiply codes, and scales and offsets cost one multiplication a row. Unpacking is one AND:
//   * Keys: a field of a byte whose other bits are masked away is the integer code * 2^(bits * field). The query is rounded to 16
//     bits, and its upper and lower bytes are two columns of an integer product. Fields are summed apart, and weighed at the end.
//   * Values: a field of a 16-bit word is a float16, a subnormal one, code * 2^(bits * field) * 2^-24. Tensor cores multiply subnormals
//     exactly and at full speed. A weight is the sum of two float16, which are two columns of the product.
//   * Third bits count half a code. They lie apart, and are products of their own.
//
// Work is split over tokens (flash-decoding): a block of `attend` handles one range of tokens of one KV head for up to COLUMNS
// columns, which are the query heads of the group times the query tokens. It writes a maximum, a sum and an output without
// their scale; `finish` merges them. Every warp takes tiles of 32 tokens through a ring of its own in shared memory.
//
// Compile with -D: KEY_DIM and VALUE_DIM (multiples of 16, at most 256), KEY_GROUP and VALUE_GROUP (channels that share a scale),
// PAGE (tokens a page, a multiple of 32), WARPS (of a block of `attend`), COLUMNS (4 or 8), TYPE (of queries and exact rows: 0
// float32, 1 float16, 2 bfloat16), SOFT_CAP, and of the format HALF (scales and offsets in float16), MINIMUM and SYMMETRIC (offset
// as in `formats`), KEY_BITS and VALUE_BITS (of codes: 2, 4 or 8), KEY_FINE and VALUE_FINE (so many last channels have third bits:
// multiples of 16, 0 unless SYMMETRIC and codes have 2 bits; groups are multiples of 16, too), STRIDED (packing).
// Needs sm_80 or newer. No header is included: NVRTC compiles this file on machines without a CUDA toolkit.

typedef unsigned long long Address;
typedef long long Count;

constexpr int SETS = COLUMNS / 4;  // of columns that one product takes
constexpr int TILE = 32, HALVES = TILE / 16;  // tokens; a product takes 16
constexpr int KEY_FIELDS = 8 / KEY_BITS, VALUE_FIELDS = 8 / VALUE_BITS;  // codes of a byte
constexpr int KEY_WORDS = KEY_DIM / KEY_FIELDS / 4, VALUE_WORDS = VALUE_DIM / VALUE_FIELDS / 4;  // of a row
constexpr int KEY_GROUPS = KEY_DIM / KEY_GROUP, VALUE_GROUPS = VALUE_DIM / VALUE_GROUP;
constexpr int LAST_FIELD = 8 - KEY_BITS;  // its first bit in a byte
constexpr int KEY_CHUNKS = (KEY_WORDS + 3) / 4, VALUE_CHUNKS = (VALUE_WORDS + 7) / 8;
constexpr int KEY_PLANES = (KEY_FINE + 63) / 64, VALUE_PLANES = (VALUE_FINE + 63) / 64;  // of 64 third bits
constexpr int CODE_SUMS = 2 * VALUE_FIELDS * VALUE_CHUNKS, SUMS = CODE_SUMS + 4 * VALUE_PLANES;  // products that a column takes
constexpr int FIRST_KEY_FINE = KEY_DIM - KEY_FINE, FIRST_VALUE_FINE = VALUE_DIM - VALUE_FINE;
constexpr int PREPARED = KEY_CHUNKS * 16 * KEY_FIELDS + KEY_PLANES * 64;  // numbers of a prepared column
constexpr int COLUMN = PREPARED * 2;  // its bytes: an upper and a lower one a number
constexpr unsigned ALL = 0xffffffffu;
constexpr float LOG2E = 1.44269504088896341f, LOWEST = -1e30f;
#define MINUS_INFINITY __int_as_float(0xff800000)

#if HALF
typedef unsigned short Metadata;
#else
typedef float Metadata;
#endif
#if TYPE == 0
typedef float Element;
#else
typedef unsigned short Element;
#endif

// ---- bytes of a page, and of a tile of it in shared memory -----------------------------------------------------------------

constexpr int KEY_ROW = 4 * KEY_WORDS, VALUE_ROW = 4 * VALUE_WORDS;  // bytes of codes, and of third bits
constexpr int KEY_THIRD_ROW = KEY_FINE / 8, VALUE_THIRD_ROW = VALUE_FINE / 8;
constexpr int KEY_NUMBERS = KEY_GROUPS * sizeof(Metadata), VALUE_NUMBERS = VALUE_GROUPS * sizeof(Metadata);  // of a token's scales
constexpr int KINDS = SYMMETRIC ? 1 : 2;  // of numbers: scales, and offsets if there are any
constexpr int VALUE = TILE * KEY_ROW, KEY_SCALE = VALUE + TILE * VALUE_ROW, VALUE_SCALE = KEY_SCALE + KINDS * TILE * KEY_NUMBERS;
constexpr int KEY_THIRD = VALUE_SCALE + KINDS * TILE * VALUE_NUMBERS, VALUE_THIRD = KEY_THIRD + TILE * KEY_THIRD_ROW;
constexpr int STAGE = VALUE_THIRD + TILE * VALUE_THIRD_ROW;
// A row that does not fill its chunk is read a little beyond its end, where a query of zeros or no output belongs.
constexpr int MARGIN = 64;
constexpr int ROOM = 48 * 1024 - MARGIN;  // what a block gets without asking for more
constexpr int THREADS = 32 * WARPS;
constexpr int COMPARERS = 4, WINDOW = THREADS / COMPARERS;  // threads for an exact key, and exact tokens of a block
constexpr int STAGES = ROOM / WARPS / STAGE >= 4 ? 4 : ROOM / WARPS / STAGE;
constexpr int RING = STAGES * STAGE, MERGED = (COLUMNS * (VALUE_DIM + 2)) * sizeof(float);
constexpr int SHARED = WARPS * (RING > MERGED ? RING : MERGED) + MARGIN;
// Blocks that a multiprocessor should hold, as far as their registers go.
constexpr bool NARROW = VALUE_CHUNKS == 1 && KEY_CHUNKS < 3 && KEY_GROUPS * VALUE_GROUPS == 1;
constexpr int BLOCKS = NARROW ? (SETS == 1 ? 4 : 3) - (VALUE_PLANES > 0) : 2;
static_assert(STAGES >= 2 && SHARED <= ROOM + MARGIN, "too large");

// ---- instructions ----------------------------------------------------------------------------------------------------------

__device__ float from_half(unsigned bits) {
  float x;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(bits));
  return x;
}

__device__ unsigned half_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ float element(Element x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return from_half(x);
#else
  return __uint_as_float(unsigned(x) << 16);
#endif
}

// COUNT elements, a multiple of 4, from an address that divides by the bytes of four.
template <int COUNT>
__device__ void load(float (&x)[COUNT], const Element* from) {
  #pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
#if TYPE == 0
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
#else
    const uint2 pairs = *reinterpret_cast<const uint2*>(from + i);
    x[i] = element(pairs.x & 0xffff), x[i + 1] = element(pairs.x >> 16);
    x[i + 2] = element(pairs.y & 0xffff), x[i + 3] = element(pairs.y >> 16);
#endif
  }
}

__device__ Element rounded(float x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return half_pair(x, 0.0f);
#else
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
  return pair;
#endif
}

// d += a b for float16 codes a [16, 16] and b [16, 8], as lanes hold them.
__device__ void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d += a b for 8-bit codes a [16, 32] and signed b [32, 8].
__device__ void multiply(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for a [16, 16].
__device__ void multiply(int (&d)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Transpose the 8 x 8 matrix of 16-bit numbers of which every lane holds a pair.
__device__ unsigned transpose(unsigned pair) {
  unsigned x;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(pair));
  return x;
}

// A number that the compiler must keep: it would rather compute again what it can, for every tile.
__device__ unsigned kept(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Addresses in shared memory are 32-bit numbers.
__device__ void copy_async(unsigned to, Address from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ unsigned read_word(unsigned from) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}

__device__ uint2 read_two(unsigned from) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from));
  return x;
}

__device__ uint4 read_four(unsigned from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}

__device__ unsigned read_half(unsigned from) {
  unsigned x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}

__device__ float read_number(unsigned from, unsigned index) {  // scale or offset
#if HALF
  float x;
  asm volatile("{ .reg .b16 h; ld.shared.b16 h, [%1]; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(from + 2 * index));
  return x;
#else
  return __uint_as_float(read_word(from + 4 * index));
#endif
}

// An early launch: see `Launcher` in cuda.py. Before they wait, `attend` and `finish` may also read what kernels before the
// one before them wrote, because each of these three lets the next start only after it has waited itself.
__device__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

__device__ float soft_capped(float score, float cap) {  // both times log2(e)
#if SOFT_CAP
  float x = exp2_of(2.0f * LOG2E * score / cap);
  return cap * (1.0f - 2.0f / (1.0f + x));
#else
  return score;
#endif
}

// ---- where a code belongs --------------------------------------------------------------------------------------------------

// The channel of the code in `field` of byte `byte` of 32-bit word `word` of a row of DIM channels.
template <int DIM, int FIELDS>
__host__ __device__ constexpr int channel(int word, int byte, int field) {
  return STRIDED ? field * (DIM / FIELDS) + 4 * word + byte : 4 * FIELDS * word + FIELDS * byte + field;
}

__host__ __device__ constexpr int key_channel(int word, int byte, int field) { return channel<KEY_DIM, KEY_FIELDS>(word, byte, field); }

__host__ __device__ constexpr int value_channel(int word, int byte, int field) {
  return channel<VALUE_DIM, VALUE_FIELDS>(word, byte, field);
}

// The word of a key that lane group `part` of four reads for a chunk; later chunks are of third bits. Neighbouring words allow wide
// reads; where words differ in their group of channels, a chunk should have few groups.
__host__ __device__ constexpr int key_word(int chunk, int part) {
  return chunk >= KEY_CHUNKS || (KEY_GROUPS > 1 && !STRIDED) ? 4 * chunk + part : KEY_CHUNKS * part + chunk;
}

__host__ __device__ constexpr int key_group(int word, int field) { return key_channel(word, 0, field) / KEY_GROUP; }
__host__ __device__ constexpr int value_group(int word, int field) { return value_channel(word, 0, field) / VALUE_GROUP; }

// The channel of the third bit that `compare` has at bit `field + 1` of byte `byte`, of a unit of 16.
__host__ __device__ constexpr int fine_channel(int unit, int byte, int field) {
  return FIRST_KEY_FINE + 16 * unit + byte % 2 * 8 + byte / 2 * 4 + field;
}

// The zero of a format without offsets: the middle of its levels.
__host__ __device__ constexpr float middle(int bits, bool fine) { return fine ? 1.75f : 0.5f * ((1 << bits) - 1); }

// How many of the four words of a chunk have this group in this field; and below, how many of its eight words of values.
__host__ __device__ constexpr int key_members(int chunk, int field, int group) {
  int members = 0;
  for (int part = 0; part < 4; part++) members += key_group(key_word(chunk, part), field) == group;
  return members;
}

__host__ __device__ constexpr int value_members(int chunk, int field, int group) {
  int members = 0;
  for (int row = 0; row < 8; row++) members += value_group(8 * chunk + row, field) == group;
  return members;
}

__device__ constexpr unsigned byte_mask(int field) { return 0x01010101u * ((1 << KEY_BITS) - 1) << KEY_BITS * field; }
__device__ constexpr unsigned half_mask(int field) { return 0x00010001u * ((1 << VALUE_BITS) - 1) << VALUE_BITS * field; }

// Byte `byte` of two words, each at the bottom of one half of the result; the other bytes are not cleared.
template <int BYTE>
__device__ unsigned bytes_of(unsigned low, unsigned high) {
  return __byte_perm(low, high, BYTE * 0x0011 + (BYTE + 4) * 0x1100);
}

// ---- the query in the frame of the codes -----------------------------------------------------------------------------------

// What `attend` needs of a column beside its numbers.
struct Header {
  float unit;               // score = unit * scale * (the integer product) + ...
  float bias;               // of every packed score: keys are stored without their mean
  float sums[KEY_GROUPS];   // ... + offset * sum: the query summed over a group, times the scale of scores
};

// Queries or results [B, H_q, T, D]: column c of KV head h is token c % T of query head h * group + c / T.
struct Strides {
  Count row, head, token;  // elements from one to the next

  __device__ Count at(Count batch, int kv_head, int columns, int tokens, int column) const {
    if (tokens == 1) return batch * row + Count(kv_head * columns + column) * head;  // saves divisions
    return batch * row + (kv_head * (columns / tokens) + column / tokens) * head + column % tokens * token;
  }
};

// query [B, H_q, tokens, D], matrix [H, D, D] with restored = stored @ matrix, mean [H, D] or null.
// prepared int8 [B, H, padded, 2, PREPARED], upper and lower bytes, and headers [B, H, padded], where padded is a multiple of
// COLUMNS. Channels are in the order of words, fields and bytes, so that a lane of `attend` reads 4 KEY_FIELDS bytes a word.
extern "C" __global__ void __launch_bounds__(1024) prepare(
    const Element* query, Count row_stride, Count head_stride, Count token_stride, Count columns, Count tokens, const float* matrix,
    const float* mean, double scale, signed char* prepared, Header* headers) {
  constexpr int D = KEY_DIM, EACH = (D + 31) / 32, WARPS_OF_BLOCK = 32, ROWS = (D + 31) / 32;
  __shared__ float given[COLUMNS][D], turned[COLUMNS][D], largest[32];
  const int head = blockIdx.x, heads = gridDim.x, tile = blockIdx.y, tiles = gridDim.y, batch = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = tile * COLUMNS;
  const Count row = Count(batch) * heads + head;
  const Strides strides = {row_stride, head_stride, token_stride};
  const float* rows = matrix + Count(head) * D * D;
  // The matrix is on its way while the query is computed.
  float numbers[ROWS][EACH];
  #pragma unroll
  for (int r = 0; r < ROWS; r++)
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int j = r * WARPS_OF_BLOCK + warp, i = e * 32 + lane;
      numbers[r][e] = j < D && i < D ? rows[j * D + i] : 0.0f;
    }
  wait_for_previous();
  // Not earlier: `attend` reads the exact tokens before it waits, and the kernel before this one may have written the last of them.
  let_next_start();
  for (int i = threadIdx.x; i < COLUMNS * D; i += blockDim.x) {
    const int column = first + i / D;
    given[i / D][i % D] = column < columns ? element(query[strides.at(batch, head, columns, tokens, column) + i % D]) : 0.0f;
  }
  __syncthreads();
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int j = r * WARPS_OF_BLOCK + warp;
    float sums[COLUMNS] = {};
    #pragma unroll
    for (int e = 0; e < EACH; e++)
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++) sums[c] += e * 32 + lane < D ? numbers[r][e] * given[c][e * 32 + lane] : 0.0f;
    // Sum over lanes. Each step also halves the columns that a lane holds, until lane l has the column l % COLUMNS.
    #pragma unroll
    for (int step = COLUMNS / 2; step; step /= 2)
      #pragma unroll
      for (int c = 0; c < step; c++) {
        const bool upper = lane & step;
        const float sent = upper ? sums[c] : sums[c + step];
        sums[c] = (upper ? sums[c + step] : sums[c]) + __shfl_xor_sync(ALL, sent, step);
      }
    #pragma unroll
    for (int step = COLUMNS; step < 32; step *= 2) sums[0] += __shfl_xor_sync(ALL, sums[0], step);
    if (lane < COLUMNS && j < D) turned[lane][j] = sums[0];
  }
  __syncthreads();
  float top = 0.0f;
  for (int i = threadIdx.x; i < COLUMNS * D; i += blockDim.x) top = fmaxf(top, fabsf(turned[i / D][i % D]));
  for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
  if (!lane) largest[warp] = top;
  __syncthreads();
  for (int w = 0; w < WARPS_OF_BLOCK; w++) top = fmaxf(top, largest[w]);
  // All columns share a unit. The upper byte is rounded, so that the lower one may have a sign.
  const float unit = fmaxf(top, 1e-30f) / 32512.0f;
  for (int c = warp; c < COLUMNS; c += WARPS_OF_BLOCK) {
    const Count at = (row * tiles + tile) * COLUMNS + c;
    signed char* to = prepared + at * COLUMN;
    float sums[KEY_GROUPS] = {}, bias = 0.0f;
    for (int i = lane; i < PREPARED; i += 32) {
      const int word = i / (4 * KEY_FIELDS), unit_of = word - 4 * KEY_CHUNKS;  // of third bits
      const bool third = KEY_FINE && unit_of >= 0, exists = third ? 16 * unit_of < KEY_FINE : word < KEY_WORDS;
      const int ch = third ? fine_channel(unit_of, i % 4, i / 4 % 4) : key_channel(word, i % 4, i / 4 % KEY_FIELDS);
      const int x = exists ? __float2int_rn(turned[c][ch] / unit) : 0;
      const int high = (x + 128) >> 8;
      to[i] = high, to[PREPARED + i] = x - 256 * high;
      const float part = SYMMETRIC ? x * middle(KEY_BITS, ch >= FIRST_KEY_FINE) : x;
      #pragma unroll
      for (int g = 0; g < KEY_GROUPS; g++)
        if (exists && !third && ch / KEY_GROUP == g) sums[g] += part;
    }
    if (mean)
      for (int i = lane; i < D; i += 32) bias += given[c][i] * mean[head * D + i];
    #pragma unroll
    for (int step = 16; step; step /= 2) {
      bias += __shfl_xor_sync(ALL, bias, step);
      #pragma unroll
      for (int g = 0; g < KEY_GROUPS; g++) sums[g] += __shfl_xor_sync(ALL, sums[g], step);
    }
    if (!lane) {
      const float scaled = unit * float(scale) * LOG2E;
      headers[at].unit = scaled / (1 << LAST_FIELD);
      headers[at].bias = bias * float(scale) * LOG2E;
      for (int g = 0; g < KEY_GROUPS; g++) headers[at].sums[g] = sums[g] * scaled;
    }
  }
}

// ---- packed tokens ---------------------------------------------------------------------------------------------------------

struct Tables {  // [B, key_pages] and [B, value_pages] addresses of pages, less a base
  const Address *key, *value;
  Address key_base, value_base;
  Count key_pages, value_pages;
};

// Where a warp is in the pages of its row, and what each lane copies from there.
struct Cursor {
  static constexpr int KEY_PIECES = TILE * KEY_NUMBERS / 16, VALUE_PIECES = TILE * VALUE_NUMBERS / 16;  // of scales: 16 bytes
  static constexpr int PIECES = KINDS * (KEY_PIECES + VALUE_PIECES), ROUNDS = (PIECES + 31) / 32;

  const Address *keys, *values;
  Address key_base, value_base;
  int head, heads, lane;
  int pages;  // that there are
  int left;   // tiles in this page
  Address key, value, key_third, value_third, numbers[ROUNDS];
  Address next_key, next_value;  // of the next page: read ahead, because nothing can be copied before they are known

  // Go to a tile.
  __device__ void turn(int tile) {
    constexpr int TILES = PAGE / TILE;
    const int page = tile / TILES, token = tile % TILES * TILE;
    left = TILES - tile % TILES;
    const Address this_key = key_base + next_key, this_value = value_base + next_value;
    if (page + 1 < pages) next_key = keys[page + 1], next_value = values[page + 1];
    const Count rows = Count(heads) * PAGE, row = Count(head) * PAGE + token;
    key = this_key + row * KEY_ROW + lane * 16;
    value = this_value + row * VALUE_ROW + lane * 16;
    // Sections follow each other: codes, third bits, scales and offsets.
    key_third = this_key + rows * KEY_ROW + row * KEY_THIRD_ROW + lane * 16;
    value_third = this_value + rows * VALUE_ROW + row * VALUE_THIRD_ROW + lane * 16;
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      // Scales of keys and their offsets, which follow all scales of the page, and then those of values.
      const int piece = i * 32 + lane;
      const bool of_keys = piece < KINDS * KEY_PIECES;
      const int index = of_keys ? piece : piece - KINDS * KEY_PIECES, count = of_keys ? KEY_PIECES : VALUE_PIECES;
      const Count width = of_keys ? KEY_NUMBERS : VALUE_NUMBERS;
      const Count codes = of_keys ? KEY_ROW + KEY_THIRD_ROW : VALUE_ROW + VALUE_THIRD_ROW;
      numbers[i] = (of_keys ? this_key : this_value) + rows * codes + row * width +
                   (index < count ? index * 16 : rows * width + (index - count) * 16);
    }
  }

  // Start copying the next tile to this address in shared memory.
  __device__ void fetch(int tile, unsigned stage) {
    if (!left) turn(tile);
    left--;
    copy_rows<KEY_ROW>(stage, key);
    copy_rows<VALUE_ROW>(stage + VALUE, value);
    key += TILE * KEY_ROW, value += TILE * VALUE_ROW;
    copy_rows<KEY_THIRD_ROW>(stage + KEY_THIRD, key_third);
    copy_rows<VALUE_THIRD_ROW>(stage + VALUE_THIRD, value_third);
    key_third += TILE * KEY_THIRD_ROW, value_third += TILE * VALUE_THIRD_ROW;
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const int piece = i * 32 + lane;
      if (PIECES % 32 == 0 || piece < PIECES) copy_async(stage + KEY_SCALE + piece * 16, numbers[i]);
      numbers[i] += TILE * (piece < KINDS * KEY_PIECES ? KEY_NUMBERS : VALUE_NUMBERS);
    }
  }

  template <int ROW>
  __device__ void copy_rows(unsigned to, Address from) {
    constexpr int PIECES = TILE * ROW / 16;
    #pragma unroll
    for (int i = 0; i < PIECES; i += 32)
      if (i + 32 <= PIECES || i + lane < PIECES) copy_async(to + (i + lane) * 16, from + i * 16);
  }
};

// The columns of a lane are `part` of every set, and its rows of a product are `row` and `row + 8`.
struct State {
  float top[SETS];                                  // what scores are compared with
  float sum[SETS];                                  // of weights, this lane's rows
  float offsets[VALUE_GROUPS][SETS];                // what the values' offsets add to the output
  float output[SETS][SUMS][4];                      // per field and pair of bytes, and pair of third bits, as products come out
};

// A row of a product is a token of its half in this order, which makes the reads of values free of bank conflicts.
__device__ constexpr int token_of(int row) { return (row & 8) + (row & 7) / 2 + (row & 1) * 4; }

// Where a lane reads in a stage, so that it is not computed for each.
struct Place {
  int lane, row, part, token;
  unsigned key, key_number, key_third, value, value_number, value_third;

  __device__ Place() {
    lane = kept(threadIdx.x % 32);
    row = lane / 4, part = lane % 4, token = token_of(row);
    key = kept(token * KEY_ROW + 4 * key_word(0, part)), value = kept(VALUE + part * VALUE_ROW + 4 * row);
    key_number = kept(KEY_SCALE + token * KEY_NUMBERS), value_number = kept(VALUE_SCALE + token * VALUE_NUMBERS);
    key_third = KEY_THIRD + token * KEY_THIRD_ROW + 2 * part, value_third = VALUE_THIRD + part * VALUE_THIRD_ROW + row / 2 * 2;
  }
};

// The words of a lane in a key's row.
__device__ void read_words(unsigned (&words)[KEY_CHUNKS], unsigned from) {
  if constexpr (KEY_WORDS == 8 && (KEY_GROUPS == 1 || STRIDED)) {
    const uint2 two = read_two(from);
    words[0] = two.x, words[1] = two.y;
  } else if constexpr (KEY_WORDS == 16 && (KEY_GROUPS == 1 || STRIDED)) {
    const uint4 four = read_four(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else {
    #pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) words[chunk] = read_word(from + 4 * key_word(chunk, 0));
  }
}

struct Query {  // what a lane needs of it
  // For products: column lane / 4 of a set, of which even ones are upper bytes.
  unsigned words[SETS][KEY_CHUNKS + KEY_PLANES][4];
  float sums[KEY_GROUPS][SETS], unit, cap;
  float biases[SETS];  // of scores before they are capped
};

// Scores of a half, less `top`, for two rows of each set.
__device__ void compare(
    float (&scores)[SETS][2], unsigned stage, int half, const Place& place, const Query& query, const float (&top)[SETS]) {
  unsigned keys[2][KEY_CHUNKS];
  #pragma unroll
  for (int r = 0; r < 2; r++) read_words(keys[r], stage + place.key + (16 * half + 8 * r) * KEY_ROW);
  #pragma unroll
  for (int group = 0; group < KEY_GROUPS; group++) {
    int products[SETS][4][4] = {};  // by field, of which there are KEY_FIELDS
    #pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk += 2)
      #pragma unroll
      for (int field = 0; field < KEY_FIELDS; field++) {
        constexpr bool ODD = KEY_CHUNKS % 2;
        const bool alone = ODD && chunk + 1 == KEY_CHUNKS;
        const int next = alone ? chunk : chunk + 1;
        const int members = key_members(chunk, field, group), others = alone ? members : key_members(next, field, group);
        if (!members && !others) continue;
        const unsigned mask = byte_mask(field);
        #pragma unroll
        for (int set = 0; set < SETS; set++) {
          unsigned b0 = query.words[set][chunk][field], b1 = query.words[set][next][field];
          if (members < 4 && key_group(key_word(chunk, place.part), field) != group) b0 = 0;
          if (others < 4 && key_group(key_word(next, place.part), field) != group) b1 = 0;
          if (alone)
            multiply(products[set][field], keys[0][chunk] & mask, keys[1][chunk] & mask, b0);
          else
            multiply(products[set][field], keys[0][chunk] & mask, keys[1][chunk] & mask, keys[0][next] & mask,
                     keys[1][next] & mask, b0, b1);
        }
      }
    // Half of a code in field f is bit 2f - 1: third bits are moved to bits 1, 3 and 5 of four bytes.
    #pragma unroll
    for (int plane = 0; plane < KEY_PLANES; plane++) {
      unsigned bits[2];
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const unsigned unit = read_half(stage + place.key_third + (16 * half + 8 * r) * KEY_THIRD_ROW + 8 * plane);
        bits[r] = unit << 1 | unit >> 4 << 17;
      }
      const bool counts = fine_channel(4 * plane + place.part, 0, 0) / KEY_GROUP == group;
      #pragma unroll
      for (int set = 0; set < SETS; set++) {
        unsigned b[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) b[i] = counts || KEY_GROUPS == 1 ? query.words[set][KEY_CHUNKS + plane][i] : 0;
        multiply(products[set][1], bits[0] & 0x02020202, bits[1] & 0x02020202, b[0]);
        multiply(products[set][2], bits[0] << 1 & 0x08080808, bits[1] << 1 & 0x08080808, bits[0] & 0x08080808,
                 bits[1] & 0x08080808, b[1], b[2]);
        multiply(products[set][3], bits[0] << 1 & 0x20202020, bits[1] << 1 & 0x20202020, b[3]);
      }
    }
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const unsigned at = stage + place.key_number + (16 * half + 8 * r) * KEY_NUMBERS;
      float scale = read_number(at, group), offset = SYMMETRIC ? 1.0f : read_number(at + TILE * KEY_NUMBERS, group);
      if (!MINIMUM) offset *= -scale;
      scale *= query.unit;
      #pragma unroll
      for (int set = 0; set < SETS; set++) {
        // 2^LAST_FIELD times the product, whose upper and lower bytes are neighbours. At most 127 * 256 * 256 times the largest
        // level and 2^LAST_FIELD: 3.5 * 64, 15 * 16 or 255, which fits.
        int product = 0;
        #pragma unroll
        for (int field = 0; field < KEY_FIELDS; field++) {
          const int(&of)[4] = products[set][field];
          product += (of[2 * r] * 256 + of[2 * r + 1]) * (1 << LAST_FIELD >> KEY_BITS * field);
        }
        // Before it is capped, a score is not compared with anything.
        const float base = group ? scores[set][r] : SOFT_CAP ? query.biases[set] : -top[set];
        scores[set][r] = scale * float(product) + (offset * query.sums[group][set] + base);
      }
    }
  }
  if (SOFT_CAP)
    #pragma unroll
    for (int set = 0; set < SETS; set++)
      #pragma unroll
      for (int r = 0; r < 2; r++) scores[set][r] = soft_capped(scores[set][r], query.cap) - top[set];
}

struct Values {  // scales and offsets of the values of a half
  float scales[VALUE_GROUPS][2], offsets[VALUE_GROUPS][2];
};

typedef float Scores[HALVES][SETS][2];

// Move `top` so that scaled weights of a tile are at most 2^8, and recompute the weights. After the first tile it only rises.
__device__ void raise(State& state, const Scores& scores, Scores& weights, const Values (&values)[HALVES], bool first) {
  #pragma unroll
  for (int set = 0; set < SETS; set++) {
    float top = LOWEST;
    #pragma unroll
    for (int half = 0; half < HALVES; half++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        float scale = 0x1p-40f;
        #pragma unroll
        for (int group = 0; group < VALUE_GROUPS; group++) scale = fmaxf(scale, values[half].scales[group][r]);
        top = fmaxf(top, scores[half][set][r] + __log2f(scale) - 8.0f);
      }
    #pragma unroll
    for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    // Before the first tile there are only zeros. Times the infinity of a first tile of very low scores they would be NaN.
    const float rise = first ? top : fmaxf(top, 0.0f), factor = first ? 1.0f : exp2_of(-rise);
    state.top[set] += rise, state.sum[set] *= factor;
    #pragma unroll
    for (int group = 0; group < VALUE_GROUPS; group++) state.offsets[group][set] *= factor;
    #pragma unroll
    for (int sum = 0; sum < SUMS; sum++)
      #pragma unroll
      for (int i = 0; i < 4; i++) state.output[set][sum][i] *= factor;
    #pragma unroll
    for (int half = 0; half < HALVES; half++)
      #pragma unroll
      for (int r = 0; r < 2; r++) weights[half][set][r] = exp2_of(scores[half][set][r] - rise);
  }
}

// Whether scaled weights leave what float16 holds. Where a scale may be 0, a weight alone might leave what float32 holds.
__device__ bool too_large(const Scores& weights, const Values (&values)[HALVES]) {
  float largest = 0.0f;
  #pragma unroll
  for (int half = 0; half < HALVES; half++)
    #pragma unroll
    for (int set = 0; set < SETS; set++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        if (HALF) largest = fmaxf(largest, weights[half][set][r] * 0x1p-40f);
        #pragma unroll
        for (int group = 0; group < VALUE_GROUPS; group++)
          largest = fmaxf(largest, weights[half][set][r] * values[half].scales[group][r]);
      }
  return largest > 32768.0f;
}

// Add a half's weighted values to the output. Two tokens' codes of a channel become a pair by taking a byte of each.
__device__ void accumulate(
    State& state, unsigned stage, const float (&weights)[SETS][2], const Values& values, int half, const Place& place) {
  unsigned pairs[VALUE_GROUPS][SETS][2];
  #pragma unroll
  for (int set = 0; set < SETS; set++) {
    state.sum[set] += weights[set][0] + weights[set][1];
    #pragma unroll
    for (int group = 0; group < VALUE_GROUPS; group++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const float scaled = weights[set][r] * values.scales[group][r];
        state.offsets[group][set] += weights[set][r] * values.offsets[group][r];
        const float rest = scaled - from_half(half_pair(scaled, 0.0f) & 0xffff);
        pairs[group][set][r] = transpose(half_pair(scaled, rest));
      }
  }
  #pragma unroll
  for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++) {
    unsigned words[4];
    #pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = read_word(stage + place.value + (16 * half + 4 * i) * VALUE_ROW + 32 * chunk);
    #pragma unroll
    for (int field = 0; field < VALUE_FIELDS; field++)
      #pragma unroll
      for (int group = 0; group < VALUE_GROUPS; group++) {
        const int members = value_members(chunk, field, group);
        if (!members) continue;
        unsigned mask = half_mask(field);
        if (members < 8 && value_group(8 * chunk + place.row, field) != group) mask = 0;
        #pragma unroll
        for (int set = 0; set < SETS; set++) {
          float(*sums)[4] = state.output[set] + 2 * (VALUE_FIELDS * chunk + field);
          const unsigned b0 = pairs[group][set][0], b1 = pairs[group][set][1];
          multiply(sums[0], bytes_of<0>(words[0], words[1]) & mask, bytes_of<1>(words[0], words[1]) & mask,
                   bytes_of<0>(words[2], words[3]) & mask, bytes_of<1>(words[2], words[3]) & mask, b0, b1);
          multiply(sums[1], bytes_of<2>(words[0], words[1]) & mask, bytes_of<3>(words[0], words[1]) & mask,
                   bytes_of<2>(words[2], words[3]) & mask, bytes_of<3>(words[2], words[3]) & mask, b0, b1);
        }
      }
  }
  // A byte, one of two that are read, has the third bits of eight channels, each of which is a float16 as well.
  #pragma unroll
  for (int plane = 0; plane < VALUE_PLANES; plane++) {
    unsigned twos[4];
    #pragma unroll
    for (int i = 0; i < 4; i++)
      twos[i] = read_half(stage + place.value_third + (16 * half + 4 * i) * VALUE_THIRD_ROW + 8 * plane);
    const unsigned bytes[2] = {(twos[0] | twos[1] << 16) >> place.row % 2 * 8, (twos[2] | twos[3] << 16) >> place.row % 2 * 8};
    #pragma unroll
    for (int group = 0; group < VALUE_GROUPS; group++) {
      const int of = (FIRST_VALUE_FINE + 64 * plane + 8 * place.row) / VALUE_GROUP;
      const unsigned low = VALUE_GROUPS == 1 || of == group ? bytes[0] : 0, high = VALUE_GROUPS == 1 || of == group ? bytes[1] : 0;
      #pragma unroll
      for (int bit = 0; bit < 8; bit += 2) {
        const unsigned even = 0x00010001u << bit, odd = 0x00020002u << bit;
        #pragma unroll
        for (int set = 0; set < SETS; set++)
          multiply(state.output[set][CODE_SUMS + 4 * plane + bit / 2], low & even, low & odd, high & even, high & odd,
                   pairs[group][set][0], pairs[group][set][1]);
      }
    }
  }
}

// Which packed tokens of a request the queries read: those from `start` to `end`, of which query number i of `tokens` does not
// read the last `tokens` - 1 - i; but all read those before `floor`, unless they are later tokens: `exact` ones follow the `end`.
struct Range {
  int start, floor, end, exact, tokens, column;  // column: the block's first one

  __device__ int end_of(int c) const {
    const int later = tokens - 1 - (column + c) % tokens;
    return min(max(floor, end - later), end + exact - later);
  }
};

// Add a tile, whose first token is number `from`.
__device__ void process(
    State& state, unsigned stage, int from, const Range& range, const Query& query, const Place& place, bool first) {
  Scores scores, weights;
  Values values[HALVES];
  #pragma unroll
  for (int half = 0; half < HALVES; half++) {
    compare(scores[half], stage, half, place, query, state.top);
    #pragma unroll
    for (int group = 0; group < VALUE_GROUPS; group++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const unsigned at = stage + place.value_number + (16 * half + 8 * r) * VALUE_NUMBERS;
        float scale = read_number(at, group), offset = SYMMETRIC ? 1.0f : read_number(at + TILE * VALUE_NUMBERS, group);
        if (!MINIMUM) offset *= -scale;
        values[half].scales[group][r] = scale, values[half].offsets[group][r] = offset;
      }
  }
  if (range.floor - range.tokens < from + TILE || range.start > from)  // the last tiles, or the first: what lies beyond may be anything, even NaN
    #pragma unroll
    for (int half = 0; half < HALVES; half++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int token = from + 16 * half + place.token + 8 * r;
        #pragma unroll
        for (int set = 0; set < SETS; set++)
          if (token < range.start || token >= range.end_of(4 * set + place.part)) scores[half][set][r] = MINUS_INFINITY;
        if (token < range.start || token >= range.end)
          #pragma unroll
          for (int group = 0; group < VALUE_GROUPS; group++)
            values[half].scales[group][r] = values[half].offsets[group][r] = 0.0f;
      }
  #pragma unroll
  for (int half = 0; half < HALVES; half++)
    #pragma unroll
    for (int set = 0; set < SETS; set++)
      #pragma unroll
      for (int r = 0; r < 2; r++) weights[half][set][r] = exp2_of(scores[half][set][r]);
  // `top` need not be the maximum. It is raised when a weight leaves the range of float16, which is seldom: a rise leaves room
  // for a factor of 2^7 until the next.
  if (__any_sync(ALL, first || too_large(weights, values))) raise(state, scores, weights, values, first);
  #pragma unroll
  for (int half = 0; half < HALVES; half++) accumulate(state, stage, weights[half], values[half], half, place);
}
