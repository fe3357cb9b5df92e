// What CUDA kernels whose threads exchange numbers need to run on a CPU. Every thread of a block is a fiber of its own, which the
// next takes over from wherever it waits for others. Blocks run one after the other, so shared memory may be static.
//
// Addresses are checked: a kernel aborts the process that reads outside shared memory or the pages it was given.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "bits_on_cpu.h"
#define __device__ inline
#define __host__
#define __global__ inline  // a kernel that is not launched is not compiled
#define __shared__ static
#define __launch_bounds__(...)
using std::max;
using std::min;

struct Index { unsigned x, y, z; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };

// ---- threads ---------------------------------------------------------------------------------------------------------------

struct Barrier {
  int arrived = 0, round = 0;

  void open_if(int count) {
    if (arrived && arrived == count) arrived = 0, round++;
  }
};
struct Warp { unsigned numbers[32][6]; Barrier barrier; };
struct Copy { unsigned to; unsigned long long from; };
struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  Index index;
  Warp* warp;
  bool ended;
  std::vector<Copy> open;                 // asynchronous copies that no group has yet
  std::vector<std::vector<Copy>> groups;  // and those that have not arrived
};
static std::vector<Thread> threads;
static std::vector<Warp> warps;
static Thread* current;
static Barrier of_block, named[16];
static int left;  // threads of the block that have not ended
static ucontext_t scheduler;
static void (*kernel)();
static const unsigned long long* arguments;
static Index blockIdx, gridDim, blockDim;
#define threadIdx (current->index)

[[noreturn]] static void fail(const char* why, unsigned long long number) {
  fprintf(stderr, "%s: %llx\n", why, number);
  abort();
}

static void wait(Barrier& barrier, int count) {
  const int round = barrier.round;
  barrier.arrived++;
  barrier.open_if(count);
  while (barrier.round == round) swapcontext(&current->context, &scheduler);
}

static void run_thread() {
  kernel();
  current->ended = true;
  swapcontext(&current->context, &scheduler);
}

static void run_block(int count) {
  if (int(threads.size()) < count) threads = std::vector<Thread>(count);
  warps.assign(count / 32, Warp());
  for (Barrier& barrier : named) barrier = Barrier();
  of_block = Barrier(), blockDim = {unsigned(count), 1, 1};
  for (int i = 0; i < count; i++) {
    Thread& thread = threads[i];
    thread.index = {unsigned(i), 0, 0}, thread.warp = &warps[i / 32], thread.ended = false;
    thread.open.clear(), thread.groups.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, run_thread, 0);
  }
  left = count;
  for (long turn = 0; left; turn++) {
    if (turn == 10000000) fail("threads wait for each other", turn);
    for (int i = 0; i < count; i++) {
      current = &threads[i];
      if (current->ended) continue;
      swapcontext(&scheduler, &current->context);
      left -= current->ended;
      of_block.open_if(left);  // a thread that has ended is not waited for
    }
  }
}

static void __syncthreads() { wait(of_block, left); }
static void __syncwarp() { wait(current->warp->barrier, 32); }

// `result(numbers, lane)` for the numbers that all lanes of a warp bring.
template <class Result>
static auto together(std::initializer_list<unsigned> mine, Result result) {
  const int lane = threadIdx.x % 32;
  std::copy(mine.begin(), mine.end(), current->warp->numbers[lane]);
  __syncwarp();
  const auto value = result(current->warp->numbers, lane);
  __syncwarp();
  return value;
}

typedef unsigned (*Numbers)[6];

// ---- functions of CUDA -----------------------------------------------------------------------------------------------------

static int __float2int_rn(float x) { return int(nearbyintf(x)); }
#define __log2f(x) log2f(x)
#define __fdividef(x, y) ((x) / (y))
template <class T>
static void atomicAdd(T* to, T x) { *to += x; }

template <class T>
static T __shfl_sync(unsigned, T x, int lane) {
  return together({bits_as<unsigned>(x)}, [=](Numbers all, int) { return bits_as<T>(all[lane % 32][0]); });
}
template <class T>
static T __shfl_xor_sync(unsigned, T x, int step) {
  return together({bits_as<unsigned>(x)}, [=](Numbers all, int lane) { return bits_as<T>(all[lane ^ step][0]); });
}
static long long __shfl_xor_sync(unsigned, long long x, int step) {
  return together({unsigned(x), unsigned(x >> 32)}, [=](Numbers all, int lane) {
    const unsigned* of = all[lane ^ step];
    return (long long)(of[0] | (unsigned long long)of[1] << 32);
  });
}
static int __shfl_up_sync(unsigned, int x, int step) {
  return together({unsigned(x)}, [=](Numbers all, int lane) { return int(all[lane < step ? lane : lane - step][0]); });
}
static unsigned __ballot_sync(unsigned, bool x) {
  return together({x}, [](Numbers all, int) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; lane++) found |= all[lane][0] << lane;
    return found;
  });
}
static int __reduce_add_sync(unsigned, int x) {
  return together({unsigned(x)}, [](Numbers all, int) {
    int sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += int(all[lane][0]);
    return sum;
  });
}
static int __reduce_max_sync(unsigned, int x) {
  return together({unsigned(x)}, [](Numbers all, int) {
    int most = int(all[0][0]);
    for (int lane = 1; lane < 32; lane++) most = max(most, int(all[lane][0]));
    return most;
  });
}
static int __ffs(unsigned x) { return __builtin_ffs(x); }
static bool __any_sync(unsigned, bool x) {
  return together({x}, [](Numbers all, int) {
    bool any = false;
    for (int lane = 0; lane < 32; lane++) any |= all[lane][0] != 0;
    return any;
  });
}
static bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }

