// Quantized rows of new tokens to their pages, and the rows themselves to copies: what `LayerPages.store` and `copy` in pages.py do
// with eight operations of torch.
//
// Compile with -D: TOKENS (of a page). No header of CUDA is included: NVRTC compiles this file on machines without a CUDA toolkit.

#include "launches.cu"

// Copy words of 4 bytes, or what is left in 2.
__device__ void copy(unsigned char* to, const unsigned char* from, int bytes) {
  for (int i = 4 * threadIdx.x; i < bytes; i += 4 * blockDim.x)
    if (i + 4 <= bytes && (Count(to) | Count(from)) % 4 == 0)
      *reinterpret_cast<unsigned*>(to + i) = *reinterpret_cast<const unsigned*>(from + i);
    else
      for (int j = i; j < min(i + 4, bytes); j += 2)
        *reinterpret_cast<unsigned short*>(to + j) = *reinterpret_cast<const unsigned short*>(from + j);
}

// Rows [T, H, row_bytes] of both sides, `stride` bytes from one token to the next, to copies [slots, H, TOKENS, row_bytes]. Slot 0
// belongs to no page. Grid: x = T, y = H, z = sides.
extern "C" __global__ void copy_rows(
    const Count* places, const Count* slots, Count row_bytes, const unsigned char* key_rows, Count key_stride, unsigned char* key_copies,
    const unsigned char* value_rows, Count value_stride, unsigned char* value_copies) {
  wait_for_previous();  // all of it comes from kernels of this step
  const Count token = blockIdx.x, head = blockIdx.y, heads = gridDim.y, slot = slots[token];
  if (!slot) return;
  const unsigned char* row = blockIdx.z ? value_rows + token * value_stride : key_rows + token * key_stride;
  unsigned char* copies = blockIdx.z ? value_copies : key_copies;
  copy(copies + ((slot * heads + head) * TOKENS + places[token]) * row_bytes, row + head * row_bytes, row_bytes);
}

// New tokens of one side: codes [H, T, code_bytes] and numbers [H, T, groups, 2] (scale and offset, of number_bytes each) -> their
// places in pages of page_bytes. `bad`: how many rows were refused, whose scales are no numbers, and the place of the last one in
// tokens; page 0 belongs to nobody. Grid: x = T, y = H.
extern "C" __global__ void store(
    const unsigned char* codes, const unsigned char* numbers, const Count* pages, const Count* places, unsigned char* memory,
    Count page_bytes, Count code_bytes, Count begin_scales, Count begin_offsets, Count groups, Count number_bytes,
    unsigned long long* bad) {
  const Count token = blockIdx.x, head = blockIdx.y, tokens = gridDim.x;
  const Count from = head * tokens + token, to = head * TOKENS + places[token];
  unsigned char* page = memory + pages[token] * page_bytes;
  copy(page + to * code_bytes, codes + from * code_bytes, code_bytes);
  unsigned char* targets[] = {page + begin_scales, page + begin_offsets};
  for (int i = threadIdx.x; i < 2 * groups; i += blockDim.x)
    for (int j = 0; j < number_bytes; j += 2)
      *reinterpret_cast<unsigned short*>(targets[i % 2] + (to * groups + i / 2) * number_bytes + j) =
          *reinterpret_cast<const unsigned short*>(numbers + (from * 2 * groups + i) * number_bytes + j);
  const unsigned short* scale = reinterpret_cast<const unsigned short*>(numbers + from * 2 * groups * number_bytes);
  const bool is_number = number_bytes == 2 ? (scale[0] & 0x7fff) <= 0x7c00 : (scale[1] & 0x7fff) <= 0x7f80;
  if (!threadIdx.x && pages[token] && !is_number) atomicAdd(bad, 1ull), bad[1] = pages[token] * TOKENS + places[token];
}

// Exact rows [T, row_bytes] of numbers of so many bytes, `stride` bytes from one token to the next -> their places in pages. A row that
// has a number whose bits without its sign are more than `largest` is counted in `bad`, as above. Grid: x = T; 32 threads.
extern "C" __global__ void store_exact(
    const unsigned char* rows, Count stride, Count row_bytes, Count number_bytes, Count largest, const Count* pages, const Count* places,
    unsigned char* memory, Count page_bytes, unsigned long long* bad) {
  const Count token = blockIdx.x;
  const unsigned char* row = rows + token * stride;
  copy(memory + pages[token] * page_bytes + places[token] * row_bytes, row, row_bytes);
  bool good = true;
  for (int i = threadIdx.x; i < row_bytes / number_bytes; i += blockDim.x)
    good &= number_bytes == 2 ? (reinterpret_cast<const unsigned short*>(row)[i] & 0x7fff) <= largest
                              : (reinterpret_cast<const unsigned*>(row)[i] & 0x7fffffff) <= largest;
  good = __all_sync(0xffffffff, good);
  if (!threadIdx.x && pages[token] && !good) atomicAdd(bad, 1ull), bad[1] = pages[token] * TOKENS + places[token];
}
