// Which thread blocks read the exact tokens of a request, and which its packed ones: what kernels of attention share.
//
// There are first those for packed tokens, of which a request has `splits` on average, in proportion to its tokens, and at most `most`. So
// a long request beside short ones has more blocks. Then there are `windows` blocks of each request for exact tokens, which end sooner.

__device__ int start_of(const int* starts, int request) { return starts ? starts[request] : 0; }

template <int TILE, int LEAST>  // tokens of a tile; and tiles of a block, unless its request has fewer
struct BlocksOf {
  const int *starts, *lengths;  // [requests]: how many of the `lengths` packed tokens are not read, or null; and these
  int requests, windows, splits, most;
  int4* table;  // what `plan` finds, of more requests than one: the `Work` of each block for packed tokens, and a `Share` of each request

  // What a request's blocks write lies together, those for exact tokens first.
  struct Work { int request, begin, end, place; };  // of a block: its tiles, and where it writes; without any, the request is -1
  struct Share { int first, count, none[2]; };      // of a request: its first place, and how many blocks it has for packed tokens

  __device__ BlocksOf(const int* starts, const int* lengths, Count requests, Count windows, Count splits, Count most, int4* table)
      : starts(starts), lengths(lengths), requests(requests), windows(windows), splits(splits), most(most), table(table) {}

  static __device__ int divided(int number, int by) { return (number + by - 1) / by; }  // rounded up
  __device__ int first(int request) const { return start_of(starts, request) / TILE; }
  __device__ int tiles(int request) const {
    return request < requests ? max(0, divided(lengths[request], TILE) - first(request)) : 0;
  }
  // Those for packed tokens: each request rounds the number of its own up, by less than one.
  __device__ int packed() const { return requests * (splits + 1) - 1; }
  __device__ int total() const { return packed() + requests * windows; }

  __device__ Work work(int block) const {
    return requests > 1 ? reinterpret_cast<const Work*>(table)[block] : work(0, {0, splits}, block);
  }
  __device__ Share share(int request) const {
    return requests > 1 ? reinterpret_cast<const Share*>(table + packed())[request] : Share{0, splits};
  }

  // That of a block for exact tokens, which takes its part of what its request has of them.
  __device__ Work exact_work(int block) const {
    return {block / windows, block % windows, windows, share(block / windows).first + block % windows};
  }
  __device__ static void take_part(Work& work, int count) {
    const int each = divided(count, work.end), begin = work.begin * each;
    work.begin = begin, work.end = min(begin + each, count);
  }

  // Fill the table, by a block of at least 64 threads.
  __device__ void plan() const {
    __shared__ int used;
    Share* shares = reinterpret_cast<Share*>(table + packed());
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (!warp) {
      int sum = 0, longest = 0;
      for (int r = lane; r < requests; r += 32) {
        const int count = tiles(r);
        sum += count, longest = max(longest, count);
      }
      sum = __reduce_add_sync(ALL, sum), longest = __reduce_max_sync(ALL, longest);
      const int each = max(LEAST, max(divided(sum, requests * splits), divided(longest, most)));
      int before = 0;
      for (int begin = 0; begin < requests; begin += 32) {
        const int count = divided(tiles(begin + lane), each);
        int end = count;
        #pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int of_lower = __shfl_up_sync(ALL, end, step);
          if (lane >= step) end += of_lower;
        }
        if (begin + lane < requests) shares[begin + lane] = {before + end - count + (begin + lane) * windows, count};
        before += __shfl_sync(ALL, end, 31);
      }
      if (!lane) used = before;
    }
    __syncthreads();
    Work* works = reinterpret_cast<Work*>(table);
    for (int r = warp; r < requests; r += blockDim.x / 32)
      for (int i = lane; i < shares[r].count; i += 32) works[shares[r].first - r * windows + i] = work(r, shares[r], i);
    for (int i = used + threadIdx.x; i < packed(); i += blockDim.x) works[i] = {-1};
  }

 private:
  __device__ Work work(int request, const Share& share, int part) const {
    const int count = tiles(request), each = divided(count, share.count), from = min(count, part * each);
    return {request, first(request) + from, first(request) + min(count, from + each), share.first + windows + part};
  }
};
