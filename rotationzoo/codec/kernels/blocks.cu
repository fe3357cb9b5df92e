// Which thread blocks read the exact tokens of a request, and which its packed ones: what kernels of attention share.
//
// There are first those for packed tokens, of which a request has `splits` on average, in proportion to its tokens, and at most `most`. So
// a long request beside short ones has more blocks. Then there are `windows` blocks of each request for exact tokens, which end sooner.

template <int TILE, int LEAST>  // tokens of a tile; and tiles of a block, unless its request has fewer
struct BlocksOf {
  const int *starts, *lengths;  // [requests]: how many of the `lengths` packed tokens are not read, or null; and these
  int requests, windows, splits, most;

  struct Share { int request, before, count; };  // blocks for packed tokens: of the requests before, and of this one

  __device__ int first(int request) const { return starts ? starts[request] / TILE : 0; }
  __device__ int tiles(int request) const {
    return request < requests ? max(0, (lengths[request] + TILE - 1) / TILE - first(request)) : 0;
  }
  // Those for packed tokens: each request rounds the number of its own up, by less than one.
  __device__ int packed() const { return requests * (splits + 1) - 1; }
  __device__ int total() const { return packed() + requests * windows; }
  // The block that writes a part of what a request reads, of which the first `windows` are exact.
  __device__ int at(const Share& share, int part) const {
    return part < windows ? packed() + share.request * windows + part : share.before + part - windows;
  }
  // The tiles of a block for packed tokens.
  __device__ int2 range(const Share& share, int block) const {
    const int begin = first(share.request), count = tiles(share.request), each = (count + share.count - 1) / share.count;
    const int from = min(count, (block - share.before) * each);
    return {begin + from, begin + min(count, from + each)};
  }

  // Of a request, and of a block for packed tokens; `count` is 0 where it has no request. Every warp finds this out for itself.
  __device__ Share of_request(int request) const {
    return requests > 1 ? find([=](int r, int) { return r == request; }) : Share{0, 0, splits};
  }
  __device__ Share of_block(int block) const {
    return requests > 1 ? find([=](int, int end) { return block < end; }) : Share{0, 0, splits};
  }

 private:
  // The first request for which `is_it(request, blocks of all up to it)`.
  template <class Test>
  __device__ Share find(const Test& is_it) const {
    const int lane = threadIdx.x % 32;
    int sum = 0, longest = 0;
    for (int r = lane; r < requests; r += 32) {
      const int mine = tiles(r);
      sum += mine, longest = max(longest, mine);
    }
    #pragma unroll
    for (int step = 16; step; step /= 2)
      sum += __shfl_xor_sync(ALL, sum, step), longest = max(longest, __shfl_xor_sync(ALL, longest, step));
    const int spread = requests * splits, each = max(LEAST, max((sum + spread - 1) / spread, (longest + most - 1) / most));
    int before = 0;
    for (int begin = 0; begin < requests; begin += 32) {
      const int count = (tiles(begin + lane) + each - 1) / each;
      int end = count;
      #pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int of_lower = __shfl_up_sync(ALL, end, step);
        if (lane >= step) end += of_lower;
      }
      end += before;
      if (const unsigned found = __ballot_sync(ALL, is_it(begin + lane, end))) {
        const int of = __ffs(found) - 1;
        return {begin + of, __shfl_sync(ALL, end - count, of), __shfl_sync(ALL, count, of)};
      }
      before = __shfl_sync(ALL, end, 31);
    }
    return {0, before, 0};
  }
};
