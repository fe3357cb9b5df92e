// The plan of a step: what `Planner` in steps.py and `find_reads` in segments.py compute with a hundred operations of torch.
//
// Compile with -D: TOKENS (of a page), SINK and RECENT (tokens that are read exact), SINK_PAGES (that the sink touches), RECENT_PAGES
// (that a recent window touches at most).
// No header of CUDA is included: NVRTC compiles this file on machines without a CUDA toolkit.

#include "launches.cu"

constexpr int THREADS = 1024;  // of `plan`, which is one block: what it reads is small

// The pages that have copies. Page 0 and slot 0 belong to no request.
struct Copies {
  // copied_from: the first token of a slot's page that is copied; forgotten: the pages whose slot another one took
  Count *slot_of, *page_of, *copied_from, *used, *forgotten;
  int slots;
  Count now;
};

struct Request {
  const int* table;  // its pages
  int length;        // its tokens, with the new ones; 0 for padding
  int context;       // those before the new ones
  bool is_prompt;    // has many new tokens, whose last ones have the window that is kept; of few new tokens, the first one has
  int first;         // the first page of that window

  __device__ Request(const int* tables, Count width, const int* lengths, const int* counts, int row, int few)
      : table(tables + row * width), length(lengths[row]), context(length - counts[row]), is_prompt(counts[row] > few),
        first(first_page(is_prompt ? length : context + 1)) {}

  __device__ static int first_page(int end) { return max(end - RECENT, 0) / TOKENS; }

