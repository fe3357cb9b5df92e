// What a warp of `attend` does with a tile of packed tokens, and the columns and bytes of which all kernels of attention.cu know.
// That file has the macros and the method.

#include "launches.cu"
#include "segment_rows.cu"
#include "tensor_cores.cu"

constexpr int SETS = COLUMNS / 4;  // of columns that one product of keys takes
// A product of values takes the weights of two sets, rounded to float16, where rows have 16 bits, or else both parts of a weight.
constexpr bool PAIRED = TYPE && SETS > 1;
constexpr int PRODUCTS = PAIRED ? SETS / 2 : SETS;
constexpr int TILE = 32, HALVES = TILE / 16;  // tokens; a product takes 16
constexpr int BITS = SEGMENTS ? 4 : 2, FIELDS = 8 / BITS;  // of a code, and codes of a byte
constexpr int KEY_WORDS = KEY_SLOTS ? KEY_SLOTS : KEY_DIM / FIELDS / 4;  // of a row
constexpr int VALUE_WORDS = VALUE_SLOTS ? VALUE_SLOTS : VALUE_DIM / FIELDS / 4;
constexpr int KEY_GROUPS = KEY_DIM / KEY_GROUP, VALUE_GROUPS = VALUE_DIM / VALUE_GROUP;
constexpr int LAST_FIELD = 8 - BITS;  // its first bit in a byte
constexpr int KEY_CHUNKS = (KEY_WORDS + 3) / 4, VALUE_CHUNKS = (VALUE_WORDS + 7) / 8;
constexpr int SUMS = 2 * FIELDS * VALUE_CHUNKS;  // products that a column takes
constexpr int PREPARED = KEY_CHUNKS * 16 * FIELDS;  // numbers of a prepared column
constexpr int COLUMN = PREPARED * 2;  // its bytes: an upper and a lower one a number

#if HALF
typedef unsigned short Metadata;
#else
typedef float Metadata;
#endif

// ---- bytes of a page, and of a tile of it in shared memory -----------------------------------------------------------------

constexpr int KEY_ROW = SEGMENTS ? KEY_ROOM : 4 * KEY_WORDS, VALUE_ROW = SEGMENTS ? VALUE_ROOM : 4 * VALUE_WORDS;  // bytes of codes
constexpr int NUMBER = SEGMENTS ? 0 : sizeof(Metadata);  // with segments, a row begins with its scale
constexpr int KEY_NUMBERS = KEY_GROUPS * NUMBER, VALUE_NUMBERS = VALUE_GROUPS * NUMBER;  // of a token's scales
constexpr int VALUE = TILE * KEY_ROW, KEY_SCALE = VALUE + TILE * VALUE_ROW;
constexpr int VALUE_SCALE = KEY_SCALE + 2 * TILE * KEY_NUMBERS;  // offsets follow scales
constexpr int STAGE = SEGMENTS ? TILE * BOTH_ROOM : VALUE_SCALE + 2 * TILE * VALUE_NUMBERS;
// A row that does not fill its chunk is read a little beyond its end, where a query of zeros or no output belongs.
constexpr int MARGIN = 64;
constexpr int ROOM = 48 * 1024 - MARGIN;  // what a block gets without asking for more
constexpr int THREADS = 32 * WARPS;
constexpr int COMPARERS = 4, WINDOW = TYPE ? 16 * WARPS : THREADS / COMPARERS;  // threads for an exact float32 key; exact tokens of a block
constexpr int IN_SLOT = TYPE ? 16 : WINDOW;  // exact tokens that lie in one slot: a warp's, or a block's
constexpr int STAGES = ROOM / WARPS / STAGE >= 4 ? 4 : ROOM / WARPS / STAGE;
constexpr int RING = STAGES * STAGE, MERGED = (COLUMNS * (VALUE_DIM + 2)) * sizeof(float);
constexpr int SHARED = WARPS * (RING > MERGED ? RING : MERGED) + MARGIN;
// Blocks that a multiprocessor should hold, as far as their registers go.
constexpr bool NARROW = VALUE_CHUNKS == 1 && KEY_CHUNKS < 3 && KEY_GROUPS * VALUE_GROUPS == 1;
constexpr int OF_SETS = SETS < 3 ? 5 - SETS : 2, OF_SEGMENTS = VALUE_CHUNKS < 3 ? OF_SETS : SETS == 1 && VALUE_CHUNKS < 5 ? 3 : 2;
constexpr int BLOCKS = SEGMENTS ? OF_SEGMENTS : NARROW ? OF_SETS : 2;
static_assert(STAGES >= 2 && SHARED <= ROOM + MARGIN, "too large");

