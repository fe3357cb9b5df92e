// Attention of a few new tokens over pages of latents (MLA): three kernels, in the order `scale_queries`, `attend_latents`,
// `merge_latents`. Before and after them, products of matrices take queries to the frame of the codes, and outputs back.
//
// The definition is rotationzoo/codec/attention.py, with keys and values as rotationzoo/vllm/latents.py defines them. All query heads
// read one head: its key is the latent with the exact key with RoPE behind it, and its value is the latent. So a block reads a page of
// codes once for COLUMNS columns, which are query heads times query tokens, and uses the codes twice, for scores and for outputs.
//
// Nothing is dequantized. With x = scale * code + offset * middle, where a middle belongs to a channel,
//     q . x = scale * (q . codes) + offset * (q . middles)   and
//     sum_t p_t x_t = sum_t (p_t * scale_t) codes_t + (sum_t p_t * offset_t) * middles.
// A piece is what one mask leaves of the four bytes of a word: codes of four channels, or parts of them. Each byte is a float16, a
// subnormal one, piece * 2^-24, which tensor cores multiply exactly. Queries come in the order of pieces, times what these count.
//
// Work is split over tokens (flash-decoding). Warps share a page of 64 tokens: for products with codes, each takes some pieces and 16
// columns; for what becomes of their sums, some tokens and some columns; and for outputs, some pieces of all columns. Each block writes
// a maximum, a sum of weights and a mean; `merge_latents` merges them.
//
// Compile with -D: RANK (channels of a latent: 128, 256 or 512), ROPE (channels of the exact key, a multiple of 16), COLUMNS (16 or 32),
// TYPE (1 float16, 2 bfloat16), PIECES (of a row, so many that warps have equally many pairs of eight), ROOM (bytes of a row in
// shared memory), and of the format HALF, MINIMUM and SEGMENTS, as in attention.cu. Needs sm_80 or newer.

#include "launches.cu"
#include "segment_rows.cu"
#include "tensor_cores.cu"
#include "latent_pages.cu"

constexpr int WARPS = RANK / 64 * (COLUMNS / 16), THREADS = 32 * WARPS;
constexpr int SETS = COLUMNS / 8;      // of columns that one product takes
constexpr int ACROSS = SETS < WARPS / 2 ? SETS : WARPS / 2, DOWN = WARPS / ACROSS;  // warps that share columns, and tokens, of scores
constexpr int ROWS = TILE / 16 / DOWN, OWN = SETS / ACROSS;                         // products of a warp: by 16 tokens, and sets
constexpr int PAIRS = SETS / 2, PARTS = WARPS / PAIRS;                              // of sets; and of pieces, for each pair
constexpr int STEPS = PIECES / 4 / PARTS;                                           // of a part, of four pieces each
constexpr int TURNED = 4 * PIECES;                                                  // numbers of a turned query
constexpr int EIGHTS = PIECES / 8 / WARPS;                                          // groups of eight pieces of a warp, for outputs
constexpr int COPIED = RANK / WARPS;                                                // channels of exact rows of a warp, for outputs
constexpr int PRODUCTS = EIGHTS * 2 < COPIED / 16 ? COPIED / 16 : EIGHTS * 2;       // 16 channels each
static_assert(PIECES % (8 * WARPS) == 0, "warps have equally many pieces");

// Rows in shared memory have some bytes more, so that lanes which read several rows at once meet other banks.
constexpr int PADDED = 2 * KEY + 16, ROPE_ROW = 2 * ROPE + 16, SUM_ROW = COLUMNS + 8;  // the last one in floats
// A block has pages of codes, sums of products and the exact part of queries; or one page of exact rows, and queries.
constexpr int ROPES = TILE * ROOM, NUMBERS = ROPES + TILE * ROPE_ROW;  // where they begin in a stage
constexpr int STAGE = NUMBERS + (SEGMENTS ? 0 : 2 * TILE * sizeof(Metadata)), STAGES = 2, PARTIAL = STAGES * STAGE;
constexpr int ROPE_QUERIES = PARTIAL + PARTS * TILE * SUM_ROW * 4, EXACT_QUERIES = TILE * PADDED;
constexpr int OF_CODES = ROPE_QUERIES + COLUMNS * ROPE_ROW, OF_COPIES = EXACT_QUERIES + COLUMNS * PADDED;
constexpr int WEIGHT_ROW = COLUMNS + 8;                                     // words with the weights of a pair of tokens
constexpr int WEIGHTS = OF_CODES > OF_COPIES ? OF_CODES : OF_COPIES, SUMS = WEIGHTS + TILE / 2 * WEIGHT_ROW * 4;
constexpr int LIST = SUMS + (2 * DOWN + 1) * COLUMNS * 4, SHARED = LIST + PIECES * 16;
constexpr int BLOCKS = COLUMNS == 16 && TURNED <= RANK ? 2 : 1;               // that a multiprocessor should hold
constexpr int MERGED = RANK + 1;                                            // floats of a column's output, in place of pages and queries
static_assert(COLUMNS * MERGED * 4 <= WEIGHTS && SHARED <= 227 * 1024, "too large");
extern __shared__ uint4 memory[];