  // The n-th page that its windows touch, the sink's first.
  __device__ int number(int n) const { return n < SINK_PAGES ? n : first + n - SINK_PAGES; }
  __device__ int page(int number, int end) const { return number * TOKENS < end ? table[number] : 0; }  // 0: none
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

// From which token on those before `from` are read exact: all up to `length` have copies. The slots are those of `pages` pages, and are
// written to `slots` unless it is null.
__device__ int find_recent(const Request& request, const Copies& copies, int from, int length, int sink, int pages, int* slots) {
  const int first = Request::first_page(from);
  int missing = 0;
  for (int n = 0; n < pages; n++) {
    const int slot = copies.slot_of[request.page(first + n, length)], begin = (first + n) * TOKENS;
    if (slots) slots[n] = slot;
    const int lacks = slot ? copies.copied_from[slot] : TOKENS;
    if (lacks && begin < length) missing = begin + lacks;
  }
  return min(max(max(from - RECENT, missing), sink), length);
}

// Where the tokens begin of each of C prompts, for a count of each.
template <class Counts>
__device__ void sum_up(int* bounds, int prompts, Counts count) {
  bounds[0] = 0;
  for (int c = 0; c < prompts; c++) bounds[c + 1] = bounds[c] + count(c);
}

// table [B, width], lengths [B], counts [B] of new tokens, mapping [T]: page times TOKENS plus place, or -1. The first `decodes` requests
// have few new tokens, none more than `few`, and their recent windows touch at most `recent_pages`. The results are those of `Step` and
// `DecodeMetadata`, and for the other requests, of which there are C, those of `Reads`, with S segments of `most` tokens.
extern "C" __global__ void __launch_bounds__(THREADS) plan(
    const int* table, Count width, const int* lengths, const int* counts, Count batch, const Count* mapping, Count tokens, Count decodes,
    Count few, Count recent_pages, Count* slot_of, Count* page_of, Count* copied_from, Count* used, Count* forgotten, Count slots,
    Count now, Count* pages, Count* places, Count* new_slots, int* starts, int* floors, int* ends, int* sink_slots, int* sink_lengths,
    int* recent_slots, int* recent_starts, int* recent_lengths, Count segments, Count most, int* contexts, int* firsts, int* gaps,
    int* new_bounds, int* exact_bounds, int* code_bounds, int* code_firsts) {
  __shared__ int beginning[THREADS], begin_at[THREADS];  // pages that get a slot, or 0; and the first token that is copied
  __shared__ bool some[THREADS / 32];                    // of a warp's pages are such
  const Copies copies = {slot_of, page_of, copied_from, used, forgotten, int(slots), now};
  const auto request_of = [&](int row) { return Request(table, width, lengths, counts, row, few); };
  // Pages that begin forget their former tokens.
  for (int at = threadIdx.x; at < tokens; at += THREADS)
    if (const Count place = mapping[at]; place >= 0 && place % TOKENS == 0)
      if (const Count slot = slot_of[place / TOKENS]) used[slot] = 0, slot_of[place / TOKENS] = 0;
  __syncthreads();
  // The masks are those of `_copy_windows` in steps.py. All windows stay, and so do those that end before the new tokens of prompts.
  const int own = SINK_PAGES + int(recent_pages), touched = own + int(recent_pages);
  for (int i = threadIdx.x; i < batch * touched; i += THREADS) {
    const Request request = request_of(i / touched);
    const int n = i % touched, number = n < own ? request.number(n) : Request::first_page(request.context) + n - own;
    const bool in_before = n >= own && request.is_prompt;
    if (const Count slot = n < own || in_before ? slot_of[request.page(number, request.length)] : 0) used[slot] = now;
  }
  __syncthreads();
  // Pages without a slot in which windows get new tokens take the slots that were used least recently.
  for (int from = 0; from < batch * own; from += THREADS) {
    const int at = from + threadIdx.x;
    int page = 0, first = 0;
    if (at < batch * own) {
      const Request request = request_of(at / own);
      const int n = at % own, number = request.number(n);
      first = max(request.context - number * TOKENS, 0);
      const bool in_sink = n < SINK_PAGES, in_recent = !in_sink && number >= SINK_PAGES;  // no page twice
      if (first < TOKENS && (in_sink || in_recent)) page = request.page(number, request.length);
      if (slot_of[page]) page = 0;
    }
    beginning[threadIdx.x] = page, begin_at[threadIdx.x] = first;
    const bool any = __any_sync(0xffffffffu, page);
    if (threadIdx.x % 32 == 0) some[threadIdx.x / 32] = any;
    __syncthreads();
    for (int i = 0; i < THREADS; i++) {
      if (i % 32 == 0 && !some[i / 32]) {
        i += 31;
        continue;
      }
      if (!beginning[i]) continue;
      const int slot = find_oldest(copies);
      if (!threadIdx.x && slot) {
        if (slot_of[page_of[slot]] == slot) slot_of[page_of[slot]] = 0, ++*forgotten;
        slot_of[beginning[i]] = slot, page_of[slot] = beginning[i], used[slot] = now, copied_from[slot] = begin_at[i];
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
    const Request request = request_of(row);
    const int length = request.length, context = request.context;
    const bool decodes_few = row < decodes;
    bool whole = true;
    for (int n = 0; n < SINK_PAGES; n++) {
      const int slot = slot_of[request.page(n, length)];
      if (decodes_few) sink_slots[row * SINK_PAGES + n] = slot;
      whole &= (slot && !copied_from[slot]) || n * TOKENS >= length;
    }
    const int sink = whole ? max(min(context, SINK), 0) : 0;
    if (!decodes_few) {
      const int prompt = row - decodes;
      contexts[prompt] = context, firsts[prompt] = sink;
      gaps[prompt] = find_recent(request, copies, context, context, sink, RECENT_PAGES, nullptr) - sink;
      continue;
    }
    const int floor = find_recent(request, copies, context + 1, length, sink, recent_pages, recent_slots + row * recent_pages);
    const int end = context < SINK ? floor : max(floor, length - RECENT);  // new tokens of the sink are read exact
    const int skipped = request.first * TOKENS;
    starts[row] = sink_lengths[row] = sink, floors[row] = floor, ends[row] = end;
    recent_starts[row] = end - skipped, recent_lengths[row] = length - skipped;
  }
  __syncthreads();
  const int prompts = batch - decodes;
  const int* many = counts + decodes;
  if (!prompts) return;
  if (threadIdx.x == 0) sum_up(new_bounds, prompts, [&](int c) { return many[c]; });
  if (threadIdx.x == 32) sum_up(exact_bounds, prompts, [&](int c) { return contexts[c] - gaps[c] + many[c]; });
  for (int s = threadIdx.x; s < segments; s += THREADS) {
    Count begin = s * most;  // of the segment, after the first token of the prompt
    sum_up(code_bounds + s * (prompts + 1), prompts, [&](int c) {
      const int offset = min(max(begin, Count(0)), Count(contexts[c])), stop = min(max(begin + most, Count(0)), Count(gaps[c]));
      code_firsts[s * prompts + c] = offset + firsts[c], begin -= contexts[c];
      return max(stop - offset, 0);
    });
  }
}
