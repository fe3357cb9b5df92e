// Attention of one or a few query tokens over packed keys and values: three kernels, in the order `prepare`, `attend`, `finish`.
// attention_tiles.cu has what the second does with a tile of packed tokens.
//
// The definition is rotationzoo/codec/attention.py. Nothing is dequantized. With x = scale * code + offset,
//     q . k = scale * (q . codes) + offset * sum(q)   and   sum_t p_t v_t = sum_t (p_t * scale_t) codes_t + sum_t p_t * offset_t,
// so tensor cores multiply codes, and scales and offsets cost one multiplication a row. Unpacking is one AND:
//   * Keys: a field of a byte whose other bits are masked away is the integer code * 2^(bits * field). The query is rounded to 16
//     bits, and its upper and lower bytes are two columns of an integer product. Fields are summed apart, and weighed at the end.
//   * Values: a field of a 16-bit word is a float16, a subnormal one, code * 2^(bits * field) * 2^-24. Tensor cores multiply subnormals
//     exactly and at full speed. A weight is the sum of two float16, which are two columns of the product; or, for eight columns or more
//     and rows of 16 bits, one float16, as in FlashAttention.
//
// Work is split over tokens (flash-decoding): a block of `attend` handles one range of tokens of one KV head for up to COLUMNS
// columns, which are the query heads of the group times the query tokens. It writes a maximum, a sum and an output without
// their scale; `finish` merges them. Every warp takes tiles of 32 tokens through a ring of its own in shared memory.
//
// All start early. Before they wait, `attend` and `finish` may also read what kernels before the previous one wrote, because each of
// the three lets the next start only after it has waited itself.
//
// Compile with -D: KEY_DIM and VALUE_DIM (multiples of 16, at most 256), KEY_GROUP and VALUE_GROUP (channels that share a scale),
// PAGE (tokens a page, a multiple of 32), WARPS (of a block of `attend`), COLUMNS (4, 8 or 16), TYPE (of queries and exact rows: 0
// float32, 1 float16, 2 bfloat16), SOFT_CAP, and of the format HALF (scales and offsets in float16), MINIMUM (offset as in `formats`)
// and STRIDED (packing). And SEGMENTS: rows have codes of any width, at most KEY_ROOM and VALUE_ROOM bytes, and BOTH_ROOM together,
// which KEY_SLOTS and VALUE_SLOTS slots (multiples of 8) read as if they had 4 bits and no offset. EVEN: all heads need as many.
// Needs sm_80 or newer. No header of CUDA is included: NVRTC compiles this file on machines without a CUDA toolkit.

#include "attention_tiles.cu"
#include "blocks.cu"

