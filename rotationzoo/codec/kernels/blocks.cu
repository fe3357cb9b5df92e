// Which thread blocks read the exact tokens of a request, and which its packed ones: what kernels of attention share.
//
// There are first those for packed tokens, of which a request has `splits` on average, in proportion to its tokens, and at most `most`. So
// a long request beside short ones has more blocks. Then there are `windows` blocks of each request for exact tokens, which end sooner.

template <int TILE, int LEAST>  // tokens of a tile; and tiles of a block, unless its request has fewer
struct BlocksOf {
  const int *starts, *lengths;  // [requests]: how many of the `lengths` packed tokens are not read, or null; and these
  int requests, windows, splits, most;

  struct Share { int request, before, count; };  // blocks for packed tokens: of the requests before, and of this one

  static __device__ int divided(int number, int by) { return (number + by - 1) / by; }  // rounded up
  __device__ int first(int request) const { return starts ? starts[request] / TILE : 0; }
  __device__ int tiles(int request) const {
    return request < requests ? max(0, divided(lengths[request], TILE) - first(request)) : 0;
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
    const int begin = first(share.request), count = tiles(share.request), each = divided(count, share.count);
    const int from = min(count, (block - share.before) * each);
    return {begin + from, begin + min(count, from + each)};
  }

  // Of a request, and of a block for packed tokens; `count` is 0 where it has no request. All threads call this, once.
  __device__ Share of_request(int request) const {
    return requests > 1 ? find([=](int r, int) { return r >= request; }) : Share{0, 0, splits};
  }
  __device__ Share of_block(int block) const {
    return requests > 1 ? find([=](int, int end) { return block < end; }) : Share{0, 0, splits};
  }

 private:
  // The first request for which `is_it(request, blocks of all up to it)`, which one warp searches.
  template <class Test>
  __device__ Share find(const Test& is_it) const {
    __shared__ Share found;
    if (threadIdx.x < 32) {
      const Share share = search(is_it);
      if (!threadIdx.x) found = share;
    }
    __syncthreads();
    return found;
  }

  template <class Test>
  __device__ Share search(const Test& is_it) const {
    const int lane = threadIdx.x, mine = divided(requests, 32), from = lane * mine;  // requests of a lane
    int sum = 0, longest = 0;
    for (int r = from; r < from + mine; r++) {
      const int count = tiles(r);
      sum += count, longest = max(longest, count);
    }
    sum = __reduce_add_sync(ALL, sum), longest = __reduce_max_sync(ALL, longest);
    const int each = max(LEAST, max(divided(sum, requests * splits), divided(longest, most)));
    int of_lane = 0;
    for (int r = from; r < from + mine; r++) of_lane += divided(tiles(r), each);
    int end = of_lane;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int of_lower = __shfl_up_sync(ALL, end, step);
      if (lane >= step) end += of_lower;
    }
    const unsigned found = __ballot_sync(ALL, is_it(from + mine - 1, end));
    if (!found) return {0, 0, 0};
    const int first_lane = __ffs(found) - 1;
    Share share = {first_lane * mine, __shfl_sync(ALL, end - of_lane, first_lane), 0};
    for (;; share.request++, share.before += share.count) {
      share.count = divided(tiles(share.request), each);
      if (is_it(share.request, share.before + share.count)) return share;
    }
  }
};