__device__ unsigned word_at(const char* from, int index) { return reinterpret_cast<const unsigned*>(from)[index]; }

// Weights as the type of the values: codes are float16.
__device__ unsigned pair_of(float low, float high, bool exact) { return exact ? element_pair(low, high) : half_pair(low, high); }

// A piece: the first byte of its word in a row, the mask, its first channel, whether a piece before it has other bits of the same codes
// (bit 12) and the channels from one byte to the next (from bit 16), and what it counts in its code as a power of two.
typedef int4 Piece;

struct Lane {
  int warp, row, part, across, down, pair, pieces;

  __device__ Lane()
      : warp(threadIdx.x / 32), row(threadIdx.x % 32 / 4), part(threadIdx.x % 4), across(warp % ACROSS), down(warp / ACROSS),
        pair(warp % PAIRS), pieces(warp / PAIRS) {}
  __device__ int token(int m, int r) const { return 16 * (down * ROWS + m) + 8 * r + row; }    // of a page
  __device__ int column(int n, int i) const { return 8 * (across * OWN + n) + 2 * part + i; }  // of the block
};

// What a warp knows of its columns, and of the outputs of its channels.
struct State {
  float top[OWN][2], sum[OWN][2], offsets[OWN][2];  // what scores are compared with, and sums of this lane's tokens
  float output[PRODUCTS][SETS][4];
};

typedef float Scores[ROWS][OWN][4];  // as products come out: rows `row` and `row` + 8, columns 2 `part` and the next

// Start copying a page to a stage in shared memory. Each row has as many threads.
__device__ void fetch(const Tables& tables, Address page, int stage) {
  constexpr int EACH = THREADS / TILE, SCALES = SEGMENTS ? 0 : TILE * sizeof(Metadata) / 16;  // pieces of 16 bytes
  const unsigned to = unsigned(__cvta_generic_to_shared(reinterpret_cast<char*>(memory))) + stage * STAGE;
  const int row = threadIdx.x / EACH, first = threadIdx.x % EACH;
  if (tables.row > tables.bytes) {  // whole pieces, to rows that are further apart
    const unsigned codes = to + row * tables.row;
    const Address from = page + row * tables.bytes;
    for (int i = 16 * first; i < tables.bytes; i += 16 * EACH) copy_async(codes + i, from + i);
  } else {
    for (int i = 16 * threadIdx.x; i < TILE * tables.bytes; i += 16 * THREADS) copy_async(to + i, page + i);
  }
  const unsigned exact = to + ROPES + row * ROPE_ROW;
  const Address from = page + tables.rope + row * 2 * ROPE;
  for (int i = 16 * first; i < 2 * ROPE; i += 16 * EACH) copy_async(exact + i, from + i);
  for (int i = threadIdx.x; i < 2 * SCALES; i += THREADS)
    copy_async(to + NUMBERS + i * 16, page + (i < SCALES ? tables.scales + i * 16 : tables.offsets + (i - SCALES) * 16));
}

// Products of rows of 16-bit numbers and queries, both of COUNT channels and STRIDE bytes in shared memory.
template <int COUNT, int STRIDE>
__device__ void compare_exact(Scores& scores, const char* rows, const char* queries, const Lane& lane) {
  #pragma unroll 4
  for (int step = 0; step < COUNT / 16; step++) {
    const int low = 8 * step + lane.part, high = low + 4;  // words
    unsigned b[OWN][2];
    #pragma unroll
    for (int n = 0; n < OWN; n++) {
      const char* query = queries + (8 * (lane.across * OWN + n) + lane.row) * STRIDE;
      b[n][0] = word_at(query, low), b[n][1] = word_at(query, high);
    }
    #pragma unroll
    for (int m = 0; m < ROWS; m++) {
      const char *upper = rows + lane.token(m, 0) * STRIDE, *lower = rows + lane.token(m, 1) * STRIDE;
      const unsigned a0 = word_at(upper, low), a1 = word_at(lower, low), a2 = word_at(upper, high), a3 = word_at(lower, high);
      #pragma unroll
      for (int n = 0; n < OWN; n++) multiply_exact(scores[m][n], a0, a1, a2, a3, b[n][0], b[n][1]);
    }
  }
}

// COUNT channels of the queries, to shared memory. Columns that there are not are zeros.
template <int COUNT>
__device__ void load_exact(const Element* query, int to, int columns) {
  constexpr int WIDE = COUNT / 8;  // 16 bytes each
  char* shared = reinterpret_cast<char*>(memory) + to;
  for (int i = threadIdx.x; i < COLUMNS * WIDE; i += THREADS) {
    const int c = i / WIDE, piece = i % WIDE;
    uint4 x = {};
    if (c < columns) x = reinterpret_cast<const uint4*>(query + c * KEY)[piece];
    *reinterpret_cast<uint4*>(shared + c * (2 * COUNT + 16) + piece * 16) = x;
  }
}

// What a warp multiplies its pieces by: queries of its 16 columns, in the order of pieces.
typedef unsigned Turned[STEPS][2][2];