typedef BlocksOf<TILE, WARPS> Blocks;

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
// COLUMNS. Channels are in the order of words, fields and bytes, so that a lane of `attend` reads 4 FIELDS bytes a word.
// Grid: x = KV heads, y = any number of blocks that share the columns of all requests, after one that plans for several requests.
// Columns of a block at a time, as far as shared memory goes, and those that are multiplied at a time.
constexpr int SET = KEY_DIM <= 128 ? 32 : 16, SMALLEST_SET = 4;
extern "C" __global__ void __launch_bounds__(1024) prepare(
    const Element* query, Count strides_row, Count strides_head, Count strides_token, Count columns, Count tokens, const float* matrix,
    const float* mean, double scale, const int* segments, const int* blocks_starts, const int* blocks_lengths, Count blocks_requests,
    Count blocks_windows, Count blocks_splits, Count blocks_most, int4* blocks_table, Count padded, signed char* prepared,
    Header* headers) {
  constexpr int D = KEY_DIM;
  constexpr int LANES = 8, AT_ONCE = 1024 / LANES;  // that share a row of the matrix; and rows at a time
  constexpr int ROWS = (D + AT_ONCE - 1) / AT_ONCE, PIECES = (D / 4 + LANES - 1) / LANES;
  alignas(16) __shared__ float given[SET][D];
  __shared__ float turned[SET][D];
  __shared__ int4 slots[SEGMENTS ? KEY_WORDS : 1];
  const int head = blockIdx.x, heads = gridDim.x, requests = blocks_requests, planning = requests > 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (planning && !blockIdx.y) {
    wait_for_previous();
    let_next_start();
    if (!head) Blocks(blocks_starts, blocks_lengths, blocks_requests, blocks_windows, blocks_splits, blocks_most, blocks_table).plan();
    return;
  }
  const Strides strides = {strides_row, strides_head, strides_token};
  const float* rows = matrix + Count(head) * D * D;
  // The matrix is on its way while the query is computed.
  float4 numbers[ROWS][PIECES] = {};
  const int part = lane % LANES, own_row = threadIdx.x / LANES;
  #pragma unroll
  for (int r = 0; r < ROWS; r++)
    #pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int j = r * AT_ONCE + own_row, i = 4 * (p * LANES + part);
      if (j < D && i < D) numbers[r][p] = *reinterpret_cast<const float4*>(rows + j * D + i);
    }
  if (SEGMENTS)
    for (int i = threadIdx.x; i < KEY_WORDS; i += blockDim.x) slots[i] = HeadTable(segments, KEY_WORDS, head, KEY_ROW).slots[i];
  wait_for_previous();
  // Not earlier: `attend` reads the exact tokens before it waits, and the kernel before this one may have written the last of them.
  let_next_start();
  const int all = requests * columns, blocks = gridDim.y - planning;
  const int most = min(SET, Blocks::divided(all, SMALLEST_SET * blocks) * SMALLEST_SET);
  for (int first = most * (blockIdx.y - planning); first < all; first += most * blocks) {
    const int count = min(most, all - first);
    for (int i = threadIdx.x; i < count * D; i += blockDim.x) {
      const int request = (first + i / D) / int(columns), column = first + i / D - request * columns;
      given[i / D][i % D] = element(query[strides.at(request, head, columns, tokens, column) + i % D]);
    }
    __syncthreads();
    for (int set = 0; set < count; set += SMALLEST_SET) {
      float sums[ROWS][SMALLEST_SET] = {};
      #pragma unroll
      for (int p = 0; p < PIECES; p++) {
        const int i = 4 * (p * LANES + part);
        #pragma unroll
        for (int c = 0; c < SMALLEST_SET; c++) {
          float4 x = {};
          if (i < D) x = *reinterpret_cast<const float4*>(given[set + c] + i);
          #pragma unroll
          for (int r = 0; r < ROWS; r++) {
            const float4 number = numbers[r][p];
            sums[r][c] += number.x * x.x + number.y * x.y + number.z * x.z + number.w * x.w;
          }
        }
      }
      #pragma unroll
      for (int r = 0; r < ROWS; r++) {
        // Sum over lanes. Each step also halves the columns that a lane holds, until lane l has the column l % SMALLEST_SET.
        #pragma unroll
        for (int step = SMALLEST_SET / 2; step; step /= 2)
          #pragma unroll
          for (int c = 0; c < step; c++) {
            const bool upper = lane & step;
            const float sent = upper ? sums[r][c] : sums[r][c + step];
            sums[r][c] = (upper ? sums[r][c + step] : sums[r][c]) + __shfl_xor_sync(ALL, sent, step);
          }
        #pragma unroll
        for (int step = SMALLEST_SET; step < LANES; step *= 2) sums[r][0] += __shfl_xor_sync(ALL, sums[r][0], step);
        const int j = r * AT_ONCE + own_row;
        if (part < SMALLEST_SET && j < D) turned[set + part][j] = sums[r][0];
      }
    }
    __syncthreads();
    if (warp < count) {
      const int request = (first + warp) / int(columns), column = first + warp - request * columns;
      const Count of_request = (Count(request) * heads + head) * padded;
      if (column + 1 == columns)
        for (int i = columns + lane; i < padded; i += 32) headers[of_request + i] = {};
      const float* mine = turned[warp];
      float top = 0.0f;
      for (int i = lane; i < (SEGMENTS ? PREPARED : D); i += 32) {
        const Piece piece(slots[SEGMENTS ? i / 8 : 0], i / 4 % FIELDS, i % 4);
        top = fmaxf(top, SEGMENTS ? fabsf(mine[piece.channel]) * piece.weight(i / 4 % FIELDS) : fabsf(mine[i]));
      }
      for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
      // The upper byte is rounded, so that the lower one may have a sign.
      const float unit = fmaxf(top, 1e-30f) / 32512.0f;
      signed char* to = prepared + (of_request + column) * COLUMN;
      float sums[KEY_GROUPS] = {}, bias = 0.0f;
      for (int i = lane; i < PREPARED; i += 32) {
        const int word = i / (4 * FIELDS), field = i / 4 % FIELDS;
        const Piece piece(slots[SEGMENTS ? i / 8 : 0], field, i % 4);
        const bool exists = word < KEY_WORDS;
        const int ch = SEGMENTS ? piece.channel : channel<KEY_DIM>(word, i % 4, field);
        const int x = exists ? __float2int_rn(mine[ch] * (SEGMENTS ? piece.weight(field) : 1.0f) / unit) : 0;
        const int high = (x + 128) >> 8;
        to[i] = high, to[PREPARED + i] = x - 256 * high;
        const float part = SEGMENTS ? x * (piece.middle() / (1 << BITS * field)) : x;
        #pragma unroll
        for (int g = 0; g < KEY_GROUPS; g++)
          if (exists && ch / KEY_GROUP == g) sums[g] += part;
      }
      if (mean)
        for (int i = lane; i < D; i += 32) bias += given[warp][i] * mean[head * D + i];
      #pragma unroll
      for (int step = 16; step; step /= 2) {
        bias += __shfl_xor_sync(ALL, bias, step);
        #pragma unroll
        for (int g = 0; g < KEY_GROUPS; g++) sums[g] += __shfl_xor_sync(ALL, sums[g], step);
      }
      if (!lane) {
        Header& header = headers[of_request + column];
        const float scaled = unit * float(scale) * LOG2E;
        header.unit = scaled / (1 << LAST_FIELD);
        header.bias = bias * float(scale) * LOG2E;
        for (int g = 0; g < KEY_GROUPS; g++) header.sums[g] = sums[g] * scaled;
      }
    }
    __syncthreads();  // nobody reads these columns any more
  }
}

// ---- one range of tokens of one KV head ------------------------------------------------------------------------------------

