// Rows whose channels have 0 to 8 bits each: to pages, and from pages to what prompts read.
//
// The definition is `SegmentLayout` in rotationzoo/codec/transform.py. What is stored of channels, and what is read of it, are the
// same bit by bit: every operation is float32 and rounded on its own.
//
// The macros are those of restore.cu, of which D, TYPE, TOKENS and EXACT count.

#include "restore.cu"
#include "segment_rows.cu"

constexpr int SEGMENT = 4, SCALES = 15, NO_NUMBER = 15;  // as in the definition
constexpr int MINE = (D + 31) / 32;                      // a lane has every 32nd channel
constexpr int WORDS = D / SEGMENT + 2;                   // of a row, and one behind it
constexpr int PLACES = 2 + D / SEGMENT;                  // numbers of a head in `SegmentLayout.places`
constexpr int TRYING = 16;                               // warps of a block for one row, a scale each
constexpr int PARTS = 16;                                // of a matrix's rows, in a block for one row

// Where a head's rows are in a page, and its segments in a row: `SegmentLayout.places`.
struct Head {
  const int* places;

  __device__ Head(const int* of_heads, Count head) : places(of_heads + head * PLACES) {}
  __device__ int bytes() const { return places[1]; }  // of a row
  __device__ Count row(Count place) const { return places[0] + place * places[1]; }
  __device__ int width(int channel) const { return places[2 + channel / SEGMENT] & 15; }
  __device__ int start(int channel) const { return places[2 + channel / SEGMENT] >> 4; }  // the first bit of its segment in its streams
};

// ---- from channels to pages ------------------------------------------------------------------------------------------------

// Pages to which rows are written, each at its place of its page. `bad`: how many rows were refused, and the place of the last one
// in tokens; page 0 belongs to nobody.
struct Into {
  const float* steps;
  const int* places;
  unsigned char* memory;
  unsigned long long* bad;
};

// What a lane has of a row of channels in steps.
struct Row {
  float x[MINE], step[MINE], half[MINE];
  int width[MINE], start[MINE];

  __device__ Row(const float* channels, const float* steps, Head head) {
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      const int channel = 32 * m + threadIdx.x % 32;
      const bool exists = channel < D;
      x[m] = exists ? channels[channel] : 0.0f, step[m] = exists ? steps[channel] : 0.0f;
      width[m] = exists ? head.width(channel) : 0, start[m] = exists ? head.start(channel) : 0;
      half[m] = 0.5f * (1 << width[m]);
    }
  }

  // The code of a channel that is so many scales, less half of their number.
  __device__ float place(int m, float scales) const { return fminf(fmaxf(floorf(scales), -half[m]), __fsub_rn(half[m], 1.0f)); }

  // What a scale leaves, summed in halves. A quotient may be an ulp off where it is far below 1: its place is then -1 or 0, and
  // either is as far away.
  __device__ float loss(float scale) const {
    const Divisor<false> by(scale);
    float squares[MINE];
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      const float read = __fmul_rn(__fadd_rn(place(m, by.divide(x[m])), 0.5f), scale);
      const float error = __fmul_rn(__fsub_rn(read, x[m]), step[m]);
      squares[m] = __fmul_rn(error, error);
    }
#pragma unroll
    for (int half = 16; half; half /= 2)
#pragma unroll
      for (int m = 0; m < half; m++)
        if (m + half < MINE) squares[m] = __fadd_rn(squares[m], squares[m + half]);
    float sum = squares[0];
