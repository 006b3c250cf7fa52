// Parts for kernels in which a block works on one (b, k): reductions, and the largest of many keys.
//
// All threads of a block call these functions together; blocks have whole warps, at most 32.

// A kernel of at most `threads` threads, `blocks` of which fit a multiprocessor at a time. The entry
// point that calls it, with integers as constants, comes from launch.py.
#define KERNEL(name, threads, blocks)     \
  constexpr int name##_threads = threads; \
  constexpr int name##_blocks = blocks;   \
  __device__ inline void name
template <typename... Parameters, typename... Arguments>
__device__ inline void call(void (&kernel)(Parameters...), Arguments... arguments) {
  kernel((Parameters)arguments...);
}

constexpr unsigned ALL = 0xffffffffu;  // lanes of a warp
constexpr int WARP = 32;
constexpr int BATCH = 4;  // independent loads of a lane
constexpr int DIGIT = 8;  // bits of a radix digit
constexpr int BINS = 1 << DIGIT;
constexpr int COPIES = 8;  // of the histogram, so that warps collide less

__device__ inline int lane() { return threadIdx.x % WARP; }
__device__ inline int warp() { return threadIdx.x / WARP; }
__device__ inline int warps() { return blockDim.x / WARP; }
__device__ inline unsigned lanes_below() { return (1u << lane()) - 1; }

// Combines a value of every lane of a warp; all get the result, combined in one order.
template <typename T, typename Combine>
__device__ inline T reduce_warp(T value, Combine combine) {
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(ALL, value, offset));
  }
  return value;
}

// The same for every thread of the block, of COUNT values at once; `neutral` changes no value that
// it is combined with.
template <int COUNT, typename T, typename Combine>
__device__ void reduce(T (&values)[COUNT], T neutral, Combine combine) {
  __shared__ T partial[COUNT][WARP];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = reduce_warp(values[i], combine);
    if (lane() == 0) partial[i][warp()] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = reduce_warp(lane() < warps() ? partial[i][lane()] : neutral, combine);
  }
  __syncthreads();
}

__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline float added(float a, float b) { return a + b; }

__device__ inline int sum(int value) {
  int values[1] = {value};
  reduce(values, 0, [](int a, int b) { return a + b; });
  return values[0];
}

// The least and the largest of all threads' values.
__device__ inline void span(unsigned* least, unsigned* most) {
  unsigned values[2] = {~*least, *most};
  reduce(values, 0u, [](unsigned a, unsigned b) { return max(a, b); });
  *least = ~values[0];
  *most = values[1];
}

__device__ inline void from_bits(unsigned bits, unsigned* x) { *x = bits; }
__device__ inline void from_bits(unsigned bits, float* x) { *x = __uint_as_float(bits); }

// Elements first .. first + 3 of an array; `other` from `end` on.
template <typename T>
__device__ inline void load_four(const T* __restrict__ array, int first, int end, T other,
                                 T (&four)[4]) {
  if (first + 4 <= end && ((unsigned long long)(array + first) & 15) == 0) {
    const uint4 bits = *(const uint4*)(array + first);
    from_bits(bits.x, four);
    from_bits(bits.y, four + 1);
    from_bits(bits.z, four + 2);
    from_bits(bits.w, four + 3);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = first + i < end ? array[first + i] : other;
  }
}