__device__ float read_number(unsigned from, unsigned index) {  // scale or offset
#if HALF
  float x;
  asm volatile("{ .reg .b16 h; ld.shared.b16 h, [%1]; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(from + 2 * index));
  return x;
#else
  return __uint_as_float(read_word(from + 4 * index));
#endif
}

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
template <int DIM>
__host__ __device__ constexpr int channel(int word, int byte, int field) {
  return STRIDED ? field * (DIM / FIELDS) + 4 * word + byte : 4 * FIELDS * word + FIELDS * byte + field;
}

// The word of a key that lane group `part` of four reads for a chunk. Neighbouring words allow wide reads; where words differ in their group of channels, a chunk should have few groups.
__host__ __device__ constexpr int key_word(int chunk, int part) {
  return SEGMENTS || (KEY_GROUPS > 1 && !STRIDED) ? 4 * chunk + part : KEY_CHUNKS * part + chunk;
}

__host__ __device__ constexpr int key_group(int word, int field) { return SEGMENTS ? 0 : channel<KEY_DIM>(word, 0, field) / KEY_GROUP; }
__host__ __device__ constexpr int value_group(int word, int field) { return SEGMENTS ? 0 : channel<VALUE_DIM>(word, 0, field) / VALUE_GROUP; }

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

__device__ constexpr unsigned byte_mask(int field) { return 0x01010101u * ((1 << BITS) - 1) << BITS * field; }
__device__ constexpr unsigned half_mask(int field) { return 0x00010001u * ((1 << BITS) - 1) << BITS * field; }

// Byte `byte` of two words, each at the bottom of one half of the result; the other bytes are not cleared.
template <int BYTE>
__device__ unsigned bytes_of(unsigned low, unsigned high) {
  return __byte_perm(low, high, BYTE * 0x0011 + (BYTE + 4) * 0x1100);
}

// ---- segments --------------------------------------------------------------------------------------------------------------

// Codes have any width. Pieces of them are multiplied where they lie, as fields are: a slot is a word of the row with two masks for its
// bytes, which take pieces as if they were fields of 4 bits. With the query, or the output, times what a piece counts in its code, all
// else is as it is for codes of 4 bits. codec/slots.py says which pieces a slot has, and writes the table of a head.
struct HeadTable {
  int row, start, used = 0;  // bytes of a row, first byte of a page, and slots
  const int4* slots;         // the first byte of a word, and two pieces

  __device__ HeadTable(const int* tables, int count, int head, int room) : row(room), start(head * PAGE * room) {
    if constexpr (SEGMENTS) {
      slots = reinterpret_cast<const int4*>(tables) + Count(head) * (1 + count) + 1;
      const int4 mine = slots[-1];
      row = mine.x, start = mine.y, used = mine.z;
    }
  }
};

struct Piece {
  int channel, mask;
  float factor;  // of the byte, as it is masked, in its code
  bool second;   // of two of a code

  __device__ Piece(const int4& slot, int field, int byte) {
    const int packed = field ? slot.z : slot.y, shift = (packed >> 9 & 31) - 8;
    channel = (packed & 511) + byte, mask = packed >> 16, factor = __int_as_float((127 + shift) << 23), second = shift > 0;
  }
  // What a number of the query is multiplied by: products of field 0 count 16 times.
  __device__ float weight(int field) const { return mask ? factor * (1 << 4 * field) : 0.0f; }
  // The share of the middle of its code's levels.
  __device__ float middle() const { return 0.5f * mask; }
};

// ---- packed tokens ---------------------------------------------------------------------------------------------------------

struct Tables {  // [B, key_pages] and [B, value_pages]: a page of number n begins n units after a base
  const Address *key, *value;
  Address key_base, value_base;
  Count key_unit, value_unit, key_pages, value_pages;
  const int *key_segments, *value_segments;  // tables of heads
  const float* scales;
};

// Where a warp is in the pages of its row, and what each lane copies from there.
struct Cursor {
  static constexpr int KEY_PIECES = TILE * KEY_NUMBERS / 16, VALUE_PIECES = TILE * VALUE_NUMBERS / 16;  // of scales: 16 bytes
  static constexpr int PIECES = 2 * (KEY_PIECES + VALUE_PIECES), ROUNDS = (PIECES + 31) / 32;

  const Address *keys, *values;
  Address key_base, value_base;
  Count key_unit, value_unit;
  int head, heads, lane;
  int key_row, value_row, key_start, value_start;  // of the head's rows
  int pages;  // that there are
  int left;   // tiles in this page
  Address key, value, numbers[ROUNDS + SEGMENTS];
  Address next_key, next_value;  // of the next page: read ahead, because nothing can be copied before they are known

  // Go to a tile.
  __device__ void turn(int tile) {
    constexpr int TILES = PAGE / TILE;
    const int page = tile / TILES, token = tile % TILES * TILE;
    left = TILES - tile % TILES;
    const Address this_key = key_base + next_key * key_unit, this_value = value_base + next_value * value_unit;
    if (page + 1 < pages) next_key = keys[page + 1], next_value = values[page + 1];
    const Count rows = Count(heads) * PAGE, row = Count(head) * PAGE + token;
    key = this_key + key_start + token * key_row + lane * 16;
    value = this_value + value_start + token * value_row + lane * 16;
    // Sections follow each other: codes, scales and offsets.
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      // Scales of keys and their offsets, which follow all scales of the page, and then those of values.
      const int piece = i * 32 + lane;
      const bool of_keys = piece < 2 * KEY_PIECES;
      const int index = of_keys ? piece : piece - 2 * KEY_PIECES, count = of_keys ? KEY_PIECES : VALUE_PIECES;
      const Count width = of_keys ? KEY_NUMBERS : VALUE_NUMBERS, codes = of_keys ? KEY_ROW : VALUE_ROW;
      numbers[i] = (of_keys ? this_key : this_value) + rows * codes + row * width +
                   (index < count ? index * 16 : rows * width + (index - count) * 16);
    }
  }

  // Start copying the next tile to this address in shared memory.
  __device__ void fetch(int tile, unsigned stage) {
    if (!left) turn(tile);
    left--;
    copy_rows<KEY_ROW>(stage, key, key_row);
    copy_rows<VALUE_ROW>(stage + TILE * key_row, value, value_row);
    key += TILE * key_row, value += TILE * value_row;
    #pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const int piece = i * 32 + lane;
      if (PIECES % 32 == 0 || piece < PIECES) copy_async(stage + KEY_SCALE + piece * 16, numbers[i]);
      numbers[i] += TILE * (piece < 2 * KEY_PIECES ? KEY_NUMBERS : VALUE_NUMBERS);
    }
  }

  template <int ROW>  // the most bytes of a row
  __device__ void copy_rows(unsigned to, Address from, int row) {
    constexpr int PIECES = TILE * ROW / 16;
    #pragma unroll
    for (int i = 0; i < PIECES; i += 32)
      if ((!SEGMENTS && i + 32 <= PIECES) || i + lane < TILE / 16 * row) copy_async(to + (i + lane) * 16, from + i * 16);
  }
};

