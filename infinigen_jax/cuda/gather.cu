// Gathers rows of one layer of the host cache, which lies in pinned memory, over PCIe.
//
//   cache  [layers][groups][capacity][vectors]   pinned; a vector is 16 bytes, a group a (b, k)
//   layer  []                                    which layer to read
//   slots  [groups][fetched]                     the first count[group] of them are meant
//   count  [groups]
//   rows   [groups][fetched][vectors]            what was meant; nothing is written behind it
//
// and, with a hot set of rows that stay on the device:
//
//   entry  [groups][fetched]                     where in the hot set a meant row is, or goes
//   miss   [groups][fetched]                     1: read from the host, and put there; 0: is there
//   hot    [groups][entries][vectors]            updated in place: hot_in and hot_out are the same
//
// No entry that one row is read from is written for another in the same call, so that the order
// among rows does not matter.
//
// Bandwidth over PCIe is bytes in flight divided by latency: at 55 GB/s and 2 us, 110 kB. A few
// blocks with LOADS independent 16-byte loads in each lane have several times that, and leave the
// other multiprocessors to the computation beside the transfer. Counts are far below `fetched` and
// differ between groups, so lanes are dealt the vectors of the rows that are meant, of all groups in
// one sequence: a lane at work on padding would wait for its neighbours' loads.
//
// Pointers come first in each kernel's parameters, operands before results, then 32-bit integers.
// Needs no header, so that it can be built at run time.

constexpr int LOADS = 4;
constexpr int MAX_GROUPS = 2048;  // whose counts are summed at a time

// before[i]: rows that are meant in the groups before i, up to before[groups].
__device__ inline void sum_counts(const int* __restrict__ count, int groups, int* before) {
  for (int i = threadIdx.x; i < groups; i += blockDim.x) before[i + 1] = count[i];
  if (threadIdx.x == 0) before[0] = 0;
  __syncthreads();
  if (threadIdx.x < WARP) {
    int reached = 0;
    for (int begin = 1; begin <= groups; begin += WARP) {
      const int i = begin + lane();
      int sum = i <= groups ? before[i] : 0;
      for (int distance = 1; distance < WARP; distance *= 2) {
        const int other = __shfl_up_sync(ALL, sum, distance);
        if (lane() >= distance) sum += other;
      }
      if (i <= groups) before[i] = reached + sum;
      reached += __shfl_sync(ALL, sum, WARP - 1);
    }
  }
  __syncthreads();
}

// The group of a row, by bisection: before[group] <= row < before[group + 1].
__device__ inline int group_of(const int* before, int groups, int row) {
  int low = 0, high = groups;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (before[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <bool with_hot_set>
__device__ void gather(const uint4* __restrict__ cache, const int* __restrict__ layer,
                       const int* __restrict__ slots, const int* __restrict__ count,
                       const int* __restrict__ entry, const unsigned char* __restrict__ miss,
                       uint4* hot, uint4* __restrict__ rows, int groups, unsigned capacity,
                       unsigned fetched, unsigned vectors, unsigned entries) {
  __shared__ int before[MAX_GROUPS + 1];
  const unsigned stride = gridDim.x * blockDim.x;
  const unsigned long long first_group = (unsigned long long)*layer * groups;

  for (int begin_group = 0; begin_group < groups; begin_group += MAX_GROUPS) {
    const int at_once = min(groups - begin_group, MAX_GROUPS);
    sum_counts(count + begin_group, at_once, before);
    const unsigned total = before[at_once] * vectors;  // below 2^31; offsets in the cache are not
    for (unsigned begin = blockIdx.x * blockDim.x + threadIdx.x; begin < total;
         begin += LOADS * stride) {
      // In three passes over the lane's items: their places, all loads, all stores. So the loads of
      // each pass are in flight together; places are read without a branch, beyond the end as well.
      unsigned row[LOADS], vector[LOADS], group[LOADS], slot[LOADS], place[LOADS];
      bool missing[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const unsigned item = min(begin + i * stride, total - 1);
        const int number = item / vectors, in_span = group_of(before, at_once, number);
        vector[i] = item - number * vectors;
        group[i] = begin_group + in_span;
        row[i] = group[i] * fetched + number - before[in_span];
        slot[i] = slots[row[i]];
        place[i] = with_hot_set ? entry[row[i]] : 0;
        missing[i] = with_hot_set ? miss[row[i]] : true;
      }
      uint4 value[LOADS];
      uint4* keep[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const unsigned long long host_row = (first_group + group[i]) * capacity + slot[i];
        const uint4* source = cache + host_row * vectors + vector[i];
        if (with_hot_set) {
          const unsigned long long hot_row = (unsigned long long)group[i] * entries + place[i];
          keep[i] = hot + hot_row * vectors + vector[i];
          if (!missing[i]) source = keep[i];
        }
        value[i] = make_uint4(0, 0, 0, 0);
        if (begin + i * stride < total) value[i] = __ldcs(source);
      }
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        if (begin + i * stride >= total) break;
        rows[(unsigned long long)row[i] * vectors + vector[i]] = value[i];
        if (with_hot_set && missing[i]) *keep[i] = value[i];
      }
    }
    __syncthreads();  // the next groups' counts take the place of these
  }
}

KERNEL(gather_rows, 1024, 1)
(const uint4* cache, const int* layer, const int* slots, const int* count, uint4* rows, int groups,
 int capacity, int fetched, int vectors) {
  gather<false>(cache, layer, slots, count, nullptr, nullptr, nullptr, rows, groups, capacity,
                fetched, vectors, 0);
}

KERNEL(gather_rows_hot, 1024, 1)
(const uint4* cache, const int* layer, const int* slots, const int* count,
 const uint4* /* hot_in */, const int* entry, const unsigned char* miss, uint4* rows,
 uint4* hot_out, int groups, int capacity, int fetched, int vectors, int entries) {
  gather<true>(cache, layer, slots, count, entry, miss, hot_out, rows, groups, capacity, fetched,
               vectors, entries);
}