__device__ void load_queries(Turned& queries, const unsigned short* turned, int columns, const Lane& lane) {
  #pragma unroll
  for (int n = 0; n < 2; n++) {
    const int column = 16 * lane.pair + 8 * n + lane.row;
    const char* query = reinterpret_cast<const char*>(turned + Count(column) * TURNED);
    #pragma unroll
    for (int step = 0; step < STEPS; step++)
      #pragma unroll
      for (int k = 0; k < 2; k++)
        queries[step][n][k] = column < columns ? word_at(query, 8 * (lane.pieces * STEPS + step) + lane.part + 4 * k) : 0;
  }
}

// Products of a warp's pieces and queries, for all tokens of a page, to shared memory.
__device__ void compare_codes(const Turned& queries, const char* rows, int row, const Lane& lane) {
  char* shared = reinterpret_cast<char*>(memory);
  const Piece* pieces = reinterpret_cast<const Piece*>(shared + LIST) + 4 * lane.pieces * STEPS + lane.part;
  float sums[TILE / 16][2][4] = {};
  #pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int2 piece = *reinterpret_cast<const int2*>(pieces + 4 * step);
    const unsigned mask = piece.y;
    #pragma unroll
    for (int m = 0; m < TILE / 16; m++) {
      const char* upper_row = rows + (16 * m + lane.row) * row + piece.x;
      const unsigned upper = word_at(upper_row, 0), lower = word_at(upper_row + 8 * row, 0);
      #pragma unroll
      for (int n = 0; n < 2; n++)
        multiply(sums[m][n], upper & mask, lower & mask, upper >> 8 & mask, lower >> 8 & mask, queries[step][n][0], queries[step][n][1]);
    }
  }
  float* to = reinterpret_cast<float*>(shared + PARTIAL) + (lane.pieces * TILE + lane.row) * SUM_ROW + 16 * lane.pair + 2 * lane.part;
  #pragma unroll
  for (int m = 0; m < TILE / 16; m++)
    #pragma unroll
    for (int n = 0; n < 2; n++)
      #pragma unroll
      for (int r = 0; r < 2; r++)
        *reinterpret_cast<float2*>(to + (16 * m + 8 * r) * SUM_ROW + 8 * n) = {sums[m][n][2 * r], sums[m][n][2 * r + 1]};
}

// The sums over all pieces, of the tokens and columns of this lane.
__device__ void sum_products(Scores& products, const Lane& lane) {
  const float* partial = reinterpret_cast<const float*>(reinterpret_cast<const char*>(memory) + PARTIAL);
  #pragma unroll
  for (int m = 0; m < ROWS; m++)
    #pragma unroll
    for (int r = 0; r < 2; r++)
      #pragma unroll
      for (int n = 0; n < OWN; n++) {
        const float* from = partial + lane.token(m, r) * SUM_ROW + lane.column(n, 0);
        float2 sum = {};
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
          const float2 x = *reinterpret_cast<const float2*>(from + part * TILE * SUM_ROW);
          sum.x += x.x, sum.y += x.y;
        }
        products[m][n][2 * r] = sum.x, products[m][n][2 * r + 1] = sum.y;
      }
}

// Turn the scores of a page, times log2(e), into weights in shared memory, and return by what the outputs of columns so far are to be
// multiplied: `factors` in shared memory. Weights times scales are at most 2^8; `top` only rises where they would exceed 2^15.
__device__ void weigh(State& state, Scores& scores, const float (&scales)[ROWS][2], const float (&offsets)[ROWS][2], bool first,
                      bool exact, const Lane& lane) {
  char* shared = reinterpret_cast<char*>(memory);
  float *tops = reinterpret_cast<float*>(shared + SUMS), *factors = tops + 2 * DOWN * COLUMNS;
  unsigned* weights = reinterpret_cast<unsigned*>(shared + WEIGHTS);
  #pragma unroll
  for (int n = 0; n < OWN; n++)
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = LOWEST;
      #pragma unroll
      for (int m = 0; m < ROWS; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++)
          top = fmaxf(top, scores[m][n][2 * r + i] + __log2f(fmaxf(scales[m][r], 0x1p-40f)) - 8.0f);
      #pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
      if (!lane.row) tops[lane.down * COLUMNS + lane.column(n, i)] = top;
    }
  __syncthreads();
  #pragma unroll
  for (int n = 0; n < OWN; n++)
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = lane.column(n, i);
      float top = LOWEST;
      #pragma unroll
      for (int d = 0; d < DOWN; d++) top = fmaxf(top, tops[d * COLUMNS + column]);
      const float before = state.top[n][i], now = first || top > before + 7.0f ? top : before;
      const float factor = first ? 1.0f : exp2_of(before - now);
      state.top[n][i] = now, state.sum[n][i] *= factor, state.offsets[n][i] *= factor;
      if (!lane.row && !lane.down) factors[column] = factor;
      #pragma unroll
      for (int m = 0; m < ROWS; m++) {
        float scaled[2];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
          const float weight = exp2_of(scores[m][n][2 * r + i] - now);
          state.sum[n][i] += weight, state.offsets[n][i] += weight * offsets[m][r], scaled[r] = weight * scales[m][r];
        }
        weights[(8 * (lane.down * ROWS + m) + lane.row) * WEIGHT_ROW + column] = pair_of(scaled[0], scaled[1], exact);
      }
    }
  __syncthreads();
}