#pragma unroll
    for (int step = 16; step; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL, sum, step));
    return sum;
  }

  // What some of the scales leave, of which this warp is number `first` of `warps`.
  __device__ void try_scales(float* losses, const float* scales, int first, int warps) const {
    for (int n = first; n < SCALES; n += warps) {
      const float left = loss(scales[n]);
      if (threadIdx.x % 32 == 0) losses[n] = left;
    }
  }

  // Write the codes with the best scale. `words` is the warp's own shared memory.
  __device__ void write(int best, float scale, unsigned* words, Into into, Head head, Count page, Count token, Count page_bytes) const {
    const int lane = threadIdx.x % 32;
    bool good = true;
#pragma unroll
    for (int m = 0; m < MINE; m++) good &= fabsf(x[m]) <= LARGEST;  // false for NaN
    good = __all_sync(ALL, good);
    for (int i = lane; i < WORDS; i += 32) words[i] = i ? 0 : spread(good ? best : NO_NUMBER);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      const int code = good ? int(__fadd_rn(place(m, __fdiv_rn(x[m], scale)), half[m])) : 0;
      unsigned segment = unsigned(code) << 8 * (lane % SEGMENT);
      segment |= __shfl_xor_sync(ALL, segment, 1);
      segment |= __shfl_xor_sync(ALL, segment, 2);
      // What leaves its byte at the top comes to the next word at the bottom.
      const int bit = start[m] % 8, next = lane % SEGMENT;
      const unsigned piece = next ? segment >> 8 - bit & EACH_BYTE * ((1 << bit) - 1) : segment << bit & EACH_BYTE * (255 << bit & 255);
      if (next < 2 && piece) atomicAdd(words + start[m] / 8 + next, piece);
    }
    __syncwarp();
    unsigned* to = reinterpret_cast<unsigned*>(into.memory + page * page_bytes + head.row(token));
    for (int i = lane; i < head.bytes() / 4; i += 32) to[i] = words[i];
    if (!lane && !good && page) atomicAdd(into.bad, 1ull), into.bad[1] = page * TOKENS + token;
  }
};

// The first scale that leaves the least.
__device__ int find_least(const float* losses) {
  int best = 0;
  float least = INFINITE;
#pragma unroll
  for (int n = 0; n < SCALES; n++)
    if (losses[n] < least) best = n, least = losses[n];
  return best;
}

// Channels in steps [H, T, D]. A warp has a row; or, where they are few, a block, whose warps try other scales. Grid: x = T / WARPS
// rounded up, or T, y = H; 32 * WARPS threads, or, for few, 32 * TRYING.
extern "C" __global__ void __launch_bounds__(32 * TRYING) store_segments(
    const float* channels, Count tokens, Count few, const Count* pages, const Count* places, Count page_bytes, const float* scales,
    const float* into_steps, const int* into_places, unsigned char* into_memory, unsigned long long* into_bad) {
  __shared__ unsigned words[WARPS][WORDS];
  __shared__ float losses[SCALES];
  const int warp = threadIdx.x / 32;
  const Count token = few ? blockIdx.x : blockIdx.x * Count(WARPS) + warp, number = blockIdx.y;
  if (token >= tokens) return;
  const Head head(into_places, number);
  const Row row(channels + (number * tokens + token) * D, into_steps + number * D, head);
  int best = 0;
  if (few) {
    row.try_scales(losses, scales, warp, TRYING);
    __syncthreads();
    if (warp) return;
    best = find_least(losses);
  } else {
    float least = INFINITE;
#pragma unroll
    for (int n = 0; n < SCALES; n++) {
      const float loss = row.loss(scales[n]);
      if (loss < least) best = n, least = loss;
    }
  }
  const Into into = {into_steps, into_places, into_memory, into_bad};
  row.write(best, scales[best], words[warp], into, head, pages[token], places[token], page_bytes);
}

struct Side {
  const Element* rows;  // [T, H, D], `stride` elements from one token to the next
  Count stride;
  const float *matrix, *mean;  // [H, D, D], [H, D] or null
  Into into;
};

// The same of the model's rows, where they are few. A block has a row: each part of it multiplies by some rows of the matrix, which
// are on their way before the row is known, and each warp tries other scales. Grid: x = T, y = H, z = sides; 4 * D threads.
extern "C" __global__ void __launch_bounds__(4 * D) store_few_segments(
    const Count* pages, const Count* places, Count page_bytes, const float* scales, const Element* key_rows, Count key_stride,
    const float* key_matrix, const float* key_mean, const float* key_into_steps, const int* key_into_places,
    unsigned char* key_into_memory, unsigned long long* key_into_bad, const Element* value_rows, Count value_stride,
    const float* value_matrix, const float* value_mean, const float* value_into_steps, const int* value_into_places,
    unsigned char* value_into_memory, unsigned long long* value_into_bad) {
  __shared__ float4 sums[PARTS][D / 4];
  __shared__ float given[D], losses[SCALES];
  __shared__ unsigned words[WORDS];
  const Into key_into = {key_into_steps, key_into_places, key_into_memory, key_into_bad};
  const Into value_into = {value_into_steps, value_into_places, value_into_memory, value_into_bad};
  const Side side = blockIdx.z ? Side{value_rows, value_stride, value_matrix, value_mean, value_into}
                               : Side{key_rows, key_stride, key_matrix, key_mean, key_into};
  const Count token = blockIdx.x, number = blockIdx.y;
  const int part = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4);
  alignas(16) float weights[D / PARTS][4], sum[4] = {};