// Exact rows [B, H, room, D], of which the first `lengths[b]` count, or all of them, without the first `starts[b]`. With `slots`
// [B, pieces], the rows are [slots, H, room, D], and those of b are in its slots, one after the other.
struct Rows {
  const Element *key, *value;
  const int *lengths, *starts, *slots;
  int room, pieces;
};

struct Job {
  int head, heads, tile, tiles, batch, place, places;
  Count columns, tokens;  // tokens: of the query

  __device__ Count at(int column) const {  // of what is written for a column
    return ((Count(head) * tiles + tile) * COLUMNS + column) * places + place;
  }
};

// Merge the warps of a block, of which `merged` [WARPS][COLUMNS][WIDTH] has outputs, what they are relative to, and sums. The headers of
// columns have something to add, unless they are null.
constexpr int WIDTH = VALUE_DIM + 2;
__device__ void merge_warps(const Job& job, const Header* headers, const float* merged, float2* totals, float* outputs) {
  __syncthreads();
  const int columns = min(Count(COLUMNS), job.columns - job.tile * COLUMNS), lane = threadIdx.x % 32;
  #pragma unroll 1
  for (int c = threadIdx.x / 32; c < columns; c += WARPS) {
    float top = LOWEST, total = 0.0f, factors[WARPS];
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, merged[(w * COLUMNS + c) * WIDTH + VALUE_DIM]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* of = merged + (w * COLUMNS + c) * WIDTH + VALUE_DIM;
      factors[w] = exp2_of(of[0] - top);
      total += factors[w] * of[1];
    }
    float* to = outputs + job.at(c) * VALUE_DIM;
    #pragma unroll
    for (int k = 0; k < (VALUE_DIM + 31) / 32; k++) {
      const int d = 32 * k + lane;
      if (d >= VALUE_DIM) continue;
      float x = 0.0f;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) x += factors[w] * merged[(w * COLUMNS + c) * WIDTH + d];
      to[d] = x;
    }
    if (!lane) totals[job.at(c)] = {top + (headers ? headers[c].bias : 0.0f), total};
  }
}

// Of the tiles from `begin` to `end`, the tokens of a range.
__device__ void attend_packed(
    const Job& job, const Tables& tables, int begin, int end, const Range& range, const signed char* prepared, const Header* headers,
    float cap, float2* totals, float* outputs, char* shared) {
  Place place;
  const HeadTable keys(tables.key_segments, KEY_WORDS, job.head, KEY_ROW);
  const HeadTable values(tables.value_segments, VALUE_WORDS, job.head, VALUE_ROW);
  // The compiler learns that all lanes have the same: it then adds what only depends on it once.
  const int warp = SEGMENTS ? __shfl_sync(ALL, threadIdx.x / 32, 0) : threadIdx.x / 32, row = place.row, part = place.part;
  const unsigned ring = kept(__cvta_generic_to_shared(shared) + warp * RING);
  const int each = (end - begin + WARPS - 1) / WARPS;
  const int first = min(end, begin + warp * each), last = min(end, first + each);

  Cursor cursor = {tables.key + job.batch * tables.key_pages, tables.value + job.batch * tables.value_pages,
                   tables.key_base, tables.value_base, tables.key_unit, tables.value_unit, job.head, job.heads, place.lane,
                   keys.row, values.row, keys.start, values.start, int(min(tables.key_pages, tables.value_pages))};
  if (first < last) cursor.next_key = cursor.keys[first * TILE / PAGE], cursor.next_value = cursor.values[first * TILE / PAGE];
  #pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (first + i < last) cursor.fetch(first + i, ring + i * STAGE);
    end_group();
  }
  if constexpr (SEGMENTS) place.read(keys, values, tables.scales);  // while copies are on their way

  wait_for_previous();
  const Count column = ((Count(job.batch) * job.heads + job.head) * job.tiles + job.tile) * COLUMNS;
  Query query;
  #pragma unroll
  for (int set = 0; set < SETS; set++) {
    const signed char* bytes = prepared + (column + 4 * set) * COLUMN + row * (COLUMN / 2);
    #pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
      unsigned(&words)[4] = query.words[set][chunk];
      const signed char* from = bytes + 4 * FIELDS * key_word(chunk, part);
      if constexpr (FIELDS == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
      } else {
        for (int field = 0; field < FIELDS; field++) words[field] = reinterpret_cast<const unsigned*>(from)[field];
      }
    }
    #pragma unroll
    for (int group = 0; group < KEY_GROUPS; group++) query.sums[group][set] = headers[column + 4 * set + part].sums[group];
    query.biases[set] = headers[column + 4 * set + part].bias, query.units[set] = headers[column + 4 * set + part].unit;
  }
  query.cap = cap;

  State state = {};
  int slot = 0;
  for (int tile = first; tile < last; tile++) {
    wait_groups<STAGES - 2>();
    __syncwarp();  // all lanes' copies have arrived, and nobody reads the stage before any more
    const int ahead = tile + STAGES - 1, free = slot ? slot - 1 : STAGES - 1;
    if (ahead < last) cursor.fetch(ahead, ring + free * STAGE);
    end_group();
    process(state, ring + slot * STAGE, tile * TILE, range, query, place, tile == first);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  wait_groups<0>();
  let_next_start();

  // The sum over the rows that other lanes have.
  #pragma unroll
  for (int step = 4; step < 32; step *= 2)
    #pragma unroll
    for (int set = 0; set < SETS; set++) {
      state.sum[set] += __shfl_xor_sync(ALL, state.sum[set], step);
      #pragma unroll
      for (int group = 0; group < VALUE_GROUPS; group++)
        state.offsets[group][set] += __shfl_xor_sync(ALL, state.offsets[group][set], step);
    }

  __syncthreads();
  float* merged = reinterpret_cast<float*>(shared);
  #pragma unroll
  for (int set = 0; set < SETS; set++) {
    float* to = merged + (warp * COLUMNS + 4 * set + part) * WIDTH;
#if SEGMENTS
    int4 slots[VALUE_CHUNKS];
    #pragma unroll
    for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++) slots[chunk] = values.slots[8 * chunk + row];  // all at once, before any store
    for (int d = row; d < VALUE_DIM; d += 8) to[d] = 0.0f;
    // Other lanes may have the second pieces of a lane's codes.
    #pragma unroll
    for (int second = 0; second < 2; second++) {
      __syncwarp();
      #pragma unroll
      for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++)
        #pragma unroll
        for (int i = 0; i < 8; i++) {
          const Piece piece(slots[chunk], i / 4, i % 4);
          const float product = column_sum(state, set, 4 * chunk + i / 2, i % 2);
          const float sum = 16777216.0f * product + piece.middle() * state.offsets[0][set];
          if (piece.mask && piece.second == second) to[piece.channel] += piece.factor * sum;
        }
    }