// visit(key) for all keys, in any order, by the whole block.
template <typename Visit>
__device__ void for_each_key(const unsigned* keys, int length, Visit visit) {
  for (int begin = threadIdx.x; begin < length; begin += BATCH * blockDim.x) {
    unsigned key[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int at = begin + i * blockDim.x;
      key[i] = at < length ? keys[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (key[i]) visit(key[i]);
    }
  }
}

// Numbers the positions of [0, length) of a warp's own share in order: visit(position, key) is
// called by all lanes of a warp at once; beyond the end with a key of 0.
template <typename Visit>
__device__ void for_warp_share(const unsigned* keys, int length, Visit visit) {
  const int steps = (length + WARP - 1) / WARP;
  const int share = (steps + warps() - 1) / warps() * WARP;
  const int end = min(length, (warp() + 1) * share);
  for (int begin = warp() * share; begin < end; begin += BATCH * WARP) {
    unsigned key[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int at = begin + i * WARP + lane();
      key[i] = at < end ? keys[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) visit(begin + i * WARP + lane(), key[i]);
  }
}

// What is taken: keys > above, and the first `ties` of those equal to it.
struct Threshold {
  unsigned above;
  int ties;
};

// The bin in which the number of keys, counted from the largest on, reaches `wanted`.
struct Bin {
  int number, larger, size;  // larger: keys in the bins above it
};

__device__ inline Bin find_bin(const unsigned (*histogram)[BINS], int wanted) {
  constexpr int LANE_BINS = BINS / WARP;
  __shared__ Bin found;
  if (warp() == 0) {
    int size[LANE_BINS], total = 0;  // lane 0 has the highest bins
    for (int i = 0; i < LANE_BINS; ++i) {
      size[i] = 0;
      for (int copy = 0; copy < COPIES; ++copy) {
        size[i] += histogram[copy][BINS - 1 - (lane() * LANE_BINS + i)];
      }
      total += size[i];
    }
    int reached = total;  // by this lane and those before it
    for (int offset = 1; offset < WARP; offset *= 2) {
      const int other = __shfl_up_sync(ALL, reached, offset);
      if (lane() >= offset) reached += other;
    }
    if (reached >= wanted && reached - total < wanted) {
      int larger = reached - total, i = 0;
      while (larger + size[i] < wanted) larger += size[i++];
      found = {BINS - 1 - (lane() * LANE_BINS + i), larger, size[i]};
    }
  }
  __syncthreads();
  return found;
}

// The threshold that `wanted` of the keys within [least, most] reach: radix select from the highest
// digit in which they differ. 0 < wanted < number of keys; keys of 0 do not count.
__device__ inline Threshold find_threshold(const unsigned* keys, int length, unsigned least,
                                           unsigned most, int wanted) {
  __shared__ unsigned histogram[COPIES][BINS];
  unsigned long long prefix = 0;  // of (key - least), the digits found so far
  int end = WARP - __clz(most - least);
  while (true) {
    const int begin = max(end - DIGIT, 0);  // the digit is bits begin .. end - 1
    for (int i = threadIdx.x; i < COPIES * BINS; i += blockDim.x) histogram[i / BINS][i % BINS] = 0;
    __syncthreads();
    unsigned* const counts = histogram[warp() % COPIES];
    for_each_key(keys, length, [&](unsigned key) {
      const unsigned long long offset = key - least;
      const unsigned digit = (offset >> begin) & ((1u << (end - begin)) - 1);
      if (offset >> end == prefix) atomicAdd(counts + digit, 1u);
    });
    __syncthreads();
    const Bin bin = find_bin(histogram, wanted);
    wanted -= bin.larger;
    prefix = prefix << (end - begin) | bin.number;
    const unsigned lowest = least + (unsigned)(prefix << begin);
    if (bin.size == wanted) return {lowest - 1, 0};
    if (begin == 0) return {lowest, wanted};
    end = begin;
  }
}

// Writes place(i) of the positions i of the `wanted` largest keys to out, ascending; of equal keys
// the first.
//
//   available    how many keys are not 0; at least `wanted`
//   least, most  of those
template <typename Place>
__device__ void top(const unsigned* keys, int length, int available, unsigned least, unsigned most,
                    int wanted, int* out, Place place) {
  __shared__ int larger[WARP], equal[WARP];
  if (wanted == 0) return;
  Threshold threshold = {0, 0};
  if (wanted < available) threshold = find_threshold(keys, length, least, most, wanted);
  const bool ties = threshold.ties > 0;

  int warp_larger = 0, warp_equal = 0;
  for_warp_share(keys, length, [&](int, unsigned key) {
    warp_larger += __popc(__ballot_sync(ALL, key > threshold.above));
    warp_equal += __popc(__ballot_sync(ALL, ties && key == threshold.above));
  });
  if (lane() == 0) {
    larger[warp()] = warp_larger;
    equal[warp()] = warp_equal;
  }
  __syncthreads();
  int before = 0, tied = 0;
  for (int i = 0; i < warp(); ++i) {
    before += larger[i];
    tied += equal[i];
  }
  before += min(tied, threshold.ties);
  for_warp_share(keys, length, [&](int position, unsigned key) {
    const unsigned equals = __ballot_sync(ALL, ties && key == threshold.above);
    const bool kept = key > threshold.above ||
                      (equals >> lane() & 1 &&
                       tied + __popc(equals & lanes_below()) < threshold.ties);
    const unsigned all_kept = __ballot_sync(ALL, kept);
    if (kept) out[before + __popc(all_kept & lanes_below())] = place(position);
    before += __popc(all_kept);
    tied += __popc(equals);
  });
  __syncthreads();
}