#pragma unroll
  for (int r = 0; r < D / PARTS; r++) copy<16>(weights[r], side.matrix + (number * D + PARTS * r + part) * D + 4 * column);
  wait_for_previous();
  if (threadIdx.x < D) {
    const float x = widen(side.rows[token * side.stride + number * D + threadIdx.x]);
    given[threadIdx.x] = side.mean ? __fsub_rn(x, side.mean[number * D + threadIdx.x]) : x;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < D / PARTS; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = __fmaf_rn(given[PARTS * r + part], weights[r][i], sum[i]);
  copy<16>(&sums[part][column], sum);
  __syncthreads();
  if (threadIdx.x < D) {
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) total = __fadd_rn(total, reinterpret_cast<const float*>(sums[p])[threadIdx.x]);
    given[threadIdx.x] = total;
  }
  __syncthreads();
  const Head head(side.into.places, number);
  const Row row(given, side.into.steps + number * D, head);
  const int warp = threadIdx.x / 32;
  row.try_scales(losses, scales, warp, blockDim.x / 32);
  __syncthreads();
  if (warp) return;
  const int best = find_least(losses);
  row.write(best, scales[best], words, side.into, head, pages[token], places[token], page_bytes);
}

// ---- from pages to what prompts read ---------------------------------------------------------------------------------------

// Rows [room, H, D] of levels, as `restore_rows` has them of codes. scales: the last one is no number.
extern "C" __global__ void __launch_bounds__(32 * WARPS) restore_segments(
    const int* tokens_bounds, const int* tokens_firsts, const int* tokens_jumps, const int* tokens_gaps, Count tokens_prompts,
    const Count* tokens_table, Count tokens_stride, Count room, Count page_bytes, const float* scales,
    const int* key_places, const unsigned char* key_memory, Element* key_rows, const int* value_places, const unsigned char* value_memory,
    Element* value_rows) {
  const Tokens tokens = {tokens_bounds, tokens_firsts, tokens_jumps, tokens_gaps, int(tokens_prompts), tokens_table, tokens_stride};
  const Lane lane;
  const Count number = blockIdx.y, heads = gridDim.y, token = first_row();
  const bool is_value = blockIdx.z;
  Element* to = (is_value ? value_rows : key_rows) + (token * heads + number) * (is_value ? D : KEY);
  int prompt, position;
  if (token >= room || !lane.active) return;
  if (!tokens.find(token, prompt, position)) {
    if (is_value) fill(to, lane, 0.0f);
    return;
  }
  const Count at = tokens.page(prompt, position) * page_bytes, place = position % TOKENS;
  const Head key(key_places, number), value(value_places, number), head = is_value ? value : key;
  const auto words_of = [=](Head side, const unsigned char* memory) {
    return reinterpret_cast<const unsigned*>(memory + at + side.row(place));
  };
  if (value.bytes() && gathered(*words_of(value, value_memory)) == NO_NUMBER) {
    fill(to, lane, is_value ? 0.0f : NOT_A_NUMBER, is_value ? D : KEY);
    return;
  }
  if (EXACT && !is_value) {
    copy_exact(to, lane, key_memory + at, place);
    return;
  }
  const unsigned* words = words_of(head, is_value ? value_memory : key_memory);
  const float scale = scales[head.bytes() ? gathered(*words) : 0];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    alignas(16) float x[RUN];
#pragma unroll
    for (int first = 0; first < RUN; first += SEGMENT) {
      const int channel = lane.channel(k) + first, width = head.width(channel), start = head.start(channel), bit = start % 8;
      unsigned codes = width ? words[start / 8] >> bit & EACH_BYTE * (255 >> bit) : 0;
      if (bit + width > 8) codes |= words[start / 8 + 1] << 8 - bit & EACH_BYTE * (255 << 8 - bit & 255);
#pragma unroll
      for (int i = 0; i < SEGMENT; i++) {
        const int code = codes >> 8 * i & (1 << width) - 1;
        x[first + i] = __fmul_rn(code + 0.5f - 0.5f * (1 << width), scale);
      }
    }
    save(to + lane.channel(k), x);
  }
}