// The columns of a lane are `part` of every set, and its rows of a product are `row` and `row + 8`.
struct State {
  float top[SETS];                                  // what scores are compared with
  float sum[SETS];                                  // of weights, this lane's rows
  float offsets[VALUE_GROUPS][SETS];                // what the values' offsets add to the output
  float output[PRODUCTS][SUMS][4];                  // per field and pair of bytes, as products come out
};

// What a product has of this lane's column of a set, in one of its two rows.
__device__ float column_sum(const State& state, int set, int sum, int half) {
  const float(&sums)[4] = state.output[PAIRED ? set / 2 : set][sum];
  return PAIRED ? sums[2 * half + set % 2] : sums[2 * half] + sums[2 * half + 1];
}

// In which order products take the tokens of a tile. A token's number is the sum of these steps, each of which is a bit of it: for a lane's
// `part` (two bits), its odd rows, the second of its two rows in a half, and the second half. All lanes read at once, so the steps decide
// how many of them meet in a bank of shared memory: none, where a `part` is 8 words more than a multiple of 32 and `odd` 4.
struct Steps {
  int part = 1, odd = 4, second = 8, half = 16;

  __device__ void choose(int key_row, int value_row) {  // bytes of rows
    const int key = __ffs(key_row / 4 | 8) - 1, value = __ffs(value_row / 4 | 8) - 1, lowest = 3 - max(key, value);
    part = 1 << lowest, odd = value > key || !lowest ? 4 * part : part / 2;
    const int others = 31 & ~(3 * part | odd);
    second = others & -others, half = others ^ second;
  }
  __device__ int of_row(int row) const { return row / 2 * part + row % 2 * odd; }  // one of eight, of the first half
  __device__ int first_of(int in_half, int row) const { return in_half * half + row * second; }
};