// Multiply the outputs so far by the factors of their columns, which are 1 for most pages.
__device__ void rescale(State& state, const Lane& lane) {
  const float* factors = reinterpret_cast<const float*>(reinterpret_cast<const char*>(memory) + SUMS) + 2 * DOWN * COLUMNS;
  float of[SETS][2];
  bool changed = false;
  #pragma unroll
  for (int n = 0; n < SETS; n++)
    #pragma unroll
    for (int i = 0; i < 2; i++) of[n][i] = factors[8 * n + 2 * lane.part + i], changed |= of[n][i] != 1.0f;
  if (!__any_sync(ALL, changed)) return;
  #pragma unroll
  for (int f = 0; f < PRODUCTS; f++)
    #pragma unroll
    for (int n = 0; n < SETS; n++)
      #pragma unroll
      for (int i = 0; i < 4; i++) state.output[f][n][i] *= of[n][i % 2];
}

// Add to outputs the products of what one k of 16 tokens has, `a`, and their weights.
template <bool EXACT, int COUNT>
__device__ void add_products(State& state, const unsigned (&a)[COUNT][4], int first, int step, const Lane& lane) {
  const unsigned* weights = reinterpret_cast<const unsigned*>(reinterpret_cast<const char*>(memory) + WEIGHTS);
  #pragma unroll
  for (int n = 0; n < SETS; n++) {
    const unsigned* of = weights + (8 * step + lane.part) * WEIGHT_ROW + 8 * n + lane.row;
    const unsigned b0 = of[0], b1 = of[4 * WEIGHT_ROW];
    #pragma unroll
    for (int f = 0; f < COUNT; f++)
      if (EXACT)
        multiply_exact(state.output[first + f][n], a[f][0], a[f][1], a[f][2], a[f][3], b0, b1);
      else
        multiply(state.output[first + f][n], a[f][0], a[f][1], a[f][2], a[f][3], b0, b1);
  }
}

// The token of a page whose weight is number i of the four that make up two pairs.
__device__ int token_of(int step, int i, const Lane& lane) { return 16 * step + lane.part + i % 2 * 8 + i / 2 * 4; }

// Add the weighted pieces of a page to the outputs of this warp's. Rows `row` of a product are bytes 0 or 2, and `row` + 8 the next.
__device__ void accumulate_codes(State& state, const char* rows, int row, const int2 (&pieces)[EIGHTS], const Lane& lane) {
  #pragma unroll 1
  for (int step = 0; step < TILE / 16; step++) {
    unsigned a[2 * EIGHTS][4];
    #pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
      unsigned words[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) words[i] = word_at(rows + token_of(step, i, lane) * row + pieces[e].x, 0);
      // Bytes 0 and 2 of two words, or 1 and 3, with zeros between them.
      const unsigned even = pieces[e].y, odd = even << 8;
      #pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        const unsigned one = words[2 * pair], two = words[2 * pair + 1];
        a[2 * e][2 * pair] = __byte_perm(one & even, two & even, 0x5410), a[2 * e][2 * pair + 1] = __byte_perm(one & odd, two & odd, 0x4501);
        a[2 * e + 1][2 * pair] = __byte_perm(one & even, two & even, 0x7632);
        a[2 * e + 1][2 * pair + 1] = __byte_perm(one & odd, two & odd, 0x6723);
      }
    }
    add_products<false>(state, a, 0, step, lane);
  }
}

// The same of exact rows, of which a warp has COPIED channels: rows of a product are even channels, and odd ones.
__device__ void accumulate_copies(State& state, const char* rows, const Lane& lane) {
  #pragma unroll 1
  for (int step = 0; step < TILE / 16; step++) {
    unsigned a[COPIED / 16][4];
    #pragma unroll
    for (int f = 0; f < COPIED / 16; f++) {
      unsigned words[4];
      #pragma unroll
      for (int i = 0; i < 4; i++)
        words[i] = word_at(rows + token_of(step, i, lane) * PADDED, COPIED / 2 * lane.warp + 8 * f + lane.row);
      #pragma unroll
      for (int pair = 0; pair < 2; pair++)
        a[f][2 * pair] = __byte_perm(words[2 * pair], words[2 * pair + 1], 0x5410),
               a[f][2 * pair + 1] = __byte_perm(words[2 * pair], words[2 * pair + 1], 0x7632);
    }
    add_products<true>(state, a, 0, step, lane);
  }
}

// A block without tokens writes a sum of 0, and no output.
__device__ void write_none(const Results& results) {
  for (int c = threadIdx.x; c < results.columns; c += THREADS) results.totals[results.at(c)] = {LOWEST, 0.0f};
}

