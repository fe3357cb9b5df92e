// Attention of a few new tokens over pages of latents (MLA) for many query heads, on Hopper: between `scale_queries` and `merge_latents`
// of latents.cu, whose conventions hold here. wgmma multiplies 64 columns, which are query heads times query tokens, by whole pages.
//
// Eight warps unpack: they write the codes of a page as float16 numbers to shared memory, code * 2^-24 each. Two groups of four warps
// multiply. They take turns: of every other page, a group has the scores and makes them weights, while the other group multiplies. For
// outputs, each group has half of the channels, and takes weights and codes of all pages. Exact rows are copied in place of codes. The
// other group's weights are multiplied between the halves of a page's scores: earlier, scores would wait for them, and later, what unpacks
// would wait for their page.
//
// Products read a page twice: [tokens, channels] for scores, and [channels, tokens], which are the same bytes, for outputs.
//
// Numbers in shared memory are in blocks of 64 channels or tokens: rows of 128 bytes, whose pieces of 16 bytes are swapped by the lowest
// three bits of the row's number (wgmma's 128-byte swizzle).
//
// Channels are in the order of slots: a slot has four codes, in the four bytes of one or two words. Its channels are bytes 0, 2, 1, 3.
//
// Compile for sm_90a with -D: RANK (512), ROPE (64), TYPE, HALF, MINIMUM, SEGMENTS and ROOM, as in latents.cu.

#include "launches.cu"
#include "segment_rows.cu"
#include "tensor_cores.cu"
#include "latent_pages.cu"

constexpr int COLUMNS = 64;
constexpr int GROUP = 128, MULTIPLY = 2 * GROUP, UNPACK = 2 * GROUP;  // threads: of a warpgroup, that multiply, and that unpack
constexpr int HANDED = GROUP + UNPACK, THREADS = MULTIPLY + UNPACK;   // that hand each other a stage; of a block
constexpr int BLOCK = 64 * 128, PAGE = RANK / 64 * BLOCK, STAGE = PAGE + BLOCK;  // bytes: of 64 rows, of codes, and with exact keys
constexpr int TILES = RANK / 64 * BLOCK, RAW = TILES + 2 * STAGE, NUMBERS = RAW + TILE * ROOM;
constexpr int NUMBER = TILE * 4, TOPS = NUMBERS + 2 * 4 * NUMBER, SUMS = TOPS + 2 * COLUMNS * 4, SHARED = SUMS + 2 * COLUMNS * 8;
static_assert(RANK == 512 && ROPE == 64, "each of the two groups that multiply has 256 channels, and a key is one block");
static_assert(SHARED <= 227 * 1024 && TILE * ROOM <= 4 * UNPACK * 16, "too large");
extern __shared__ __align__(1024) char memory[];