// Where a lane reads in a stage, so that it is not computed for each.
struct Place {
  int lane, row, part, token;
  unsigned key, key_number, value, value_number;
  unsigned key_row, value_row, key_numbers, value_numbers;  // bytes from one token to the next
  Steps steps;
  // With segments:
  int key_used, value_used;  // slots
  unsigned key_words[KEY_CHUNKS], key_masks[KEY_CHUNKS][FIELDS], value_words[VALUE_CHUNKS], value_masks[VALUE_CHUNKS][FIELDS];
  unsigned key_scale, value_scale;  // masks of the words with numbers of scales: 0 where there are no rows
  float scale;                      // number lane % 16

  __device__ void read(const HeadTable& keys, const HeadTable& values, const float* scales) {
    key_row = key_numbers = keys.row, value_row = value_numbers = values.row;
    steps.choose(keys.row, values.row);
    token = steps.of_row(row);
    key_number = kept(token * key_row), value_number = kept(TILE * key_row + token * value_row);
    key_used = keys.used, value_used = values.used;
    key_scale = keys.row ? EACH_BYTE : 0, value_scale = values.row ? EACH_BYTE : 0, scale = scales[lane % 16];
    #pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
      const int4 slot = keys.slots[key_word(chunk, part)];
      key_words[chunk] = kept(token * key_row + slot.x);
      key_masks[chunk][0] = kept(EACH_BYTE * (slot.y >> 16)), key_masks[chunk][FIELDS - 1] = kept(EACH_BYTE * (slot.z >> 16));
    }
    #pragma unroll
    for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++) {
      const int4 slot = values.slots[8 * chunk + row];
      value_words[chunk] = kept(TILE * key_row + part * steps.part * value_row + slot.x);
      value_masks[chunk][0] = kept(0x00010001 * (slot.y >> 16)), value_masks[chunk][FIELDS - 1] = kept(0x00010001 * (slot.z >> 16));
    }
  }

  __device__ Place() : key_row(KEY_ROW), value_row(VALUE_ROW), key_numbers(KEY_NUMBERS), value_numbers(VALUE_NUMBERS) {
    lane = kept(threadIdx.x % 32);
    row = lane / 4, part = lane % 4, token = steps.of_row(row);
    key = kept(token * KEY_ROW + 4 * key_word(0, part)), value = kept(VALUE + part * VALUE_ROW + 4 * row);
    key_number = kept(KEY_SCALE + token * KEY_NUMBERS), value_number = kept(VALUE_SCALE + token * VALUE_NUMBERS);
  }
};

