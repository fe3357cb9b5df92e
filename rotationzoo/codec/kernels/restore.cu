// Earlier tokens of prompts, one after another as attention over rows reads them: what `LayerReader._restore` in prompts.py does
// with torch; and what `LayerReader._gather` does. Codes are dequantized, and stay in their own frame; exact keys only lose their mean.
//
// Lanes share a row as in int2.cu. The macros are those of int2.cu, TOKENS (of a page), and EXACT: the channels of the exact keys that
// latents (MLA) have beside them in a page. These keys then take the place of keys, and latents that of values.
//
// FlashAttention multiplies by 0 what a prompt does not read of a tile of values: rows of the next prompt, and those behind the last
// one. None of these may be other than finite. So a token whose value is not has zeros in its place, and a key that is no number,
// which reaches nobody but those who read it; and rows of values behind the last token, as far as the grid goes, are zeros.

#include "int2.cu"
#include "launches.cu"

// Tokens of C prompts, as `Segment` in segments.py says which. table [C, stride]: the numbers of the pages of a prompt.
struct Tokens {
  const int *bounds, *firsts, *jumps, *gaps;
  int prompts;
  const Count* table;
  Count stride;

  // Whether there is a token of this number; then, of which prompt, and where.
  __device__ bool find(Count token, int& prompt, int& position) const {
    if (token >= bounds[prompts]) return false;
    int high = prompts;
    for (prompt = 0; high - prompt > 1;) {  // bounds[prompt] <= token < bounds[high]
      const int middle = (prompt + high) / 2;
      (bounds[middle] <= token ? prompt : high) = middle;
    }
    position = firsts[prompt] + int(token) - bounds[prompt];
    if (position >= jumps[prompt]) position += gaps[prompt];
    return true;
  }

  __device__ Count page(int prompt, int position) const { return table[prompt * stride + position / TOKENS]; }
};

#ifndef EXACT
#define EXACT 0
#endif
constexpr int KEY = EXACT ? EXACT : D;  // channels of a row of keys

// Write a number to what a lane has of a row of so many channels.
__device__ void fill(Element* to, const Lane& lane, float x, int channels = D) {
  alignas(16) float run[RUN];
  for (float& each : run) each = x;
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (lane.channel(k) < channels) save(to + lane.channel(k), run);
}

// Write the exact key of a token of a page.
__device__ void copy_exact(Element* to, const Lane& lane, const unsigned char* keys, int token) {
  const Element* from = reinterpret_cast<const Element*>(keys) + token * EXACT;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    alignas(16) float x[RUN];
    if (lane.channel(k) >= EXACT) continue;
    load(from + lane.channel(k), x);
    save(to + lane.channel(k), x);
  }
}

// Rows [room, H, D] of dequantized codes, of each side from pages whose sections begin at these bytes. Launch with a grid of
// (tokens / (4 * WARP_ROWS) rounded up, H, sides) and 128 threads; so below.
extern "C" __global__ void __launch_bounds__(32 * WARPS) restore_rows(
    const int* tokens_bounds, const int* tokens_firsts, const int* tokens_jumps, const int* tokens_gaps, Count tokens_prompts,
    const Count* tokens_table, Count tokens_stride, Count room, Count page_bytes, Count begin_scales,
    Count begin_offsets, const unsigned char* key_memory, Element* key_rows, const unsigned char* value_memory, Element* value_rows) {
  const Tokens tokens = {tokens_bounds, tokens_firsts, tokens_jumps, tokens_gaps, int(tokens_prompts), tokens_table, tokens_stride};
  const Lane lane;
  const Count head = blockIdx.y, heads = gridDim.y, token = first_row();
  const bool is_value = blockIdx.z;
  Element* to = (is_value ? value_rows : key_rows) + (token * heads + head) * (is_value ? D : KEY);
  int prompt, place;
  if (token >= room || !lane.active) return;
  if (!tokens.find(token, prompt, place)) {
    if (is_value) fill(to, lane, 0.0f);
    return;
  }
  const Count at = tokens.page(prompt, place) * page_bytes, row = head * TOKENS + place % TOKENS;
  const float scale = read(reinterpret_cast<const Metadata*>(value_memory + at + begin_scales)[row * GROUPS]);
  if (scale != scale) {
    fill(to, lane, is_value ? 0.0f : NOT_A_NUMBER, is_value ? D : KEY);
    return;
  }
  if (EXACT && !is_value) {
    copy_exact(to, lane, key_memory + at, place % TOKENS);
    return;
  }
  const unsigned char* page = (is_value ? value_memory : key_memory) + at;
  const Metadata* scales = reinterpret_cast<const Metadata*>(page + begin_scales) + row * GROUPS;
  const Metadata* offsets = reinterpret_cast<const Metadata*>(page + begin_offsets) + row * GROUPS;
  alignas(16) float x[4][RUN];
  dequantize_row(x, lane, page + row * CODES, scales, offsets, 1);
#pragma unroll
  for (int k = 0; k < 4; k++) save(to + lane.channel(k), x[k]);
}

// Keys and values [room, H, D] of copies [slots, H, TOKENS, D], and from the position `contexts` [C] of their prompt on, of new rows
// [T, H, D] from `news` [C] on; keys less mean [H, D], or null. slot_of has the slot of each page. The grid has both sides as z.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gather(
    const int* tokens_bounds, const int* tokens_firsts, const int* tokens_jumps, const int* tokens_gaps, Count tokens_prompts,
    const Count* tokens_table, Count tokens_stride, Count room, const Count* slot_of, const int* contexts, const int* news,
    const float* mean, const Element* key_copies, const Element* key_rows, Count key_stride, Element* key_into,
    const Element* value_copies, const Element* value_rows, Count value_stride, Element* value_into) {
  const Tokens tokens = {tokens_bounds, tokens_firsts, tokens_jumps, tokens_gaps, int(tokens_prompts), tokens_table, tokens_stride};
  const Lane lane;
  const bool is_value = blockIdx.z;
  const Count head = blockIdx.y, heads = gridDim.y, token = first_row();
  int prompt = 0, place = 0;
  const bool exists = token < room && tokens.find(token, prompt, place);
  const Element *key = nullptr, *value = nullptr;
  bool is_bad = false;
  if (exists) {
    const int later = place - contexts[prompt];
    if (later >= 0) {
      const Count row = news[prompt] + later;
      key = key_rows + row * key_stride + head * D, value = value_rows + row * value_stride + head * D;
    } else {
      const Count slot = slot_of[tokens.page(prompt, place)];
      const Count copy = ((slot * heads + head) * TOKENS + place % TOKENS) * D;
      key = key_copies + copy, value = value_copies + copy;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      alignas(16) float x[RUN] = {};
      if (lane.active) load(value + lane.channel(k), x);
      for (float each : x) is_bad |= !(fabsf(each) < INFINITE);
    }
  }
  is_bad = reduce<Sum>(is_bad);
  Element* to = (is_value ? value_into : key_into) + (token * heads + head) * D;
  if (token >= room || !lane.active) return;
  if (!exists || is_bad) {
    if (is_value || exists) fill(to, lane, is_value ? 0.0f : NOT_A_NUMBER);
    return;
  }
  const Element* from = is_value ? value : key;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    alignas(16) float x[RUN];
    load(from + lane.channel(k), x);
    if (mean && !is_value)
#pragma unroll
      for (int i = 0; i < RUN; i++) x[i] = __fsub_rn(x[i], mean[head * D + lane.channel(k) + i]);
    save(to + lane.channel(k), x);
  }
}
