// Numbers as tensor cores take them, and copies to shared memory: the instructions of PTX that kernels share which attend.
// Compile with -D: TYPE (of queries and exact rows: 0 float32, 1 float16, 2 bfloat16).

typedef unsigned long long Address;
constexpr unsigned ALL = 0xffffffffu;
constexpr float LOG2E = 1.44269504088896341f, LOWEST = -1e30f;
#define MINUS_INFINITY __int_as_float(0xff800000)

#if TYPE == 0
typedef float Element;
#else
typedef unsigned short Element;
#endif

__device__ float from_half(unsigned bits) {
  float x;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(bits));
  return x;
}

__device__ unsigned half_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ unsigned bfloat16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ float element(Element x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return from_half(x);
#else
  return __uint_as_float(unsigned(x) << 16);
#endif
}

// COUNT elements, a multiple of 4, from an address that divides by the bytes of four.
template <int COUNT>
__device__ void load(float (&x)[COUNT], const Element* from) {
  #pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
#if TYPE == 0
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
#else
    const uint2 pairs = *reinterpret_cast<const uint2*>(from + i);
    x[i] = element(pairs.x & 0xffff), x[i + 1] = element(pairs.x >> 16);
    x[i + 2] = element(pairs.y & 0xffff), x[i + 3] = element(pairs.y >> 16);
#endif
  }
}

__device__ Element rounded(float x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return half_pair(x, 0.0f);
#else
  return bfloat16_pair(x, 0.0f);
#endif
}

// d += a b for float16 codes a [16, 16] and b [16, 8], as lanes hold them.
__device__ void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for bfloat16.
__device__ void multiply_bfloat16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for exact rows, and two of their numbers.
__device__ void multiply_exact(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#if TYPE == 1
  multiply(d, a0, a1, a2, a3, b0, b1);
#else
  multiply_bfloat16(d, a0, a1, a2, a3, b0, b1);
#endif
}

__device__ unsigned element_pair(float low, float high) { return TYPE == 1 ? half_pair(low, high) : bfloat16_pair(low, high); }

// d += a b for 8-bit codes a [16, 32] and signed b [32, 8].
__device__ void multiply(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for a [16, 16].
__device__ void multiply(int (&d)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Transpose the 8 x 8 matrix of 16-bit numbers of which every lane holds a pair.
__device__ unsigned transpose(unsigned pair) {
  unsigned x;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(pair));
  return x;
}

// A number that the compiler must keep: it would rather compute again what it can, for every tile.
__device__ unsigned kept(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Addresses in shared memory are 32-bit numbers.
__device__ void copy_async(unsigned to, Address from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ void copy_async(unsigned to, const uint4* from) { copy_async(to, reinterpret_cast<Address>(from)); }

__device__ unsigned read_word(unsigned from) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}

__device__ uint2 read_two(unsigned from) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from));
  return x;
}

__device__ uint4 read_four(unsigned from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}

__device__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
