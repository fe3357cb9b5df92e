// What the kernels of latents share: how packed tokens lie in pages.
// Compile with -D: HALF, as in attention.cu.

#include "blocks.cu"

constexpr int TILE = 64;  // tokens of a page
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
