// The plan of a decoding step, in which each request has few new tokens: what `Planner` in steps.py computes with a hundred operations
// of torch.
//
// Compile with -D: TOKENS (of a page), SINK and RECENT (tokens that are read exact), SINK_PAGES (that the sink touches).
// No header is included: NVRTC compiles this file on machines without a CUDA toolkit.

typedef long long Count;

constexpr int THREADS = 1024;  // of `plan`, which is one block: what it reads is small

// The pages that have copies. Page 0 and slot 0 belong to no request.
struct Copies {
  Count *slot_of, *page_of, *copied_from, *used;  // copied_from: the first token of a slot's page that is copied
  int slots;
  Count now;
};

struct Request {
  const int* table;  // its pages
  int length;        // its tokens, with the new ones; 0 for padding
  int context;       // those before the new ones
  int first;         // the first page of the recent window of its first new token

  __device__ Request(const int* tables, Count width, const int* lengths, const int* counts, int row)
      : table(tables + row * width), length(lengths[row]), context(length - counts[row]),
        first(max(context + 1 - RECENT, 0) / TOKENS) {}

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

// table [B, width], lengths [B], counts [B] of new tokens, mapping [T]: page times TOKENS plus place, or -1. The recent windows touch
// at most `recent_pages`. The results are those of `Step` and `DecodeMetadata`.
extern "C" __global__ void __launch_bounds__(THREADS) plan(
    const int* table, Count width, const int* lengths, const int* counts, Count batch, const Count* mapping, Count tokens,
    Count recent_pages, Count* slot_of, Count* page_of, Count* copied_from, Count* used, Count slots, Count now, Count* pages, Count* places,
    Count* new_slots, int* starts, int* floors, int* ends, int* sink_slots, int* sink_lengths, int* recent_slots, int* recent_starts,
    int* recent_lengths) {
  __shared__ int beginning[THREADS];  // the pages that have no slot before a new token, or 0
  const Copies copies = {slot_of, page_of, copied_from, used, int(slots), now};
  const int touched = SINK_PAGES + int(recent_pages);
  for (int from = 0; from < tokens; from += THREADS) {
    // Pages that begin forget their former tokens.
    const int at = from + threadIdx.x;
    const Count place = at < tokens ? mapping[at] : -1;
    const bool begins = place >= 0 && place % TOKENS == 0;
    const bool is_first = at < tokens && (!at || mapping[at - 1] / TOKENS != place / TOKENS);
    const int page = begins ? place / TOKENS : 0;
    beginning[threadIdx.x] = page;
    if (const Count slot = slot_of[page]) used[slot] = 0, slot_of[page] = 0;
    if (place >= 0 && !begins && is_first && !slot_of[place / TOKENS]) beginning[threadIdx.x] = place / TOKENS;
    __syncthreads();
    // All windows stay.
    if (!from)
      for (int i = threadIdx.x; i < batch * touched; i += THREADS)
        if (const Count slot = slot_of[Request(table, width, lengths, counts, i / touched).page(i % touched)]) used[slot] = now;
    __syncthreads();
    for (int i = 0; i < min(Count(THREADS), tokens - from); i++) {
      if (!beginning[i]) continue;
      const int slot = find_oldest(copies);
      if (!threadIdx.x && slot) {
        if (slot_of[page_of[slot]] == slot) slot_of[page_of[slot]] = 0;
        slot_of[beginning[i]] = slot, page_of[slot] = beginning[i], used[slot] = now;
        copied_from[slot] = mapping[from + i] % TOKENS;
      }
      __syncthreads();
    }
    __syncthreads();  // nobody looks for the next beginnings while others still pass these
  }
  for (int at = threadIdx.x; at < tokens; at += THREADS) {
    const Count stored = max(mapping[at], Count(0));
    pages[at] = stored / TOKENS, places[at] = stored % TOKENS, new_slots[at] = slot_of[stored / TOKENS];
  }
  for (int row = threadIdx.x; row < batch; row += THREADS) {
    const Request request(table, width, lengths, counts, row);
    const int length = request.length, skipped = request.first * TOKENS;
    bool whole = true;
    for (int n = 0; n < SINK_PAGES; n++) {
      const int slot = slot_of[request.page(n)];
      sink_slots[row * SINK_PAGES + n] = slot, whole &= (slot && !copied_from[slot]) || n * TOKENS >= length;
    }
    int missing = 0;
    for (int n = 0; n < recent_pages; n++) {
      const int slot = slot_of[request.page(SINK_PAGES + n)];
      recent_slots[row * recent_pages + n] = slot;
      const int lacks = slot ? copied_from[slot] : TOKENS, first = skipped + n * TOKENS;
      if (lacks && first < length) missing = first + lacks;
    }
    const int sink = whole ? max(min(request.context, SINK), 0) : 0;
    const int floor = min(max(max(request.context + 1 - RECENT, missing), sink), length);
    const int end = request.context < SINK ? floor : max(floor, length - RECENT);  // new tokens of the sink are read exact
    starts[row] = sink_lengths[row] = sink, floors[row] = floor, ends[row] = end;
    recent_starts[row] = end - skipped, recent_lengths[row] = length - skipped;
  }
}