static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = low | (unsigned long long)high << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

// ---- in place of the functions of attention.cu that are written in PTX ------------------------------------------------------

static unsigned half_pair(float low, float high) {
  return bits_as<unsigned short>(_Float16(low)) | unsigned(bits_as<unsigned short>(_Float16(high))) << 16;
}
static unsigned bfloat16_of(float x) {
  const unsigned bits = bits_as<unsigned>(x);
  return x != x ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
static unsigned bfloat16_pair(float low, float high) { return bfloat16_of(low) | bfloat16_of(high) << 16; }
#ifdef TYPE
static unsigned pack_pair(float low, float high) { return TYPE == 1 ? half_pair(low, high) : bfloat16_pair(low, high); }
#endif
static float exp2_of(float x) { return exp2f(x); }
static unsigned kept(unsigned x) { return x; }

// d [16, 8] += a [16, K] b [K, 8]. A lane's word i of a holds row lane / 4, or 8 more where i is odd, and its words hold 32 bits of
// a row: a quarter of 16 bytes for words 0 and 1, and of the next 16 for words 2 and 3. So it is with the columns of b.
template <class T, class Product>
static void multiply(T (&d)[4], std::initializer_list<unsigned> words, int width, Product product) {
  together(words, [&](Numbers all, int lane) {
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < width; k++)
        d[i] += product(all[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2], all[column * 4 + k % 4][4 + k / 4]);
    }
    return 0;
  });
}
static float of_halves(unsigned a, unsigned b) {
  return from_half(a) * from_half(b) + from_half(a >> 16) * from_half(b >> 16);
}
static float of_bfloat16(unsigned a, unsigned b) {
  return bits_as<float>(a << 16) * bits_as<float>(b << 16) + bits_as<float>(a & 0xffff0000) * bits_as<float>(b & 0xffff0000);
}
static int of_bytes(unsigned a, unsigned b) {
  int sum = 0;
  for (int i = 0; i < 32; i += 8) sum += int(a >> i & 255) * (signed char)(b >> i);
  return sum;
}
static void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  multiply(d, {a0, a1, a2, a3, b0, b1}, 8, of_halves);
}
static void multiply_bfloat16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  multiply(d, {a0, a1, a2, a3, b0, b1}, 8, of_bfloat16);
}
static void multiply(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  multiply(d, {a0, a1, a2, a3, b0, b1}, 8, of_bytes);
}
static void multiply(int (&d)[4], unsigned a0, unsigned a1, unsigned b0) { multiply(d, {a0, a1, 0, 0, b0, 0}, 4, of_bytes); }

static unsigned transpose(unsigned pair) {
  return together({pair}, [](Numbers all, int lane) {
    unsigned result = 0;
    for (int i = 0; i < 2; i++) {
      const int row = lane % 4 * 2 + i, column = lane / 4;
      result |= (all[row * 4 + column / 2][0] >> 16 * (column % 2) & 0xffff) << 16 * i;
    }
    return result;
  });
}

// Shared memory begins at an address that is not 0.
static constexpr unsigned FIRST = 4096;
static char* shared_memory;
static unsigned shared_bytes;
static std::vector<std::pair<unsigned long long, unsigned long long>> pages;  // begin and end

template <class T>
static T& in_shared(unsigned address) {
  if (address < FIRST || address + sizeof(T) > FIRST + shared_bytes || address % sizeof(T)) fail("not in shared memory", address);
  return *reinterpret_cast<T*>(shared_memory + address - FIRST);
}
static unsigned __cvta_generic_to_shared(char* shared) { return shared_memory = shared, FIRST; }
static unsigned read_word(unsigned from) { return in_shared<unsigned>(from); }
static uint2 read_two(unsigned from) { return in_shared<uint2>(from); }
static uint4 read_four(unsigned from) { return in_shared<uint4>(from); }
static float read_number(unsigned from, unsigned index) {
#if HALF
  return from_half(in_shared<unsigned short>(from + 2 * index));
#else
  return in_shared<float>(from + 4 * index);
#endif
}

static void check_page(unsigned long long from, int bytes) {
  bool known = false;
  for (const auto& page : pages) known |= from >= page.first && from + bytes <= page.second;
  if (!known) fail("not in a page", from);
}