// Barriers of these threads, by number. Of each stage: it is full; a half of its channels is empty; it has weights. Of threads that
// multiply: a group's own, and of both. And of those that unpack.
constexpr int FULL = 1, EMPTY = 3, WEIGHTS = 7, OWN = 9, MULTIPLIED = 11, UNPACKED = 12;
template <int COUNT>
__device__ void meet(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory"); }
template <int COUNT>
__device__ void arrive(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory"); }

// The threads that multiply have more registers, and those that unpack have fewer.
__device__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 208;"); }
__device__ void return_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 48;"); }

// What threads wrote to shared memory, for wgmma to read.
__device__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

typedef unsigned long long Matrix;  // wgmma's descriptor of a matrix in shared memory

__device__ unsigned address_of(int offset) { return unsigned(__cvta_generic_to_shared(memory)) + offset; }

// Rows of 64 numbers in shared memory from `offset` on: eight rows are 1024 bytes apart, and blocks of columns BLOCK.
__device__ Matrix matrix(int offset) {
  return Matrix((address_of(offset) & 0x3ffff) >> 4) | Matrix(BLOCK >> 4) << 16 | Matrix(1024 >> 4) << 32 | Matrix(1) << 62;
}

// The compiler must not move what changes these numbers across.
template <int COUNT>
__device__ void hold(float (&d)[COUNT]) {
  #pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define OF_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

// Of codes, which are float16, or of exact rows.
#define MULTIPLY(is_exact, shape, transposed, numbers, ...) \
  if (is_exact && TYPE != 1) \
    asm volatile("wgmma.mma_async.sync.aligned." shape "k16.f32.bf16.bf16 " numbers ", 1, 1, 1, " transposed ";" : __VA_ARGS__); \
  else \
    asm volatile("wgmma.mma_async.sync.aligned." shape "k16.f32.f16.f16 " numbers ", 1, 1, 1, " transposed ";" : __VA_ARGS__)

// d [64, 64] += a b^T for a [64, 16] and b [64, 16] in shared memory.
template <bool EXACT>
__device__ void multiply_rows(float (&d)[32], Matrix a, Matrix b) {
  MULTIPLY(EXACT, "m64n64", "0, 0", OF_32 ", %32, %33", SIXTEEN(d, 0), SIXTEEN(d, 16) : "l"(a), "l"(b));
}

// The same for exact a in registers.
__device__ void multiply_keys(float (&d)[32], const unsigned (&a)[4], Matrix b) {
  MULTIPLY(true, "m64n64", "0", OF_32 ", {%32, %33, %34, %35}, %36",
           SIXTEEN(d, 0), SIXTEEN(d, 16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d [64, 128] += a b for a [64, 16] and b [16, 128] in shared memory. The compiler takes no larger product where a block has 512 threads.
#define OF_64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
template <bool EXACT>
__device__ void multiply_values(float (&d)[64], Matrix a, Matrix b) {
  MULTIPLY(EXACT, "m64n128", "0, 1", OF_64 ", %64, %65",
           SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48) : "l"(a), "l"(b));
}

// The same for a in registers.
template <bool EXACT>
__device__ void multiply_own(float (&d)[64], const unsigned (&a)[4], Matrix b) {
  MULTIPLY(EXACT, "m64n128", "1", OF_64 ", {%64, %65, %66, %67}, %68", SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)
           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Where piece `piece` of 16 bytes of a row lies in its block.
__device__ int place(int row, int piece) { return row * 128 + ((piece ^ row % 8) << 4); }

// Bring what lies at this address into the L2 cache.
__device__ void prefetch_line(Address from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Start copying the codes of a page. `inverse` takes the number of a piece of 16 bytes to its row.
__device__ void fetch(const Tables& tables, unsigned inverse, Address page, int thread) {
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int piece = thread + i * UNPACK;
    const int row = __umulhi(piece, inverse);
    if (piece < TILE / 16 * tables.bytes) copy_async(address_of(RAW) + piece * 16 + row * (tables.row - tables.bytes), page + piece * 16);
  }
  end_group();
}

// Prefetch a page that is copied later. Exact keys are the last in it.
__device__ void prefetch(const Tables& tables, Address page, int thread) {
  const int at = 128 * thread;
  if (at < tables.rope + TILE * ROPE * 2) prefetch_line(page + at);
}

// Two words of ROWS rows, eight apart: bytes 0 and 2, and bytes 1 and 3, each of the first word with that of the second above it. All are
// read before any result is written, which the compiler could not move reads across. More rows take more registers than there are.
constexpr int ROWS = 4;
struct Words {
  unsigned even[ROWS], odd[ROWS];
  __device__ Words(const char* row, int stride) {
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const unsigned* words = reinterpret_cast<const unsigned*>(row + i * stride);
      even[i] = words[0], odd[i] = words[1];
    }
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const unsigned one = even[i], next = odd[i];
      even[i] = __byte_perm(one, next, 0x6240), odd[i] = __byte_perm(one, next, 0x7351);
    }
  }
};

// Unpack two slots of every eighth row: where the words begin that each has codes in, how far they are shifted, and the masks. Both are
// in the same two words, unless they are APART.
template <bool APART>
__device__ void unpack_slots(const int4& pair, const char* row, int stride, char* to) {
  const int shift = pair.y & 0xff, other_shift = pair.y >> 8;
  #pragma unroll
  for (int first = 0; first < TILE / 8; first += ROWS) {
    const char* from = row + first * stride;
    const Words one(from + (pair.x & 0xffff), stride), other = APART ? Words(from + (pair.x >> 16), stride) : one;
    #pragma unroll
    for (int i = 0; i < ROWS; i++)
      *reinterpret_cast<uint4*>(to + (first + i) * 8 * 128) = {one.even[i] >> shift & pair.z, one.odd[i] >> shift & pair.z,
                                                               other.even[i] >> other_shift & pair.w, other.odd[i] >> other_shift & pair.w};
  }
}

__device__ void swap(int4& one, int4& other) {
  const int4 was = one;
  one = other, other = was;
}

// Write the numbers of a token: its scale, the inverse, the offset in that unit, and the logarithm of the scale.
__device__ void number_rows(const Tables& tables, const Range& range, float level, Address page, int tile, int stage, int row) {
  const bool counts = tile * TILE + row >= range.start && tile * TILE + row < range.end;  // what lies beyond may be anything, even NaN
  float scale = 0.0f, offset = 0.0f;
  if (SEGMENTS) {
    const unsigned* words = reinterpret_cast<const unsigned*>(memory + RAW + row * tables.row);
    const float found = __shfl_sync(ALL, level, tables.bytes ? gathered(words[0]) : 0);
    if (counts) scale = offset = found;
  } else if (counts) {
    const char* numbers_at = reinterpret_cast<const char*>(page);
    scale = number(numbers_at + tables.scales, row), offset = number(numbers_at + tables.offsets, row);
    if (!MINIMUM) offset *= -scale;
  }
  if (scale < 0x1p-40f) scale = 0x1p-40f;  // but NaN stays
  float* numbers = reinterpret_cast<float*>(memory + NUMBERS + stage * 4 * NUMBER) + row;
  const float inverse = __fdividef(1.0f, scale);
  numbers[0] = scale, numbers[TILE] = inverse, numbers[3 * TILE] = __log2f(scale);
  if (!SEGMENTS) numbers[2 * TILE] = offset * inverse;
}

// Unpack the pages from `begin` to `end`. Lanes of a warp have eight rows, and four pairs of slots of each half of the channels, so that
// they read and write other banks of shared memory. Addresses come from a number that is `kept` for a page, because registers do not hold
// them for all pages.
__device__ void unpack(const Tables& tables, const Range& range, const int4* pairs, int begin, int end, int number_of_thread) {
  const float level = SEGMENTS ? tables.levels[number_of_thread % 16] : 0.0f;
  int4 pair = __ldg(pairs + number_of_thread / 8), other = __ldg(pairs + 32 + number_of_thread / 8);
  Address page = tables.page(begin), next = begin + 1 < end ? tables.page(begin + 1) : 0;
  const unsigned inverse = 0xffffffffu / max(1, tables.bytes / 16) + 1;
  fetch(tables, inverse, page, number_of_thread);
  for (int tile = begin; tile < end; tile++) {
    const int thread = kept(number_of_thread), row = thread % 8, slots = thread / 8;
    const int stage = (tile - begin) % 2, to = TILES + stage * STAGE;
    wait_groups<0>();
    meet<UNPACK>(UNPACKED);  // all threads' copies of codes have arrived
    if (next) prefetch(tables, next, thread);
    // The group whose page this was is the first that is done with its half of the channels.
    const bool again = tile - begin >= 2;
    if (again) meet<HANDED>(EMPTY + 2 * stage + stage);
    #pragma unroll 1
    for (int i = 0; i < 2; i++) {
      if (i && again) meet<HANDED>(EMPTY + 2 * stage + 1 - stage);
      if (i)
        #pragma unroll
        for (int part = 0; part < TILE * ROPE * 2; part += UNPACK * 16)
          copy_async(address_of(to + PAGE + place(thread / 8, thread % 8)) + part, page + tables.rope + part + thread * 16);
      const char* from = memory + RAW + row * tables.row;
      char* codes = memory + to + (i ^ stage) * (PAGE / 2) + slots / 8 * BLOCK + place(row, slots % 8);
      if (__any_sync(ALL, (pair.x & 0xffff) != pair.x >> 16))
        unpack_slots<true>(pair, from, 8 * tables.row, codes);
      else if (!again || __any_sync(ALL, pair.z || pair.w))  // zeros stay
        unpack_slots<false>(pair, from, 8 * tables.row, codes);
      if (!i) swap(pair, other);
    }
    end_group();
    if (thread >= UNPACK - TILE) number_rows(tables, range, level, page, tile, stage, thread - (UNPACK - TILE));
    wait_groups<0>();
    publish();
    arrive<HANDED>(FULL + stage);
    page = next, next = tile + 2 < end ? tables.page(tile + 2) : 0;
    meet<UNPACK>(UNPACKED);  // nobody reads these codes any more
    if (page) fetch(tables, inverse, page, kept(thread));
  }
}

// The same for pages of exact rows, which are copied. Of rows that nobody reads there are zeros.
__device__ void copy_pages(const Windows& windows, int begin, int end, int thread) {
  constexpr int HALF_ROW = RANK / 16, ROPE_PIECES = ROPE / 8;  // pieces of 16 bytes
  for (int tile = begin; tile < end; tile++) {
    const int stage = (tile - begin) % 2, to = TILES + stage * STAGE, first = windows.first(tile);
    const bool again = tile - begin >= 2;
    const uint4* rows = reinterpret_cast<const uint4*>(windows.rows(tile));
    const auto copy = [&](int row, int piece) {
      const int at = to + piece / 8 * BLOCK + place(row, piece % 8);
      if (windows.has(tile, first + row))
        copy_async(address_of(at), rows + row * (KEY / 8) + piece);
      else
        *reinterpret_cast<uint4*>(memory + at) = {};
    };
    #pragma unroll 1
    for (int i = 0; i < 2; i++) {
      if (again) meet<HANDED>(EMPTY + 2 * stage + (i ^ stage));
      for (int at = thread; at < TILE * HALF_ROW; at += UNPACK) copy(at / HALF_ROW, (i ^ stage) * HALF_ROW + at % HALF_ROW);
    }
    for (int at = thread; at < TILE * ROPE_PIECES; at += UNPACK) copy(at / ROPE_PIECES, RANK / 8 + at % ROPE_PIECES);
    end_group();
    wait_groups<0>();
    publish();
    arrive<HANDED>(FULL + stage);
  }
}

// Two columns of a thread, of weights of EXACT rows or of codes: what their scores are relative to, and sums of weights and of weights times offsets.
template <bool EXACT>
struct Columns {
  float output[2][64], tops[2], totals[2], offsets[2];

  // Scores are relative to others. What this changes outputs by, which products may still be adding to.
  __device__ void move(const float (&next)[2], float (&factors)[2]) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      factors[r] = exp2_of(tops[r] - next[r]);
      tops[r] = next[r], totals[r] *= factors[r], offsets[r] *= factors[r];
    }
  }
  __device__ void hold_output() { hold(output[0]), hold(output[1]); }
  __device__ void change(const float (&factors)[2]) {
    if (!__any_sync(ALL, factors[0] != 1.0f || factors[1] != 1.0f)) return;
    wait_products<0>();  // all of them, or the compiler lets none run beside others
    #pragma unroll
    for (int i = 0; i < 128; i++) output[i / 64][i % 64] *= factors[i / 2 % 2];
    hold_output();
  }

  // Begin to add what weights read of the group's channels in a stage: those of the group's own page, or in shared memory.
  __device__ void add(const unsigned (&weights)[TILE / 16][4], int from, int group) {
    begin_products();
    #pragma unroll
    for (int i = 0; i < TILE / 16 * 2; i++) multiply_own<EXACT>(output[i % 2], weights[i / 2], values(from, group, i));
    end_products();
  }
  __device__ void add(Matrix weights, int from, int group) {
    begin_products();
    #pragma unroll
    for (int i = 0; i < TILE / 16 * 2; i++) multiply_values<EXACT>(output[i % 2], weights + (i / 2 * 32 >> 4), values(from, group, i));
    end_products();
  }
  static __device__ Matrix values(int from, int group, int i) {
    return matrix(from + group * 4 * BLOCK) + (i % 2 * 2 * BLOCK + i / 2 * 16 * 128 >> 4);
  }

  // The same of the other group's page, once it has weights, which are relative to its tops.
  __device__ void follow(const float* shared_tops, int from, int group) {
    meet<MULTIPLY>(WEIGHTS + 1 - group);
    const float next[2] = {shared_tops[0], shared_tops[8]};
    float factors[2];
    move(next, factors), change(factors), add(matrix(from + PAGE), from, group);
  }
};

// Begin to add products with the first or the second half of a page's channels.
template <int PART, bool EXACT>
__device__ void multiply_part(float (&scores)[32], int from) {
  begin_products();
  #pragma unroll
  for (int step = PART * RANK / 32; step < (PART + 1) * RANK / 32; step++) {
    const Matrix skip = (step / 4 * BLOCK + step % 4 * 32) >> 4;
    multiply_rows<EXACT>(scores, matrix(0) + skip, matrix(from) + skip);
  }
  end_products();
}

// Attend to the pages from `begin` to `end`, of which columns read what `windows` say: of packed tokens, its first. Of exact rows, `rows` are those of the queries; of codes, these in the order of slots.
template <bool EXACT>
__device__ void attend(const Windows& windows, int begin_of, int end_of, const Element* query, const unsigned short* rows, const float* headers,
                       const float* middles, float scale, const Results& results, int number_of_thread) {
  // What codes and exact rows have in common would be computed before both, and need more registers than there are.
  const int begin = kept(begin_of), end = kept(end_of), thread = number_of_thread;
  const int group = __shfl_sync(ALL, thread / GROUP, 0);  // which the compiler then knows to be the same in a warp
  const int lane = thread % 32, part = lane % 4, first_row = thread % GROUP / 32 * 16 + lane / 4;
  #pragma unroll
  for (int i = 0; i < COLUMNS * (RANK / 8) / MULTIPLY; i++) {
    const int row = i * (MULTIPLY / (RANK / 8)) + thread / (RANK / 8), piece = thread % (RANK / 8);
    uint4 x = {};
    if (row < results.columns) x = __ldg(reinterpret_cast<const uint4*>(rows + Count(row) * (EXACT ? KEY : RANK)) + piece);
    *reinterpret_cast<uint4*>(memory + piece / 8 * BLOCK + place(row, piece % 8)) = x;
  }
  // Where the tokens of each column begin and end, of both windows: registers are few. Exact rows have no numbers.
  int2* bounds = reinterpret_cast<int2*>(memory + NUMBERS);
  if (EXACT && thread < COLUMNS) {
    bounds[thread] = {windows.sink.range.start_of(thread), windows.sink.range.end_of(thread)};
    bounds[COLUMNS + thread] = {windows.recent.range.start_of(thread), windows.recent.range.end_of(thread)};
  }
  unsigned keys[ROPE / 16][4];
  float units[2], sums[2];
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + 8 * r, column = min(row, int(results.columns) - 1);
    units[r] = scale, sums[r] = 0.0f;
    if (!EXACT) units[r] = fmaxf(headers[3 * column], 0x1p-40f), sums[r] = headers[3 * column + 1] / units[r];
    const unsigned* exact = reinterpret_cast<const unsigned*>(query + Count(column) * KEY + RANK);
    #pragma unroll
    for (int step = 0; step < ROPE / 16; step++)
      keys[step][r] = exact[8 * step + part], keys[step][r + 2] = exact[8 * step + part + 4];
  }
  const int from = TILES + group * STAGE, other = TILES + (1 - group) * STAGE;
  const float* numbers = reinterpret_cast<const float*>(memory + NUMBERS + group * 4 * NUMBER) + 2 * part;
  float* shared_tops = reinterpret_cast<float*>(memory + TOPS) + first_row;
  Columns<EXACT> mine = {{}, {LOWEST, LOWEST}};
  publish();
  meet<MULTIPLY>(MULTIPLIED);
  // The group's own pages, and with each the one before.
  for (int tile = begin + group; tile < end; tile += 2) {
    float scores[32] = {};
    meet<HANDED>(FULL + group);
    begin_products();
    #pragma unroll
    for (int step = 0; step < ROPE / 16; step++) multiply_keys(scores, keys[step], matrix(from + PAGE) + (step * 32 >> 4));
    end_products();
    wait_products<0>();
    hold(scores);
    // Number i is of column first_row + 8 (i / 2 % 2) and token 8 (i / 4) + 2 part + i % 2. Products with codes are added to all else, in
    // their unit.
    #pragma unroll
    for (int i = 0; i < 32 && !EXACT; i++) {
      const int r = i / 2 % 2, token = i / 4 * 8 + i % 2;
      scores[i] = scores[i] * (scale / units[r]) * numbers[TILE + token] + sums[r] * (SEGMENTS ? 1.0f : numbers[2 * TILE + token]);
    }
    hold(scores);
    multiply_part<0, EXACT>(scores, from);
    if (tile > begin) mine.follow(shared_tops + (1 - group) * COLUMNS, other, group);
    multiply_part<1, EXACT>(scores, from);
    if (tile > begin) {
      wait_products<1>();
      if (tile + 1 < end) arrive<HANDED>(EMPTY + 2 * (1 - group) + group);
    }
    wait_products<0>();
    hold(scores);
    // From here on, they are logarithms of weights times scales, which is what codes are multiplied by.
    #pragma unroll
    for (int i = 0; i < 32; i++) {
      const int r = i / 2 % 2, token = i / 4 * 8 + i % 2;
      scores[i] = EXACT ? scores[i] * units[r] : fmaf(scores[i] * numbers[token], units[r], numbers[3 * TILE + token]);
    }
    if (EXACT) {
      const int first = windows.first(tile) + 2 * part;
      const int2* of = bounds + (tile < windows.sink.pages ? 0 : COLUMNS) + first_row;
      const int2 ends[2] = {of[0], of[8]};
      #pragma unroll
      for (int i = 0; i < 32; i++) {
        const int r = i / 2 % 2, token = first + i / 4 * 8 + i % 2;
        if (token < ends[r].x || token >= ends[r].y) scores[i] = MINUS_INFINITY;
      }
    }
    const Range& range = windows.sink.range;
    const int first = tile * TILE + 2 * part;
    if (!EXACT && (range.start > tile * TILE || range.floor - range.tokens < tile * TILE + TILE)) {
      const int ends[2] = {range.end_of(first_row), range.end_of(first_row + 8)};
      #pragma unroll
      for (int i = 0; i < 32; i++) {
        const int token = first + i / 4 * 8 + i % 2;
        if (token < range.start || token >= ends[i / 2 % 2]) scores[i] = MINUS_INFINITY;
      }
    }
    float tops[2] = {LOWEST, LOWEST};
    #pragma unroll
    for (int i = 0; i < 32; i++) tops[i / 2 % 2] = fmaxf(tops[i / 2 % 2], scores[i]);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      tops[r] = fmaxf(tops[r], __shfl_xor_sync(ALL, tops[r], 1));
      tops[r] = fmaxf(tops[r], __shfl_xor_sync(ALL, tops[r], 2));
      tops[r] -= 8.0f;  // so that the largest is 2^8, or up to 2^15
      if (tops[r] <= mine.tops[r] + 7.0f) tops[r] = mine.tops[r];
      if (!part) shared_tops[group * COLUMNS + 8 * r] = tops[r];
    }
    const unsigned to = kept(from + PAGE + place(first_row, 0) + 4 * part);
    unsigned weights[TILE / 16][4];
    float factors[2];
    mine.move(tops, factors);
    meet<GROUP>(OWN + group);  // nobody reads exact keys any more, in whose place weights come
    #pragma unroll
    for (int r = 0; r < 2; r++)
      #pragma unroll
      for (int j = 0; j < 8; j++) {
        float scaled[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          scaled[i] = exp2_of(scores[4 * j + 2 * r + i] - mine.tops[r]);
          mine.totals[r] = fmaf(scaled[i], EXACT ? 1.0f : numbers[TILE + 8 * j + i], mine.totals[r]);
          if (!EXACT) mine.offsets[r] += scaled[i] * (SEGMENTS ? 1.0f : numbers[2 * TILE + 8 * j + i]);
        }
        const unsigned pair = weights[j / 2][j % 2 * 2 + r] = EXACT ? element_pair(scaled[0], scaled[1]) : half_pair(scaled[0], scaled[1]);
        *reinterpret_cast<unsigned*>(memory + (to ^ j << 4) + r * 8 * 128) = pair;
      }
    publish();
    arrive<MULTIPLY>(WEIGHTS + group);
    mine.change(factors);
    mine.add(weights, from, group);
    wait_products<0>();
    mine.hold_output();
    if (tile + 2 < end) arrive<HANDED>(EMPTY + 2 * group + group);
  }
  if ((end - begin) % 2 == group) {  // the last page is the other group's
    mine.follow(shared_tops + (1 - group) * COLUMNS, other, group);
    wait_products<0>();
    mine.hold_output();
  }
  float2* shared_sums = reinterpret_cast<float2*>(memory + SUMS);
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      mine.totals[r] += __shfl_xor_sync(ALL, mine.totals[r], step);
      mine.offsets[r] += __shfl_xor_sync(ALL, mine.offsets[r], step);
    }
    if (!part) shared_sums[group * COLUMNS + first_row + 8 * r] = {mine.totals[r], mine.offsets[r]};
  }
  meet<MULTIPLY>(MULTIPLIED);
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + 8 * r;
    const bool counts = row < results.columns;
    const float2 one = shared_sums[row], two = shared_sums[COLUMNS + row];
    const float total = one.x + two.x, inverse = inverse_of(total);
    if (counts && !group && !part) results.totals[results.at(row)] = {mine.tops[r] + (EXACT ? 0.0f : headers[3 * row + 2]), total};
    const float2* of = reinterpret_cast<const float2*>(middles + 256 * group) + part;
    const float offset = (one.y + two.y) * inverse, unit = EXACT ? inverse : 16777216.0f * inverse;
    // Lanes swap pairs, so that each has four channels of one of two groups of eight.
    const int odd = part % 2;
    Element* to = results.outputs + results.at(row) * RANK + 256 * group + 8 * odd + 2 * (part - odd);
    #pragma unroll
    for (int j = 0; j < 32; j += 2) {
      unsigned pairs[2];
      #pragma unroll
      for (int k = 0; k < 2; k++) {
        const float* output = mine.output[(j + k) / 16] + 4 * ((j + k) % 16) + 2 * r;
        const float2 middle = EXACT ? float2{} : of[4 * (j + k)];
        pairs[k] = element_pair(unit * output[0] + offset * middle.x, unit * output[1] + offset * middle.y);
      }
      const unsigned other = __shfl_xor_sync(ALL, odd ? pairs[0] : pairs[1], 1);
      if (counts) *reinterpret_cast<uint2*>(to + 8 * j) = odd ? uint2{other, pairs[1]} : uint2{pairs[0], other};
    }
  }
}