// Sum up over the lanes and warps that have the same columns, into shared memory: sums, and sums of offsets. Write the sums, and what
// scores are compared with, to which `headers` add something. Then shared memory has no pages and queries any more, but room for
// outputs, which are zeros.
__device__ void sum_up(const State& state, const Results& results, const float* headers, const Lane& lane) {
  float *merged = reinterpret_cast<float*>(memory), *sums = reinterpret_cast<float*>(reinterpret_cast<char*>(memory) + SUMS);
  float *offsets = sums + DOWN * COLUMNS, *tops = offsets + DOWN * COLUMNS;
  __syncthreads();
  #pragma unroll
  for (int n = 0; n < OWN; n++)
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = state.sum[n][i], offset = state.offsets[n][i];
      #pragma unroll
      for (int step = 4; step < 32; step *= 2)
        sum += __shfl_xor_sync(ALL, sum, step), offset += __shfl_xor_sync(ALL, offset, step);
      const int column = lane.column(n, i);
      if (lane.row) continue;
      sums[lane.down * COLUMNS + column] = sum, offsets[lane.down * COLUMNS + column] = offset;
      if (!lane.down) tops[column] = state.top[n][i];
    }
  for (int i = threadIdx.x; i < COLUMNS * MERGED; i += THREADS) merged[i] = 0.0f;
  __syncthreads();
  const int c = threadIdx.x;
  if (c >= results.columns) return;
  float sum = 0.0f, offset = 0.0f;
  #pragma unroll
  for (int d = 0; d < DOWN; d++) sum += sums[d * COLUMNS + c], offset += offsets[d * COLUMNS + c];
  results.totals[results.at(c)] = {tops[c] + (headers ? headers[3 * c + 2] : 0.0f), sum};
  offsets[c] = offset, sums[c] = inverse_of(sum);  // whose parts nobody else reads
}

// Write the means of the block from outputs in shared memory, with what offsets add to them.
__device__ void write(const Results& results, const float* middles) {
  const float* merged = reinterpret_cast<const float*>(memory);
  const float* inverses = reinterpret_cast<const float*>(reinterpret_cast<const char*>(memory) + SUMS);
  float mine[RANK / THREADS];
  #pragma unroll
  for (int k = 0; k < RANK / THREADS; k++) mine[k] = middles ? middles[THREADS * k + threadIdx.x] : 0.0f;
  __syncthreads();
  #pragma unroll 4
  for (int c = 0; c < results.columns; c++) {
    Element* to = results.outputs + results.at(c) * RANK + threadIdx.x;
    const float inverse = inverses[c], offset = inverses[DOWN * COLUMNS + c];
    #pragma unroll
    for (int k = 0; k < RANK / THREADS; k++)
      to[THREADS * k] = rounded((merged[c * MERGED + THREADS * k + threadIdx.x] + offset * mine[k]) * inverse);
  }
}

// Of the pages from `begin` to `end`, the tokens of a range. Queries are in the frame of the codes.
__device__ void attend_codes(const Tables& tables, int begin, int end, const Range& range, const unsigned short* turned,
                             const float* headers, const Piece* list, const float* middles, float scale, const Results& results) {
  const Lane lane;
  char* shared = reinterpret_cast<char*>(memory);
  fetch(tables, tables.page(begin), 0);
  Address next = begin + 1 < end ? tables.table[begin + 1] : 0;
  end_group();
  Turned queries;
  load_queries(queries, turned, results.columns, lane);
  float units[OWN][2], sums[OWN][2];
  #pragma unroll
  for (int n = 0; n < OWN; n++)
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = min(lane.column(n, i), int(results.columns) - 1);
      units[n][i] = headers[3 * column], sums[n][i] = headers[3 * column + 1];
    }
  Piece* pieces = reinterpret_cast<Piece*>(shared + LIST);
  for (int i = threadIdx.x; i < PIECES; i += THREADS) pieces[i] = list[i];
  int2 mine[EIGHTS];
  #pragma unroll
  for (int e = 0; e < EIGHTS; e++) {
    const Piece piece = list[8 * (EIGHTS * lane.warp + e) + lane.row];
    mine[e] = {piece.x, piece.y};
  }
  State state = {};
  for (int tile = begin, stage = 0; tile < end; tile++, stage = !stage) {
    wait_groups<0>();
    __syncthreads();  // all threads' copies have arrived, and nobody reads the other stage, or the weights, any more
    if (tile + 1 < end) {
      fetch(tables, tables.base + next * tables.unit, !stage);
      if (tile + 2 < end) next = tables.table[tile + 2];
    }
    end_group();
    const char *rows = shared + stage * STAGE, *numbers = rows + NUMBERS;
    Scores products, scores = {};
    compare_codes(queries, rows, tables.row, lane);
    compare_exact<ROPE, ROPE_ROW>(scores, rows + ROPES, shared + ROPE_QUERIES, lane);
    __syncthreads();
    sum_products(products, lane);
    float scales[ROWS][2], offsets[ROWS][2];
    const int first = tile * TILE;
    #pragma unroll
    for (int m = 0; m < ROWS; m++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int token = lane.token(m, r);
        if (SEGMENTS) {
          scales[m][r] = offsets[m][r] = tables.levels[tables.bytes ? gathered(word_at(rows + token * tables.row, 0)) : 0];
        } else {
          scales[m][r] = number(numbers, token), offsets[m][r] = number(numbers + TILE * sizeof(Metadata), token);
          if (!MINIMUM) offsets[m][r] *= -scales[m][r];
        }
        #pragma unroll
        for (int n = 0; n < OWN; n++)
          #pragma unroll
          for (int i = 0; i < 2; i++) {
            float& score = scores[m][n][2 * r + i];
            score = score * scale + (products[m][n][2 * r + i] * scales[m][r] * units[n][i] + offsets[m][r] * sums[n][i]);
          }
      }
    // The first pages, or the last: what lies beyond may be anything, even NaN.
    if (range.start > first || range.floor - range.tokens < first + TILE)
      #pragma unroll
      for (int m = 0; m < ROWS; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
          const int token = first + lane.token(m, r);
          #pragma unroll
          for (int n = 0; n < OWN; n++)
            #pragma unroll
            for (int i = 0; i < 2; i++)
              if (token < range.start || token >= range.end_of(lane.column(n, i))) scores[m][n][2 * r + i] = MINUS_INFINITY;
          if (token < range.start || token >= range.end) scales[m][r] = offsets[m][r] = 0.0f;
        }
    weigh(state, scores, scales, offsets, tile == begin, false, lane);
    if (tile > begin) rescale(state, lane);
    accumulate_codes(state, rows, tables.row, mine, lane);
  }
  wait_groups<0>();
  sum_up(state, results, headers, lane);
  float* merged = reinterpret_cast<float*>(memory);
  // Other lanes, of other warps, too, may have the other parts of a lane's codes.
  #pragma unroll
  for (int part = 0; part < 2; part++) {
    #pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
      const Piece piece = list[8 * (EIGHTS * lane.warp + e) + lane.row];
      if (!piece.y || (piece.z >> 12 & 1) != part) continue;
      const float counts = 16777216.0f * __int_as_float((127 + piece.w) << 23);
      float* to = merged + 2 * lane.part * MERGED + (piece.z & 0xfff);
      #pragma unroll
      for (int byte = 0; byte < 4; byte++)
        #pragma unroll
        for (int n = 0; n < SETS; n++)
          #pragma unroll
          for (int i = 0; i < 2; i++)
            to[(8 * n + i) * MERGED + byte * (piece.z >> 16)] += counts * state.output[2 * e + byte / 2][n][byte % 2 * 2 + i];
    }
    __syncthreads();
  }
  write(results, middles);
}

