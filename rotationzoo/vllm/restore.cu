// Earlier tokens of prompts, one after another as attention over rows reads them: what `LayerPages.restore` in pages.py does with
// torch. Codes are dequantized and stay in their own frame; exact copies only lose the mean of keys.
//
// This file continues codec/int2.cu, whose lanes share a row: both are compiled as one program with the same macros, and TOKENS (of
// a page).

typedef long long Count;

// Which tokens of C prompts there are, as `Segment` in segments.py says it, and where their pages are: table [C, stride], in bytes
// after page 0.
struct Tokens {
  const int *bounds, *firsts, *jumps, *gaps;
  int prompts;
  const Count* table;
  Count stride;

  // Whether there is a token of this number; then `page` is where its page begins, and `at` its place there.
  __device__ bool find(Count token, Count& page, int& at) const {
    if (token >= bounds[prompts]) return false;
    int low = 0, high = prompts;  // bounds[low] <= token < bounds[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (bounds[middle] <= token ? low : high) = middle;
    }
    int position = firsts[low] + int(token) - bounds[low];
    if (position >= jumps[low]) position += gaps[low];
    page = table[low * stride + position / TOKENS], at = position % TOKENS;
    return true;
  }
};

// Rows [room, H, D] of dequantized codes, from pages whose sections begin at these bytes. Launch with a grid of (room / (4 *
// WARP_ROWS) rounded up, H) and 128 threads; so below.
extern "C" __global__ void __launch_bounds__(32 * WARPS) restore_rows(
    const int* bounds, const int* firsts, const int* jumps, const int* gaps, Count prompts, const Count* table, Count stride,
    Count page_bytes, const unsigned char* memory, Count third_start, Count scale_start, Count offset_start, Element* rows) {
  const Tokens tokens = {bounds, firsts, jumps, gaps, int(prompts), table, stride};
  const Lane lane;
  const Count head = blockIdx.y, heads = gridDim.y, token = first_row();
  Count begin;
  int at;
  if (!tokens.find(token, begin, at) || !lane.active) return;
  const unsigned char* page = memory + begin;
  const Count row = head * TOKENS + at;
  const unsigned char *codes = page + row * (D / 4), *thirds = page + third_start + row * (FINE / 8);
  const Metadata* scales = reinterpret_cast<const Metadata*>(page + scale_start) + row * GROUPS;
  const Metadata* offsets = reinterpret_cast<const Metadata*>(page + offset_start) + row * GROUPS;
  alignas(8) unsigned words[RUN / 4] = {};
#if STRIDED
  copy<RUN>(words, codes + RUN * lane.index);
#else
  for (int k = 0; k < 4; k++)
    copy<RUN / 4>(reinterpret_cast<unsigned char*>(words) + k * RUN / 4, codes + lane.channel(k) / 4);
#endif
  Element* to = rows + (token * heads + head) * D;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const bool fine = is_fine(lane.channel(k));
    const int bit = lane.channel(k) - FIRST_FINE, group = lane.group(k);
    const unsigned third = fine ? thirds[bit / 8] >> bit % 8 : 0;
    const float scale = step_of(read(scales[group]), fine), offset = zero_of(SYMMETRIC ? 1.5f : read(offsets[group]), fine);
    alignas(16) float x[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      unsigned code = words[position(k, i) / 32] >> position(k, i) % 32 & 3;
      if (fine) code = 2 * code | (third >> i & 1);
      x[i] = restore(0x4b000000 | code, scale, offset);
    }
    save(to + lane.channel(k), x);
  }
}

// Rows [room, H, D] of copies [slots, H, TOKENS, D] less mean [H, D], or null. slot_of has the slot of each page.
extern "C" __global__ void __launch_bounds__(32 * WARPS) copy_rows(
    const int* bounds, const int* firsts, const int* jumps, const int* gaps, Count prompts, const Count* table, Count stride,
    Count page_bytes, const Element* copies, const Count* slot_of, const float* mean, Element* rows) {
  const Tokens tokens = {bounds, firsts, jumps, gaps, int(prompts), table, stride};
  const Lane lane;
  const Count head = blockIdx.y, heads = gridDim.y, token = first_row();
  Count begin;
  int at;
  if (!tokens.find(token, begin, at) || !lane.active) return;
  const Element* from = copies + ((slot_of[begin / page_bytes] * heads + head) * TOKENS + at) * D;
  Element* to = rows + (token * heads + head) * D;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    alignas(16) float x[RUN];
    load(from + lane.channel(k), x);
    if (mean)
#pragma unroll
      for (int i = 0; i < RUN; i++) x[i] = __fsub_rn(x[i], mean[head * D + lane.channel(k) + i]);
    save(to + lane.channel(k), x);
  }
}