#else
    #pragma unroll
    for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++)
      #pragma unroll
      for (int field = 0; field < FIELDS; field++)
        #pragma unroll
        for (int byte = 0; byte < 4; byte++) {
          const int word = 8 * chunk + row;
          if (word >= VALUE_WORDS) continue;
          float offset = state.offsets[0][set];
          #pragma unroll
          for (int group = 1; group < VALUE_GROUPS; group++)
            if (value_group(word, field) == group) offset = state.offsets[group][set];
          const float power = 16777216.0f / (1 << BITS * field);
          const float product = column_sum(state, set, 2 * (FIELDS * chunk + field) + byte / 2, byte % 2);
          to[channel<VALUE_DIM>(word, byte, field)] = power * product + offset;
        }
#endif
    if (!row) to[VALUE_DIM] = first < last ? state.top[set] : LOWEST, to[VALUE_DIM + 1] = state.sum[set];
  }
  merge_warps(job, SOFT_CAP ? nullptr : headers + column, merged, totals, outputs);
}

// Which exact tokens are read, from `begin` on, at most IN_SLOT. Of n query tokens, number i does not read the `newest` * (n - 1 - i) last
// ones, and as many more of the first ones, at most `moves`.
struct Exact {
  int begin, length, count, start, skipped, newest, tokens;  // skipped: those before are read by no query
  Count at;                                                   // of the first row

  __device__ Exact(const Job& job, const Rows& rows, int begin, int newest, int moves)
      : begin(begin), length(rows.lengths ? rows.lengths[job.batch] : rows.room * rows.pieces), count(min(IN_SLOT, length - begin)),
        start(rows.starts ? rows.starts[job.batch] - begin : 0), skipped(start - moves), newest(newest), tokens(job.tokens) {
    const int room = rows.room;
    const bool has_slot = rows.slots && begin < room * rows.pieces;
    const Count slot = has_slot ? rows.slots[job.batch * rows.pieces + begin / room] : job.batch;
    at = (slot * job.heads + job.head) * room + begin % room;
  }
  __device__ bool has(int token) const { return token >= skipped && token < count; }
  __device__ bool is_read(int token, int column) const {
    const int later = newest * (tokens - 1 - column % tokens);
    return token >= max(skipped, start - later) && begin + token < length - later;
  }
};

// The exact tokens of a job, in chunks of WINDOW tokens: `sinks` of the sink, and `recents` of the last ones.
struct Windows {
  Rows sink, recent;
  int sinks, recents, moves;

  __device__ Rows rows(int chunk) const {
    const bool early = chunk < sinks;
    return {early ? sink.key : recent.key, early ? sink.value : recent.value, early ? sink.lengths : recent.lengths,
            early ? sink.starts : recent.starts, early ? sink.slots : recent.slots, early ? sink.room : recent.room,
            early ? sink.pieces : recent.pieces};
  }
  __device__ Exact exact(const Job& job, int chunk) const {  // of this warp
    const bool early = chunk < sinks;
    const int begin = (early ? chunk : chunk - sinks) * WINDOW + threadIdx.x / 32 * IN_SLOT % WINDOW;
    return Exact(job, rows(chunk), begin, !early, early ? 0 : moves);
  }
};

#if TYPE
__device__ uint4 read_piece(const Element* from, bool exists) { return exists ? *reinterpret_cast<const uint4*>(from) : uint4{}; }