// The words of a lane in a key's row.
__device__ void read_words(unsigned (&words)[KEY_CHUNKS], unsigned from, const Place& place) {
  if constexpr (SEGMENTS) {
    #pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) words[chunk] = read_word(place.key_words[chunk] + from);
  } else if constexpr (KEY_WORDS == 8 && (KEY_GROUPS == 1 || STRIDED)) {
    const uint2 two = read_two(place.key + from);
    words[0] = two.x, words[1] = two.y;
  } else if constexpr (KEY_WORDS == 16 && (KEY_GROUPS == 1 || STRIDED)) {
    const uint4 four = read_four(place.key + from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else {
    #pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) words[chunk] = read_word(place.key + from + 4 * key_word(chunk, 0));
  }
}

// The scale of a row. With segments, its number lies in the word below the mask.
__device__ float read_scale(unsigned at, int group, const Place& place, unsigned mask) {
  return SEGMENTS ? __shfl_sync(ALL, place.scale, gathered(read_word(at) & mask)) : read_number(at, group);
}

struct Query {  // what a lane needs of it
  // For products: column lane / 4 of a set, of which even ones are upper bytes.
  unsigned words[SETS][KEY_CHUNKS][4];
  float sums[KEY_GROUPS][SETS], units[SETS], cap;
  float biases[SETS];  // of scores before they are capped
};

// Scores of a half, less `top`, for two rows of each set.
__device__ void compare(
    float (&scores)[SETS][2], unsigned stage, int half, const Place& place, const Query& query, const float (&top)[SETS]) {
  unsigned keys[2][KEY_CHUNKS];
  #pragma unroll
  for (int r = 0; r < 2; r++) read_words(keys[r], stage + place.steps.first_of(half, r) * place.key_row, place);
  #pragma unroll
  for (int group = 0; group < KEY_GROUPS; group++) {
    int products[SETS][4][4] = {};  // by field
    #pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk += 2) {
      if (!EVEN && 4 * chunk >= place.key_used) break;
      #pragma unroll
      for (int field = 0; field < FIELDS; field++) {
        constexpr bool ODD = KEY_CHUNKS % 2;
        const bool alone = ODD && chunk + 1 == KEY_CHUNKS;
        const int next = alone ? chunk : chunk + 1;
        const int members = key_members(chunk, field, group), others = alone ? members : key_members(next, field, group);
        if (!members && !others) continue;
        const unsigned mask = SEGMENTS ? place.key_masks[chunk][field] : byte_mask(field);
        const unsigned other = SEGMENTS ? place.key_masks[next][field] : mask;
        #pragma unroll
        for (int set = 0; set < SETS; set++) {
          unsigned b0 = query.words[set][chunk][field], b1 = query.words[set][next][field];
          if (members < 4 && key_group(key_word(chunk, place.part), field) != group) b0 = 0;
          if (others < 4 && key_group(key_word(next, place.part), field) != group) b1 = 0;
          if (alone)
            multiply(products[set][field], keys[0][chunk] & mask, keys[1][chunk] & mask, b0);
          else
            multiply(products[set][field], keys[0][chunk] & mask, keys[1][chunk] & mask, keys[0][next] & other,
                     keys[1][next] & other, b0, b1);
        }
      }
    }
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const unsigned at = place.key_number + (stage + place.steps.first_of(half, r) * place.key_numbers);
      float scale = read_scale(at, group, place, place.key_scale), offset = SEGMENTS ? 1.0f : read_number(at + TILE * KEY_NUMBERS, group);
      if (!MINIMUM) offset *= -scale;
      #pragma unroll
      for (int set = 0; set < SETS; set++) {
        // 2^LAST_FIELD times the product, whose upper and lower bytes are neighbours. At most 127 * 256 * 256 times the largest
        // code and 2^LAST_FIELD: 3 * 64 or 15 * 16, which fits.
        int product = 0;
        #pragma unroll
        for (int field = 0; field < FIELDS; field++) {
          const int(&of)[4] = products[set][field];
          product += (of[2 * r] * 256 + of[2 * r + 1]) * (1 << LAST_FIELD >> BITS * field);
        }
        // Before it is capped, a score is not compared with anything.
        const float base = group ? scores[set][r] : SOFT_CAP ? query.biases[set] : -top[set];
        scores[set][r] = scale * query.units[set] * float(product) + (offset * query.sums[group][set] + base);
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
      for (int i = 0; i < 4; i++)
        if (!PAIRED || i % 2 == set % 2) state.output[PAIRED ? set / 2 : set][sum][i] *= factor;
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
  unsigned pairs[VALUE_GROUPS][PRODUCTS][2];
  #pragma unroll
  for (int set = 0; set < SETS; set++) {
    state.sum[set] += weights[set][0] + weights[set][1];
    #pragma unroll
    for (int group = 0; group < VALUE_GROUPS; group++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const float scaled = weights[set][r] * values.scales[group][r];
        state.offsets[group][set] += weights[set][r] * values.offsets[group][r];
        if (PAIRED && set % 2) {
          const float other = weights[set - 1][r] * values.scales[group][r];
          pairs[group][set / 2][r] = transpose(half_pair(other, scaled));
        } else if (!PAIRED) {
          const float rest = scaled - from_half(half_pair(scaled, 0.0f) & 0xffff);
          pairs[group][set][r] = transpose(half_pair(scaled, rest));
        }
      }
  }
  #pragma unroll
  for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++) {
    if (!EVEN && 8 * chunk >= place.value_used) break;
    unsigned words[4];
    const unsigned at = SEGMENTS ? place.value_words[chunk] : place.value + 32 * chunk;
    #pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = read_word(at + (stage + (place.steps.first_of(half, i / 2) + i % 2 * place.steps.odd) * place.value_row));
    #pragma unroll
    for (int field = 0; field < FIELDS; field++)
      #pragma unroll
      for (int group = 0; group < VALUE_GROUPS; group++) {
        const int members = value_members(chunk, field, group);
        if (!members) continue;
        const bool none = members < 8 && value_group(8 * chunk + place.row, field) != group;
        const unsigned mask = none ? 0 : SEGMENTS ? place.value_masks[chunk][field] : half_mask(field);
        #pragma unroll
        for (int product = 0; product < PRODUCTS; product++) {
          float(*sums)[4] = state.output[product] + 2 * (FIELDS * chunk + field);
          const unsigned b0 = pairs[group][product][0], b1 = pairs[group][product][1];
          multiply(sums[0], bytes_of<0>(words[0], words[1]) & mask, bytes_of<1>(words[0], words[1]) & mask,
                   bytes_of<0>(words[2], words[3]) & mask, bytes_of<1>(words[2], words[3]) & mask, b0, b1);
          multiply(sums[1], bytes_of<2>(words[0], words[1]) & mask, bytes_of<3>(words[0], words[1]) & mask,
                   bytes_of<2>(words[2], words[3]) & mask, bytes_of<3>(words[2], words[3]) & mask, b0, b1);
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
        const unsigned at = place.value_number + (stage + place.steps.first_of(half, r) * place.value_numbers);
        float scale = read_scale(at, group, place, place.value_scale), offset = SEGMENTS ? 1.0f : read_number(at + TILE * VALUE_NUMBERS, group);
        if (!MINIMUM) offset *= -scale;
        values[half].scales[group][r] = scale, values[half].offsets[group][r] = offset;
      }
  }
  if (range.floor - range.tokens < from + TILE || range.start > from)  // the last tiles, or the first: what lies beyond may be anything, even NaN
    #pragma unroll
    for (int half = 0; half < HALVES; half++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int token = from + place.token + place.steps.first_of(half, r);
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
