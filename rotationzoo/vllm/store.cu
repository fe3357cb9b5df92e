// Quantized rows of new tokens to their pages, and the rows themselves to copies: what `LayerPages.write` in pages.py does with eight
// operations of torch.
//
// Compile with -D: TOKENS (of a page), NUMBERS (of a group: 1 without an offset, or 2). No header is included: NVRTC compiles this file on machines without a CUDA toolkit.

typedef long long Count;

// Copy words of 4 bytes, or what is left in 2.
__device__ void copy(unsigned char* to, const unsigned char* from, int bytes) {
  for (int i = 4 * threadIdx.x; i < bytes; i += 4 * blockDim.x)
    if (i + 4 <= bytes && (Count(to) | Count(from)) % 4 == 0)
      *reinterpret_cast<unsigned*>(to + i) = *reinterpret_cast<const unsigned*>(from + i);
    else
      for (int j = i; j < min(i + 4, bytes); j += 2)
        *reinterpret_cast<unsigned short*>(to + j) = *reinterpret_cast<const unsigned short*>(from + j);
}

// New tokens of one side: codes [H, T, code_bytes + third_bytes], numbers [H, T, groups, NUMBERS] (scale and offset, of
// number_bytes each) and rows [T, H, row_bytes] -> their places in pages of page_bytes, and in copies [slots, H, TOKENS, row_bytes].
// Grid: x = T, y = H.
extern "C" __global__ void store(
    const unsigned char* codes, const unsigned char* numbers, const unsigned char* rows, Count row_stride, const Count* pages,
    const Count* places, const Count* slots, unsigned char* memory, Count page_bytes, Count code_bytes, Count third_bytes,
    Count third_start, Count scale_start, Count offset_start, Count groups, Count number_bytes, unsigned char* copies, Count row_bytes) {
  const Count token = blockIdx.x, head = blockIdx.y, tokens = gridDim.x, heads = gridDim.y;
  const Count from = head * tokens + token, to = head * TOKENS + places[token];
  unsigned char* page = memory + pages[token] * page_bytes;
  codes += from * (code_bytes + third_bytes);
  copy(page + to * code_bytes, codes, code_bytes);
  copy(page + third_start + to * third_bytes, codes + code_bytes, third_bytes);
  unsigned char* targets[] = {page + scale_start, page + offset_start};
  for (int i = threadIdx.x; i < NUMBERS * groups; i += blockDim.x)
    for (int j = 0; j < number_bytes; j += 2)
      *reinterpret_cast<unsigned short*>(targets[i % NUMBERS] + (to * groups + i / NUMBERS) * number_bytes + j) =
          *reinterpret_cast<const unsigned short*>(numbers + (from * NUMBERS * groups + i) * number_bytes + j);
  copy(copies + (slots[token] * heads * TOKENS + to) * row_bytes, rows + token * row_stride + head * row_bytes, row_bytes);
}