// A warp's part of the exact tokens. Lanes read pieces of eight channels of a row. So products take channels and tokens in another
// order than they have: keys and queries in the same one. Sums are of columns 2 `part` and the next.
struct ExactSums {
  static constexpr int KEYS = (KEY_DIM + 31) / 32, VALUES = (VALUE_DIM + 63) / 64;  // pieces of a row that a lane has
  uint4 queries[KEYS];
  float tops[2] = {LOWEST, LOWEST}, sums[2] = {}, products[VALUES][4][4] = {};  // by two channels of each piece, as they come out
  int row, part, first;                                                         // first: of eight columns

  __device__ ExactSums(const Job& job, int eight, const Element* query, const Strides& strides)
      : row(threadIdx.x % 32 / 4), part(threadIdx.x % 4), first(job.tile * COLUMNS + eight) {
    const bool is_column = row < COLUMNS && first + row < job.columns;
    const Element* of = query + (is_column ? strides.at(job.batch, job.head, job.columns, job.tokens, first + row) : 0);
    #pragma unroll
    for (int i = 0; i < KEYS; i++) {
      const int d = 32 * i + 8 * part;
      queries[i] = read_piece(of + d, is_column && d < KEY_DIM);
    }
  }

  __device__ void add(const Rows& rows, const Exact& exact, float scale, float cap) {
    uint4 keys[KEYS][2];
    unsigned values[VALUES][4][4];  // by word, and token
    #pragma unroll
    for (int i = 0; i < KEYS; i++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int d = 32 * i + 8 * part, token = row + 8 * r;
        keys[i][r] = read_piece(rows.key + (exact.at + token) * KEY_DIM + d, exact.has(token) && d < KEY_DIM);
      }
    // Values are on their way while keys are compared.
    #pragma unroll
    for (int i = 0; i < VALUES; i++)
      #pragma unroll
      for (int t = 0; t < 4; t++) {
        const int d = 64 * i + 8 * row, token = 2 * part + t % 2 + t / 2 * 8;
        const uint4 x = read_piece(rows.value + (exact.at + token) * VALUE_DIM + d, exact.has(token) && d < VALUE_DIM);
        values[i][0][t] = x.x, values[i][1][t] = x.y, values[i][2][t] = x.z, values[i][3][t] = x.w;
      }
    float scores[4] = {};
    #pragma unroll
    for (int i = 0; i < KEYS; i++) {
      multiply_exact(scores, keys[i][0].x, keys[i][1].x, keys[i][0].y, keys[i][1].y, queries[i].x, queries[i].y);
      multiply_exact(scores, keys[i][0].z, keys[i][1].z, keys[i][0].w, keys[i][1].w, queries[i].z, queries[i].w);
    }
    // Numbers are of tokens `row` and `row` + 8.
    #pragma unroll
    for (int c = 0; c < 2; c++) {
      float top = tops[c];
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        float& score = scores[2 * r + c];
        const bool is_read = exact.is_read(row + 8 * r, first + 2 * part + c);
        score = is_read ? soft_capped(score * (scale * LOG2E), cap) : MINUS_INFINITY;
        top = fmaxf(top, score);
      }
      #pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
      float sum = 0.0f;
      #pragma unroll
      for (int r = 0; r < 2; r++) sum += scores[2 * r + c] = exp2_of(scores[2 * r + c] - top);
      #pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(ALL, sum, step);
      const float factor = exp2_of(tops[c] - top);
      tops[c] = top, sums[c] = factor * sums[c] + sum;
      #pragma unroll
      for (int i = 0; i < VALUES; i++)
        #pragma unroll
        for (int m = 0; m < 4; m++) products[i][m][c] *= factor, products[i][m][2 + c] *= factor;
    }
    // A weight is the sum of two numbers: these tokens often have most of the weight.
    unsigned weights[2][2];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const float low = scores[2 * r], high = scores[2 * r + 1];
      const unsigned pair = element_pair(low, high);
      weights[0][r] = transpose(pair), weights[1][r] = transpose(element_pair(low - element(pair & 0xffff), high - element(pair >> 16)));
    }
    #pragma unroll
    for (int i = 0; i < VALUES; i++)
      #pragma unroll
      for (int m = 0; m < 4; m++) {
        const unsigned(&words)[4] = values[i][m];
        #pragma unroll
        for (int w = 0; w < 2; w++)
          multiply_exact(products[i][m], __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[0], words[1], 0x7632),
                         __byte_perm(words[2], words[3], 0x5410), __byte_perm(words[2], words[3], 0x7632), weights[w][0], weights[w][1]);
      }
  }

  __device__ void save(float* merged) const {  // [columns][WIDTH]
    if (2 * part >= COLUMNS) return;
    #pragma unroll
    for (int i = 0; i < VALUES; i++)
      #pragma unroll
      for (int m = 0; m < 4; m++) {
        const int d = 64 * i + 8 * row + 2 * m;
        #pragma unroll
        for (int k = 0; k < 4; k++)
          if (d < VALUE_DIM) merged[(2 * part + k % 2) * WIDTH + d + k / 2] = products[i][m][k];
      }
    #pragma unroll
    for (int c = 0; c < 2; c++)
      if (!row) {
        float* to = merged + (2 * part + c) * WIDTH + VALUE_DIM;
        to[0] = tops[c], to[1] = sums[c];
      }
  }
};