// The grid and the arguments are those of `attend_latents`, but turned [B, columns, RANK] and middles [RANK] are in the order of slots, and
// so are the outputs of packed tokens.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many_heads(
    const Element* query, const unsigned short* turned, const float* headers, Count columns, Count heads, const Address* pages_table,
    Address pages_base, Count pages_unit, Count pages_pages, const int4* pieces, const float* codes_middles, const float* codes_levels,
    Count codes_row_bytes, Count codes_row_stride, Count codes_begin_scales, Count codes_begin_offsets, Count codes_rope,
    const int* blocks_starts, const int* blocks_lengths, Count blocks_requests, Count blocks_windows, Count blocks_splits,
    Count blocks_most, int4* blocks_table, const int* floors, const Element* copies, const int* sink_slots, const int* sink_starts,
    const int* sink_lengths, Count sink_pieces, const int* recent_slots, const int* recent_starts, const int* recent_lengths,
    Count recent_pieces, double scale, float2* totals, Element* outputs) {
  wait_for_previous();
  const Blocks blocks(blocks_starts, blocks_lengths, blocks_requests, blocks_windows, blocks_splits, blocks_most, blocks_table);
  const int exact = int(blockIdx.x) - blocks.packed(), first = blockIdx.y * COLUMNS, thread = threadIdx.x;
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
    if (thread < count) totals[results.at(thread)] = {LOWEST, 0.0f};
    return;
  }
  const Count column = batch * columns + first;  // of all requests
  const Element* queries = query + column * KEY;
  const float scaled = float(scale) * LOG2E;
  if (thread < MULTIPLY) {
    take_registers();
    if (exact >= 0) {
      attend<true>(windows, work.begin, work.end, queries, queries, nullptr, nullptr, scaled, results, thread);
      return;
    }
    const Window all = {nullptr, {start_of(blocks.starts, batch), floor, length, recent_end - recent_start, tokens, int(heads), first}};
    attend<false>({nullptr, all, all}, work.begin, work.end, queries, turned + column * RANK, headers + 3 * column, codes_middles, scaled,
                  results, thread);
  } else {
    return_registers();
    if (exact >= 0) {
      copy_pages(windows, work.begin, work.end, thread - MULTIPLY);
      return;
    }
    const Tables tables = {pages_table + batch * pages_pages, pages_base, pages_unit, int(codes_row_bytes), int(codes_row_stride),
                           int(codes_begin_scales), int(codes_begin_offsets), int(codes_rope), codes_levels};
    const Range range = {start_of(blocks.starts, batch), floor, length};
    unpack(tables, range, pieces, work.begin, work.end, thread - MULTIPLY);
  }
}
