// The plan of a decoding step, in which each request has one new token: what `Planner` in steps.py computes with a hundred operations
// of torch.
//
// Compile with -D: TOKENS (of a page), SINK and RECENT (tokens that are read exact), SINK_PAGES and RECENT_PAGES (that they touch).
// No header is included: NVRTC compiles this file on machines without a CUDA toolkit.

typedef long long Count;

constexpr int THREADS = 1024, PAGES = SINK_PAGES + RECENT_PAGES;  // of `plan`, which is one block: what it reads is small

// The pages that have copies. Page 0 and slot 0 are nobody's.
struct Copies {
  Count *slot_of, *page_of, *used;
  int slots;
  Count now;
};

struct Request {
  const int* table;  // its pages
  int length;        // its tokens, with the new one; 0 for padding
  int first;         // the first page of its recent window

  __device__ Request(const int* tables, Count width, const int* lengths, int row)
      : table(tables + row * width), length(lengths[row]), first(max(length - RECENT, 0) / TOKENS) {}

  // The n-th page that its windows touch; 0 if there is none.
  __device__ int page(int n) const {
    const int number = n < SINK_PAGES ? n : first + n - SINK_PAGES;
    return number * TOKENS < length ? table[number] : 0;
  }
};

// The slot that was used least recently; of several, the first.
__device__ int find_oldest(const Copies& copies) {
  __shared__ Count least[THREADS / 32];
  __shared__ int where[THREADS / 32], found;
  Count oldest = copies.now;
  int slot = 0;
  for (int i = 1 + threadIdx.x; i < copies.slots; i += THREADS)
    if (copies.used[i] < oldest) oldest = copies.used[i], slot = i;
  for (int step = 16; step; step /= 2) {
    const Count other = __shfl_xor_sync(0xffffffffu, oldest, step);
    const int its = __shfl_xor_sync(0xffffffffu, slot, step);
    if (other < oldest || (other == oldest && its < slot)) oldest = other, slot = its;
  }
  if (threadIdx.x % 32 == 0) least[threadIdx.x / 32] = oldest, where[threadIdx.x / 32] = slot;
  __syncthreads();
  if (!threadIdx.x) {
    found = where[0];
    for (int w = 1; w < THREADS / 32; w++)
      if (least[w] < oldest || (least[w] == oldest && where[w] < found)) oldest = least[w], found = where[w];
  }
  __syncthreads();
  return found;  // 0 where this step needs all of them
}

// table [B, width], lengths [B], mapping [B]: page times TOKENS plus place, or -1. The results are those of `Step` and `Reading`.
extern "C" __global__ void __launch_bounds__(THREADS) plan(
    const int* table, Count width, const int* lengths, const Count* mapping, Count batch, Count* slot_of, Count* page_of, Count* used,
    Count slots, Count now, Count* pages, Count* places, Count* new_slots, int* starts, int* ends, int* sink_slots, int* sink_lengths,
    int* recent_slots, int* recent_starts, int* recent_lengths) {
  __shared__ int beginning[THREADS];  // the pages that begin with a new token, or 0
  const Copies copies = {slot_of, page_of, used, int(slots), now};
  for (int from = 0; from < batch; from += THREADS) {
    // Pages that begin forget their former tokens.
    const int row = from + threadIdx.x;
    const bool begins = row < batch && mapping[row] >= 0 && mapping[row] % TOKENS == 0;
    const int page = begins ? mapping[row] / TOKENS : 0;
    beginning[threadIdx.x] = page;
    if (const Count slot = slot_of[page]) used[slot] = 0, slot_of[page] = 0;
    __syncthreads();
    // All windows stay.
    if (!from)
      for (int i = threadIdx.x; i < batch * PAGES; i += THREADS)
        if (const Count slot = slot_of[Request(table, width, lengths, i / PAGES).page(i % PAGES)]) used[slot] = now;
    __syncthreads();
    for (int i = 0; i < min(Count(THREADS), batch - from); i++) {
      if (!beginning[i]) continue;
      const int slot = find_oldest(copies);
      if (!threadIdx.x && slot) {
        if (slot_of[page_of[slot]] == slot) slot_of[page_of[slot]] = 0;
        slot_of[beginning[i]] = slot, page_of[slot] = beginning[i], used[slot] = now;
      }
      __syncthreads();
    }
    __syncthreads();  // nobody looks for the next beginnings while others still pass these
  }
  for (int row = threadIdx.x; row < batch; row += THREADS) {
    const Request request(table, width, lengths, row);
    const int length = request.length, skipped = request.first * TOKENS;
    bool whole = true;
    for (int n = 0; n < SINK_PAGES; n++) {
      const int slot = slot_of[request.page(n)];
      sink_slots[row * SINK_PAGES + n] = slot, whole &= slot || n * TOKENS >= length;
    }
    int missing = 0;
    for (int n = 0; n < RECENT_PAGES; n++) {
      const int slot = slot_of[request.page(SINK_PAGES + n)];
      recent_slots[row * RECENT_PAGES + n] = slot;
      if (!slot && skipped + n * TOKENS < length) missing = n + 1;
    }
    const int sink = whole ? min(length, SINK) : 0;
    const int begin = min(max(max(length - RECENT, skipped + missing * TOKENS), sink), length);
    starts[row] = sink_lengths[row] = sink, ends[row] = begin;
    recent_starts[row] = begin - skipped, recent_lengths[row] = length - skipped;
    const Count stored = max(mapping[row], Count(0));
    pages[row] = stored / TOKENS, places[row] = stored % TOKENS, new_slots[row] = slot_of[stored / TOKENS];
  }
}