// The exact tokens of the pages of copies from `begin` to `end`.
__device__ void attend_copies(
    const Windows& windows, int begin, int end, const Element* query, float scale, const Results& results) {
  const Lane lane;
  char* shared = reinterpret_cast<char*>(memory);
  constexpr int WIDE = KEY / 8;  // 16 bytes each
  State state = {};
  load_exact<KEY>(query, EXACT_QUERIES, results.columns);
  for (int page = begin; page < end; page++) {
    const Range range = windows.range(page);
    const int first = windows.first(page);
    if (page > begin) __syncthreads();  // nobody reads the page before any more
    const Element* rows = windows.rows(page);
    for (int i = threadIdx.x; i < TILE * WIDE; i += THREADS) {
      uint4 x = {};
      if (windows.has(page, first + i / WIDE)) x = reinterpret_cast<const uint4*>(rows)[i];
      *reinterpret_cast<uint4*>(shared + i / WIDE * PADDED + i % WIDE * 16) = x;
    }
    __syncthreads();
    Scores scores = {};
    compare_exact<KEY, PADDED>(scores, shared, shared + EXACT_QUERIES, lane);
    float scales[ROWS][2], offsets[ROWS][2] = {};
    #pragma unroll
    for (int m = 0; m < ROWS; m++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int token = first + lane.token(m, r);
        scales[m][r] = 1.0f;
        #pragma unroll
        for (int n = 0; n < OWN; n++)
          #pragma unroll
          for (int i = 0; i < 2; i++) {
            const int column = lane.column(n, i);
            float& score = scores[m][n][2 * r + i];
            score = token >= range.start_of(column) && token < range.end_of(column) ? score * scale : MINUS_INFINITY;
          }
      }
    weigh(state, scores, scales, offsets, page == begin, true, lane);
    if (page > begin) rescale(state, lane);
    accumulate_copies(state, shared, lane);
  }
  sum_up(state, results, nullptr, lane);
  float* merged = reinterpret_cast<float*>(memory);
  #pragma unroll
  for (int f = 0; f < COPIED / 16; f++)
    #pragma unroll
    for (int n = 0; n < SETS; n++)
      #pragma unroll
      for (int i = 0; i < 4; i++)
        merged[(8 * n + 2 * lane.part + i % 2) * MERGED + COPIED * lane.warp + 16 * f + 2 * lane.row + i / 2] = state.output[f][n][i];
  write(results, nullptr);
}