__device__ void attend_exact(Job job, const Blocks& blocks, int part, const Windows& windows, int begin, int end, const Element* query,
                             const Strides& strides, float scale, float cap, float2* totals, float* outputs, char* shared) {
  float* merged = reinterpret_cast<float*>(shared);
  #pragma unroll 1
  for (int eight = 0; eight < min(Count(COLUMNS), job.columns - job.tile * COLUMNS); eight += 8) {
    ExactSums sums(job, eight, query, strides);
    #pragma unroll 1
    for (int chunk = begin; chunk < end; chunk++) sums.add(windows.rows(chunk), windows.exact(job, chunk), scale, cap);
    sums.save(merged + (threadIdx.x / 32 * COLUMNS + eight) * WIDTH);
  }
  wait_for_previous();
  job.place = blocks.share(job.batch).first + part;
  merge_warps(job, nullptr, merged, totals, outputs);
}
#else
// Of each token, COMPARERS threads have a part of the key.
__device__ void attend_exact(Job job, const Blocks& blocks, int part, const Windows& windows, int chunk, int, const Element* query,
                             const Strides& strides, float scale, float cap, float2* totals, float* outputs, char* shared) {
  const Exact exact = windows.exact(job, chunk);
  const Rows rows = windows.rows(chunk);
  constexpr int SHARE = KEY_DIM / COMPARERS, PADDED = SHARE + 4;
  static_assert((COMPARERS * PADDED + WINDOW + 2) * COLUMNS * sizeof(float) <= SHARED && WINDOW <= 32, "too large");
  float* queries = reinterpret_cast<float*>(shared);                     // [COLUMNS][COMPARERS][PADDED]
  float* scores = queries + COLUMNS * COMPARERS * PADDED;                // [WINDOW][COLUMNS]
  float2* merged = reinterpret_cast<float2*>(scores + WINDOW * COLUMNS);  // [COLUMNS]
  const int first = job.tile * COLUMNS, columns = min(Count(COLUMNS), job.columns - first);
  const int token = threadIdx.x / COMPARERS, side = threadIdx.x % COMPARERS;
  for (int i = threadIdx.x; i < COLUMNS * KEY_DIM; i += THREADS) {
    const int c = i / KEY_DIM, d = i % KEY_DIM;
    const Count from = strides.at(job.batch, job.head, job.columns, job.tokens, first + c);
    const float x = c < columns ? element(query[from + d]) : 0.0f;
    queries[(c * COMPARERS + d / SHARE) * PADDED + d % SHARE] = x * scale * LOG2E;
  }
  float key[SHARE] = {};
  if (exact.has(token)) load<SHARE>(key, rows.key + (exact.at + token) * KEY_DIM + side * SHARE);
  // Values are on their way while keys are compared.
  Element values[WINDOW];
  const Element* value = rows.value + exact.at * VALUE_DIM;
  #pragma unroll
  for (int i = 0; i < WINDOW; i++)
    values[i] = exact.has(i) && threadIdx.x < VALUE_DIM ? value[i * VALUE_DIM + threadIdx.x] : 0;
  wait_for_previous();
  job.place = blocks.share(job.batch).first + part;
  __syncthreads();
  #pragma unroll 2
  for (int c = 0; c < COLUMNS; c++) {
    const float4* of = reinterpret_cast<const float4*>(queries + (c * COMPARERS + side) * PADDED);
    float score = 0.0f;
    #pragma unroll
    for (int d = 0; d < SHARE; d += 4) {
      const float4 x = of[d / 4];
      score += key[d] * x.x + key[d + 1] * x.y + key[d + 2] * x.z + key[d + 3] * x.w;
    }
    #pragma unroll
    for (int step = 1; step < COMPARERS; step *= 2) score += __shfl_xor_sync(ALL, score, step);
    if (side == c % COMPARERS) scores[token * COLUMNS + c] = exact.is_read(token, first + c) ? soft_capped(score, cap) : MINUS_INFINITY;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int c = threadIdx.x / 32; c < COLUMNS; c += WARPS) {
    float score = lane < WINDOW ? scores[lane * COLUMNS + c] : MINUS_INFINITY, top = fmaxf(score, LOWEST);
    #pragma unroll
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    score = exp2_of(score - top);
    if (lane < WINDOW) scores[lane * COLUMNS + c] = score;
    #pragma unroll
    for (int step = 16; step; step /= 2) score += __shfl_xor_sync(ALL, score, step);
    if (!lane) merged[c] = {top, score};
  }
  __syncthreads();
  for (int d = threadIdx.x; d < VALUE_DIM; d += THREADS) {
    if (d >= THREADS)
      #pragma unroll
      for (int i = 0; i < WINDOW; i++) values[i] = exact.has(i) ? value[i * VALUE_DIM + d] : 0;
    float sums[COLUMNS] = {};
    #pragma unroll
    for (int i = 0; i < WINDOW; i++) {
      const float x = element(values[i]);
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++) sums[c] += scores[i * COLUMNS + c] * x;
    }
    for (int c = 0; c < columns; c++) outputs[job.at(c) * VALUE_DIM + d] = sums[c];
  }
  if (threadIdx.x < columns) totals[job.at(threadIdx.x)] = merged[threadIdx.x];
}
#endif