// A copy arrives when it is waited for, which is as late as it may.
static void copy_async(unsigned to, unsigned long long from) {
  check_page(from, 16);
  if (from % 16) fail("not at a piece", from);
  current->open.push_back({to, from});
}
static void copy_async(unsigned to, const uint4* from) { current->open.push_back({to, reinterpret_cast<unsigned long long>(from)}); }
static void end_group() { current->groups.push_back(std::exchange(current->open, {})); }
template <int PENDING>
static void wait_groups() {
  auto& groups = current->groups;
  for (; int(groups.size()) > PENDING; groups.erase(groups.begin()))
    for (const Copy& copy : groups.front()) in_shared<uint4>(copy.to) = *reinterpret_cast<const uint4*>(copy.from);
}

// ---- in place of the functions of many_heads.cu -----------------------------------------------------------------------------

#define __ldg(from) (*(from))
template <int COUNT>
static void meet(int barrier) { wait(named[barrier], COUNT); }
template <int COUNT>
static void arrive(int barrier) { named[barrier].arrived++, named[barrier].open_if(COUNT); }
static void publish() {}
static void begin_products() {}
static void end_products() {}
template <int PENDING>
static void wait_products() {}
template <int COUNT>
static void hold(float (&)[COUNT]) {}
static void prefetch_line(unsigned long long from) { check_page(from, 1); }
static void take_registers() {}
static void return_registers() {}

// A number of a matrix in shared memory, whose rows are in blocks of 64 columns; or, transposed, whose columns are in blocks of 64 rows.
// Bits 4 to 6 of addresses are swapped by the next three.
static unsigned in_matrix(unsigned long long matrix, int row, int column, bool transposed) {
  const auto part = [=](int bit) { return unsigned(matrix >> bit & 0x3fff) << 4; };
  unsigned from = part(0) + column / 8 * part(32) + column % 8 * 128 + row / 64 * part(16) + row % 64 * 2;
  if (!transposed) from = part(0) + row / 8 * part(32) + row % 8 * 128 + column * 2;
  return in_shared<unsigned short>(from ^ (from >> 7 & 7) << 4);
}
template <int COUNT, class A, class B>
static void multiply_wide(float (&d)[COUNT], A a, B b) {
  const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16 + lane / 4;
  for (int i = 0; i < COUNT; i++)
    for (int k = 0; k < 16; k++) d[i] += a(first + i / 2 % 2 * 8, k) * b(i / 4 * 8 + lane % 4 * 2 + i % 2, k);
}
static float exact_of(unsigned bits) {
#if TYPE == 1
  return from_half(bits);
#else
  return bits_as<float>(bits << 16);
#endif
}
template <bool IS_EXACT>
static float number_of(unsigned bits) { return IS_EXACT ? exact_of(bits) : from_half(bits); }
template <bool IS_EXACT>
static void multiply_rows(float (&d)[32], unsigned long long a, unsigned long long b) {
  multiply_wide(d, [=](int row, int k) { return number_of<IS_EXACT>(in_matrix(a, row, k, false)); },
                [=](int row, int k) { return number_of<IS_EXACT>(in_matrix(b, row, k, false)); });
}
template <bool IS_EXACT>
static void multiply_values(float (&d)[64], unsigned long long a, unsigned long long b) {
  multiply_wide(d, [=](int row, int k) { return number_of<IS_EXACT>(in_matrix(a, row, k, false)); },
                [=](int row, int k) { return number_of<IS_EXACT>(in_matrix(b, row, k, true)); });
}
// With a in registers, whose numbers are as `number` says.
template <int COUNT, class Number, class B>
static void multiply_wide(float (&d)[COUNT], const unsigned (&a)[4], Number number, B b) {
  together({a[0], a[1], a[2], a[3]}, [&](Numbers all, int lane) {
    multiply_wide(d, [=](int row, int k) {
      return number(all[row % 8 * 4 + k / 2 % 4][row / 8 % 2 + k / 8 * 2] >> k % 2 * 16 & 0xffff);
    }, b);
    return 0;
  });
}
static void multiply_keys(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
  multiply_wide(d, a, exact_of, [=](int row, int k) { return exact_of(in_matrix(b, row, k, false)); });
}
template <bool IS_EXACT>
static void multiply_own(float (&d)[64], const unsigned (&a)[4], unsigned long long b) {
  multiply_wide(d, a, number_of<IS_EXACT>, [=](int row, int k) { return number_of<IS_EXACT>(in_matrix(b, row, k, true)); });
}

// ---- launches --------------------------------------------------------------------------------------------------------------

// Every argument is 64 bits: an address, an integer or a double.
template <class T>
static T argument(unsigned long long bits) {
  if constexpr (std::is_same_v<T, double>)
    return bits_as<double>(bits);
  else
    return T(bits);
}

template <class... Types, size_t... I>
static void call(void (*function)(Types...), std::index_sequence<I...>) {
  function(argument<Types>(arguments[I])...);
}

template <class... Types>
static void call(void (*function)(Types...)) {
  call(function, std::index_sequence_for<Types...>());
}

template <class... Types>
static constexpr int arguments_of(void (*)(Types...)) {
  return sizeof...(Types);
}

template <auto FUNCTION>
static void launch(Index grid, int count, const unsigned long long* values, int given) {
  if (given != arguments_of(FUNCTION)) fail("so many arguments", given);
  kernel = [] { call(FUNCTION); };
  arguments = values, gridDim = grid;
  for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block(count);
}