// What is known of a query: query [columns, KEY], given [columns, TURNED] in the order of pieces, and sums [RANK, 2], whose products with
// it are with the middles and the mean. turned float16 and headers as below. Grid: x = columns, after a block that plans for several
// requests.
extern "C" __global__ void __launch_bounds__(128) scale_queries(
    const Element* query, const Element* given, const float* sums, double scale, const int* blocks_starts, const int* blocks_lengths,
    Count blocks_requests, Count blocks_windows, Count blocks_splits, Count blocks_most, int4* blocks_table, unsigned short* turned,
    float* headers) {
  constexpr int WARPS_OF_BLOCK = 4, STEP = 32 * WARPS_OF_BLOCK;
  __shared__ float found[WARPS_OF_BLOCK][3];
  wait_for_previous();
  let_next_start();
  const bool planning = blocks_requests > 1;
  if (planning && !blockIdx.x) {
    Blocks(blocks_starts, blocks_lengths, blocks_requests, blocks_windows, blocks_splits, blocks_most, blocks_table).plan();
    return;
  }
  const Count column = blockIdx.x - planning;
  float top = 0.0f, middle = 0.0f, bias = 0.0f;
  for (int i = threadIdx.x; i < TURNED; i += STEP) top = fmaxf(top, fabsf(element(given[column * TURNED + i])));
  for (int d = threadIdx.x; d < RANK; d += STEP) {
    const float x = element(query[column * KEY + d]);
    middle += x * sums[2 * d], bias += x * sums[2 * d + 1];
  }
  #pragma unroll
  for (int step = 16; step; step /= 2) {
    top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    middle += __shfl_xor_sync(ALL, middle, step), bias += __shfl_xor_sync(ALL, bias, step);
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) found[warp][0] = top, found[warp][1] = middle, found[warp][2] = bias;
  __syncthreads();
  top = middle = bias = 0.0f;
  #pragma unroll
  for (int w = 0; w < WARPS_OF_BLOCK; w++) top = fmaxf(top, found[w][0]), middle += found[w][1], bias += found[w][2];
  const float unit = fmaxf(top, 1e-30f) / 16384.0f, scaled = float(scale) * LOG2E;
  for (int i = threadIdx.x; i < TURNED; i += STEP)
    turned[column * TURNED + i] = half_pair(element(given[column * TURNED + i]) / unit, 0.0f);
  if (threadIdx.x) return;
  headers[3 * column] = unit * 16777216.0f * scaled, headers[3 * column + 1] = middle * scaled, headers[3 * column + 2] = bias * scaled;
}

// Grid: x = `Blocks::total`, y = tiles of columns. Column c is query token c / heads and query head c % heads. query [B, columns, KEY],
// turned [B, columns, TURNED] float16, in the order of pieces and without its unit, and headers [B, columns, 3] float32: the unit, and the
// query's product with the middles [RANK], both times the scale of scores and log2(e), and what is added to scores. What counts and slots
// say is said in attention.cu. copies [slots, TILE, KEY]. totals [blocks, columns] and outputs [blocks, columns, RANK] are `Results`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend_latents(
    const Element* query, const unsigned short* turned, const float* headers, Count columns, Count heads, const Address* pages_table,
    Address pages_base, Count pages_unit, Count pages_pages, const int4* pieces, const float* codes_middles, const float* codes_levels,
    Count codes_row_bytes, Count codes_row_stride, Count codes_begin_scales, Count codes_begin_offsets, Count codes_rope,
    const int* blocks_starts, const int* blocks_lengths, Count blocks_requests, Count blocks_windows, Count blocks_splits,
    Count blocks_most, int4* blocks_table, const int* floors, const Element* copies, const int* sink_slots, const int* sink_starts,
    const int* sink_lengths, Count sink_pieces, const int* recent_slots, const int* recent_starts, const int* recent_lengths,
    Count recent_pieces, double scale, float2* totals, Element* outputs) {
  wait_for_previous();
  const Blocks blocks(blocks_starts, blocks_lengths, blocks_requests, blocks_windows, blocks_splits, blocks_most, blocks_table);
  const int exact = int(blockIdx.x) - blocks.packed(), first = blockIdx.y * COLUMNS;
  Blocks::Work work = exact < 0 ? blocks.work(blockIdx.x) : blocks.exact_work(exact);
  if (work.request < 0) return;
  const int batch = work.request, tokens = columns / heads, count = min(Count(COLUMNS), columns - first);
  const int length = blocks.lengths[batch], floor = floors[batch], recent_end = recent_lengths[batch];
  const int recent_start = start_of(recent_starts, batch);
  const Range sink = {start_of(sink_starts, batch), 0, sink_lengths[batch], -1, tokens, int(heads), first, 0, 0};
  const Range recent = {recent_start, 0, recent_end, -1, tokens, int(heads), first, 1, min(tokens - 1, length - floor)};
  const Windows windows = {copies, {sink_slots + batch * sink_pieces, sink}, {recent_slots + batch * recent_pieces, recent}};
  if (exact >= 0) blocks.take_part(work, windows.pages());
  const Results results = {totals, outputs, count, columns, work.place, first};
  if (work.begin >= work.end) {
    write_none(results);
    return;
  }
  const Count column = batch * columns + first;  // of all requests
  const Element* rows = query + column * KEY;
  const float scaled = float(scale) * LOG2E;
  if (exact >= 0) {
    attend_copies(windows, work.begin, work.end, rows, scaled, results);
    return;
  }
  const Range range = {start_of(blocks.starts, batch), floor, length, recent_end - recent_start, tokens, int(heads), first};
  load_exact<ROPE>(rows + RANK, ROPE_QUERIES, count);
  const Tables tables = {pages_table + batch * pages_pages, pages_base, pages_unit, int(codes_row_bytes), int(codes_row_stride),
                         int(codes_begin_scales), int(codes_begin_offsets), int(codes_rope), codes_levels};
  attend_codes(tables, work.begin, work.end, range, turned + column * TURNED, headers + 3 * column, pieces, codes_middles, scaled, results);
}