// Grid: x = `Blocks::total`, y = KV heads times tiles of columns. `floors` [B] or null: how many of its packed tokens all queries of a
// request read, where later ones read as many more packed and fewer recent tokens.
// totals [H, padded, blocks] and outputs [H, padded, blocks, VALUE_DIM] are float32.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(
    const Element* query, Count strides_row, Count strides_head, Count strides_token, Count columns, Count tokens,
    const signed char* prepared, const Header* headers, const Address* key_table, Address key_base, Count key_unit,
    Count key_pages, const Address* value_table, Address value_base, Count value_unit, Count value_pages, const int* segments_key,
    const int* segments_value, const float* segments_scales, const int* blocks_starts, const int* blocks_lengths, Count blocks_requests,
    Count blocks_windows, Count blocks_splits, Count blocks_most, int4* blocks_table, const int* floors, Count tiles,
    const Element* sink_key, const Element* sink_value, const int* sink_lengths, const int* sink_starts, const int* sink_slots,
    Count sink_room, Count sink_pieces, const Element* recent_key, const Element* recent_value, const int* recent_lengths,
    const int* recent_starts, const int* recent_slots, Count recent_room, Count recent_pieces, double scale, double cap, float2* totals,
    float* outputs) {
  __shared__ alignas(128) char shared[SHARED];
  const int block = blockIdx.x, windows = blocks_windows;
  const Blocks blocks(blocks_starts, blocks_lengths, blocks_requests, blocks_windows, blocks_splits, blocks_most, blocks_table);
  const int exact_block = block - blocks.packed();
  const bool is_exact = exact_block >= 0;
  if (!is_exact && blocks.requests > 1) wait_for_previous();  // for the plan
  const Blocks::Work work = is_exact ? Blocks::Work{exact_block / windows} : blocks.work(block);
  if (work.request < 0) return;
  const Job job = {int(blockIdx.y / tiles), int(gridDim.y / tiles), int(blockIdx.y % tiles), int(tiles), work.request,
                   work.place, int(gridDim.x), columns, tokens};
  const float capped = float(cap) * LOG2E;
  const int length = blocks.lengths[job.batch], floor = floors ? floors[job.batch] : length;
  if (is_exact) {
    const int sinks = (sink_room * sink_pieces + WINDOW - 1) / WINDOW, recents = (recent_room * recent_pieces + WINDOW - 1) / WINDOW;
    const Windows all = {{sink_key, sink_value, sink_lengths, sink_starts, sink_slots, int(sink_room), int(sink_pieces)},
                         {recent_key, recent_value, recent_lengths, recent_starts, recent_slots, int(recent_room), int(recent_pieces)},
                         sinks, recents, min(int(tokens) - 1, length - floor)};
    const Strides strides = {strides_row, strides_head, strides_token};
    const int part = exact_block % windows, each = Blocks::divided(sinks + recents, windows), begin = part * each;
    const int end = min(begin + each, sinks + recents);
    attend_exact(job, blocks, part, all, begin, end, query, strides, scale, capped, totals, outputs, shared);
    return;
  }
  const int exact = floors ? recent_lengths[job.batch] - recent_starts[job.batch] : tokens;
  const Range range = {start_of(blocks.starts, job.batch), floor, length, exact, int(tokens), job.tile * COLUMNS};
  const Tables tables = {key_table, value_table, key_base, value_base, key_unit, value_unit, key_pages, value_pages,
                         segments_key, segments_value, segments_scales};
  attend_packed(job, tables, work.begin, work.end, range, prepared, headers, capped, totals, outputs, shared);
}

// ---- merging ---------------------------------------------------------------------------------------------------------------

// Merge the parts of TOGETHER columns, by as many groups of threads: packed parts, which come after the exact ones, are rotated
// back first. Grid: x = columns / TOGETHER, y = KV heads, z = batch. matrix [H, VALUE_DIM, VALUE_DIM],
// mean [H, VALUE_DIM] or null, sinks [H_q] or null (logits that take part in the softmax and read nothing), result
// [B, H_q, tokens, VALUE_DIM].
constexpr int LANES = VALUE_DIM <= 128 ? 128 : 256, GROUPS = 512 / LANES, MOST_TOTALS = 1024;  // columns times parts, of a block

