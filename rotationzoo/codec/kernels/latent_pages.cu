// What the kernels of latents share: which tokens a request has, where they lie in pages, and where what is read of them goes.
// Compile with -D: RANK, ROPE and HALF, as in latents.cu.

#include "blocks.cu"

constexpr int TILE = 64, KEY = RANK + ROPE;  // tokens of a page, and numbers of an exact row
typedef BlocksOf<TILE, 2> Blocks;

#if HALF
typedef unsigned short Metadata;
#else
typedef float Metadata;
#endif

// Packed tokens [B, pages]: page number n begins n units after a base: codes, scales, offsets and exact keys.
struct Tables {
  const Address* table;
  Address base;
  Count unit;
  int bytes, row;             // of a row of codes in a page, and from one to the next in shared memory
  int scales, offsets, rope;  // where these begin in a page
  const float* levels;        // with segments: the scale of each number in a row
  __device__ Address page(int number) const { return base + table[number] * unit; }
};

__device__ float number(const char* from, int index) {
#if HALF
  return from_half(reinterpret_cast<const unsigned short*>(from)[index]);
#else
  return reinterpret_cast<const float*>(from)[index];
#endif
}

// Which packed tokens of a request the queries read, as in attention_tiles.cu; or, of exact tokens, those from `start` to `end`.
struct Range {
  int start, floor, end, exact, tokens, heads, column, newest, moves;

  __device__ int later(int c) const { return tokens - 1 - (column + c) / heads; }
  __device__ int start_of(int c) const { return max(start - moves, start - newest * later(c)); }
  __device__ int end_of(int c) const {
    return exact < 0 ? end - newest * later(c) : min(max(floor, end - later(c)), end + exact - later(c));
  }
};

// A window of exact tokens: copies of its pages in slots. `pages` of them are read, from the page `first` on.
struct Window {
  const int* slots;
  Range range;
  int first, pages;

  __device__ Window(const int* slots, const Range& range)
      : slots(slots), range(range), first(max(0, range.start - range.moves) / TILE), pages(max(0, (range.end + TILE - 1) / TILE - first)) {}
};

// The pages of both windows, those of the sink first.
struct Windows {
  const Element* copies;
  Window sink, recent;

  __device__ int pages() const { return sink.pages + recent.pages; }
  __device__ bool is_early(int page) const { return page < sink.pages; }
  __device__ Range range(int page) const { return is_early(page) ? sink.range : recent.range; }
  __device__ int number(int page) const { return page + (is_early(page) ? sink.first : recent.first - sink.pages); }
  __device__ int first(int page) const { return number(page) * TILE; }  // token
  __device__ const Element* rows(int page) const {
    const int* slots = is_early(page) ? sink.slots : recent.slots;
    return copies + Count(slots[number(page)]) * TILE * KEY;
  }
  // Whether any query reads a token of a page. What nobody reads may be anything.
  __device__ bool has(int page, int token) const {
    const int start = is_early(page) ? sink.range.start - sink.range.moves : recent.range.start - recent.range.moves;
    return token >= start && token < (is_early(page) ? sink.range.end : recent.range.end);
  }
};

// Where a block writes what its columns have: what scores are relative to and the sum of weights, and the mean of what was read.
struct Results {
  float2* totals;
  Element* outputs;
  Count columns, all, place, first;  // columns: of the tile, whose first one is `first`, and of a request
  __device__ Count at(int column) const { return place * all + first + column; }
};

__device__ float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }  // a row of padding reads nothing