constexpr int MERGING = 8, EXTRA = 8;  // warps of a block of `merge_latents`, at most; and what a row of codes has behind its channels

// Add what some parts of a column have, of which each warp takes some, and which are `step` columns apart. Lanes read what 32 of them sum
// to, so that reading their outputs waits for nothing else.
__device__ void add_parts(float4& sum, float& total, const float2* totals, const uint2* outputs, int step, int end, float top) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int begin = threadIdx.x / 32; begin < end; begin += 32 * warps) {
    const int mine = begin + lane * warps;
    const float2 part = mine < end ? totals[Count(mine) * step] : float2{LOWEST, 0.0f};
    const float factor = part.y == 0.0f ? 0.0f : part.y * exp2_of(part.x - top);  // without a sum, it has no mean
    total += factor;
    const int count = min(32, (end - begin + warps - 1) / warps);
    const uint2* from = outputs + Count(begin) * step * (RANK / 4);
    const int further = warps * step * (RANK / 4);
    #pragma unroll 8
    for (int i = 0; i < count; i++) {
      const float of_part = __shfl_sync(ALL, factor, i);
      uint2 x = {};
      if (of_part != 0.0f) x = *from;
      from += further;
      sum.x += of_part * element(x.x & 0xffff), sum.y += of_part * element(x.x >> 16);
      sum.z += of_part * element(x.y & 0xffff), sum.w += of_part * element(x.y >> 16);
    }
  }
  #pragma unroll
  for (int step = 16; step; step /= 2) total += __shfl_xor_sync(ALL, total, step);
}

// Merge the parts of a column. exact [B columns, RANK], and packed [B columns, RANK + EXTRA]: behind its channels, it has what weights of
// packed tokens sum to, and zeros. Grid: x = columns, y = batch, z = RANK / 128.
extern "C" __global__ void __launch_bounds__(32 * MERGING, 4) merge_latents(
    const float2* totals, const Element* outputs, const int* blocks_starts, const int* blocks_lengths, Count blocks_requests,
    Count blocks_windows, Count blocks_splits, Count blocks_most, int4* blocks_table, Element* packed, Element* exact) {
  __shared__ float tops[MERGING], found[2][MERGING];
  __shared__ float4 sums[2][MERGING][32];
  wait_for_previous();
  const Blocks blocks(blocks_starts, blocks_lengths, blocks_requests, blocks_windows, blocks_splits, blocks_most, blocks_table);
  const Blocks::Share share = blocks.share(blockIdx.y);
  const Count columns = gridDim.x, column = Count(blockIdx.y) * columns + blockIdx.x, first = 128 * blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  // Of exact and of packed tokens: how many parts there are, and the first of them.
  const int windows = blocks.windows, counts[2] = {windows, share.count};
  const Count firsts[2] = {share.first * columns + blockIdx.x, (share.first + windows) * columns + blockIdx.x};
  float top = LOWEST;
  #pragma unroll
  for (int kind = 0; kind < 2; kind++)
    for (int i = threadIdx.x; i < counts[kind]; i += blockDim.x) top = fmaxf(top, totals[firsts[kind] + i * columns].x);
  #pragma unroll
  for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
  if (!lane) tops[warp] = top;
  __syncthreads();
  for (int w = 0; w < warps; w++) top = fmaxf(top, tops[w]);
  float4 both[2] = {};
  float total[2] = {};
  #pragma unroll
  for (int kind = 0; kind < 2; kind++) {
    const uint2* of = reinterpret_cast<const uint2*>(outputs + firsts[kind] * RANK + first) + lane;
    add_parts(both[kind], total[kind], totals + firsts[kind], of, columns, counts[kind], top);
  }
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    sums[i][warp][lane] = both[i];
    if (!lane) found[i][warp] = total[i];
  }
  __syncthreads();
  if (warp) return;
  total[0] = total[1] = 0.0f;
  for (int w = 0; w < warps; w++) total[0] += found[0][w], total[1] += found[1][w];
  const float sum = total[0] + total[1], inverse = inverse_of(sum);
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    float4 x = {};
    for (int w = 0; w < warps; w++) {
      const float4 of_warp = sums[i][w][lane];
      x.x += of_warp.x, x.y += of_warp.y, x.z += of_warp.z, x.w += of_warp.w;
    }
    Element* to = (i ? packed + column * (RANK + EXTRA) : exact + column * RANK) + first + 4 * lane;
    to[0] = rounded(x.x * inverse), to[1] = rounded(x.y * inverse), to[2] = rounded(x.z * inverse), to[3] = rounded(x.w * inverse);
  }
  if (!first && lane < EXTRA) packed[column * (RANK + EXTRA) + RANK + lane] = rounded(lane ? 0.0f : total[1] * inverse);
}