template <int TOGETHER>
__device__ void merge(
    const float2* totals, const float* outputs, const Blocks& blocks, int columns, int padded, int tokens, const float* matrix,
    const float* mean, const float* sinks, Element* result, const Strides& strides) {
  constexpr int D = VALUE_DIM, HELPERS = GROUPS / TOGETHER, SHARE = D / GROUPS;
  constexpr bool EARLY = SHARE <= 32;  // numbers of the matrix for a thread, where they fit into registers
  alignas(16) __shared__ float packed[LANES][GROUPS];
  __shared__ float exact[GROUPS][LANES], turned[GROUPS][TOGETHER][LANES];
  __shared__ float2 all_totals[MOST_TOTALS];
  const int head = blockIdx.y, batch = blockIdx.z;
  const int d = threadIdx.x % LANES, group = threadIdx.x / LANES, helper = group % HELPERS, base = group - helper;
  const int column = blockIdx.x * TOGETHER + group / HELPERS;
  const bool works = column < columns && d < D;
  const float* rows = matrix + (Count(head) * D + group) * D + d;  // of this group: every GROUPS-th one
  float numbers[EARLY ? SHARE : 1] = {};
  if (EARLY && d < D)
    #pragma unroll
    for (int i = 0; i < (EARLY ? SHARE : 0); i++) numbers[i] = rows[i * GROUPS * D];
  wait_for_previous();

  const Blocks::Share own = blocks.share(batch);
  const int windows = blocks.windows, parts = windows + own.count, all = blocks.total();
  const Count of_head = Count(head) * padded;
  constexpr int READING = 512 / TOGETHER;  // threads of a column
  const int reading = threadIdx.x / READING;
  const float2* read = totals + (of_head + blockIdx.x * TOGETHER + reading) * all + own.first;
  for (int i = threadIdx.x % READING; i < parts; i += READING) all_totals[reading * parts + i] = read[i];
  __syncthreads();
  const float2* mine = all_totals + group / HELPERS * parts;
  const float* of = outputs + ((of_head + column) * all + own.first) * D + d;
  // Every warp has one column, and finds out for itself what all its threads need.
  const float sink = sinks && column < columns ? sinks[head * (columns / tokens) + column / tokens] * LOG2E : LOWEST;
  float top = sink, total = 0.0f, share = 0.0f;
  for (int i = threadIdx.x % 32; i < parts; i += 32) top = fmaxf(top, mine[i].x);
  #pragma unroll
  for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
  for (int i = threadIdx.x % 32; i < parts; i += 32) {
    const float sum = exp2_of(mine[i].x - top) * mine[i].y;
    total += sum, share += i < windows ? 0.0f : sum;
  }
  #pragma unroll
  for (int step = 16; step; step /= 2)
    total += __shfl_xor_sync(ALL, total, step), share += __shfl_xor_sync(ALL, share, step);
  total += sinks ? exp2_of(sink - top) : 0.0f;
  float of_packed = 0.0f, of_exact = 0.0f;
  if (works)
    #pragma unroll 8
    for (int i = helper; i < parts; i += HELPERS) {
      const float x = exp2_of(mine[i].x - top) * of[i * D];
      of_exact += i < windows ? x : 0.0f, of_packed += i < windows ? 0.0f : x;
    }
  packed[d][group] = of_packed, exact[group][d] = of_exact;
  __syncthreads();
  // Every group multiplies some rows of the matrix, for all columns.
  float sums[TOGETHER] = {};
  if (d < D)
    #pragma unroll (EARLY ? SHARE : 16)
    for (int i = 0; i < SHARE; i++) {
      const float number = EARLY ? numbers[EARLY ? i : 0] : rows[i * GROUPS * D];
      #pragma unroll
      for (int c = 0; c < TOGETHER; c++) {
        const float* of_column = packed[i * GROUPS + group] + c * HELPERS;
        float x = of_column[0];
        #pragma unroll
        for (int h = 1; h < HELPERS; h++) x += of_column[h];
        sums[c] += x * number;
      }
    }
  #pragma unroll
  for (int c = 0; c < TOGETHER; c++) turned[group][c][d] = sums[c];
  __syncthreads();
  if (!works || helper) return;
  float x = mean ? share * mean[head * D + d] : 0.0f;
  #pragma unroll
  for (int h = 0; h < HELPERS; h++) x += exact[base + h][d];
  #pragma unroll
  for (int g = 0; g < GROUPS; g++) x += turned[g][group / HELPERS][d];
  // A row of padding reads nothing.
  result[strides.at(batch, head, columns, tokens, column) + d] = rounded(total == 0.0f ? 0.0f : x / total);
}

// One column a block, for few of them, or as many as it has groups of threads, which then share what they read of the matrix.
extern "C" __global__ void __launch_bounds__(512, 2) finish(
    const float2* totals, const float* outputs, const int* blocks_starts, const int* blocks_lengths, Count blocks_requests,
    Count blocks_windows, Count blocks_splits, Count blocks_most, int4* blocks_table, Count columns, Count padded, Count tokens,
    const float* matrix, const float* mean, const float* sinks, Element* result, Count strides_row, Count strides_head,
    Count strides_token) {
  const Strides strides = {strides_row, strides_head, strides_token};
  const Blocks blocks(blocks_starts, blocks_lengths, blocks_requests, blocks_windows, blocks_splits, blocks_most, blocks_table);
  merge<1>(totals, outputs, blocks, columns, padded, tokens, matrix, mean, sinks, result, strides);
}

extern "C" __global__ void __launch_bounds__(512, 2) finish_many(
    const float2* totals, const float* outputs, const int* blocks_starts, const int* blocks_lengths, Count blocks_requests,
    Count blocks_windows, Count blocks_splits, Count blocks_most, int4* blocks_table, Count columns, Count padded, Count tokens,
    const float* matrix, const float* mean, const float* sinks, Element* result, Count strides_row, Count strides_head,
    Count strides_token) {
  const Strides strides = {strides_row, strides_head, strides_token};
  const Blocks blocks(blocks_starts, blocks_lengths, blocks_requests, blocks_windows, blocks_splits, blocks_most, blocks_table);
  merge<GROUPS>(totals, outputs, blocks, columns, padded, tokens, matrix, mean, sinks, result, strides);
}
