// Gathers rows of one layer of the host cache, which lies in pinned memory, over PCIe.
//
//   cache  [layers][groups][capacity][vectors]   pinned; a vector is 16 bytes, a group a (b, k)
//   layer  []                                    which layer to read
//   slots  [groups][fetched]                     the first count[group] of them are meant
//   count  [groups]
//   rows   [groups][fetched][vectors]            what was meant, and zeros behind it
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
// other multiprocessors to the computation beside the transfer. Lanes are dealt vectors, not rows:
// rows of 32 bytes keep all of them as busy as rows of 4 KiB.
//
// Pointers come first in each kernel's parameters, operands before results, then 32-bit integers.
// Needs no header, so that it can be built at run time.

constexpr int LOADS = 4;

template <bool with_hot_set>
__device__ void gather(const uint4* __restrict__ cache, const int* __restrict__ layer,
                       const int* __restrict__ slots, const int* __restrict__ count,
                       const int* __restrict__ entry, const unsigned char* __restrict__ miss,
                       uint4* hot, uint4* __restrict__ rows, unsigned groups, unsigned capacity,
                       unsigned fetched, unsigned vectors, unsigned entries) {
  const unsigned total = groups * fetched * vectors;  // below 2^31; offsets in the cache are not
  const unsigned stride = gridDim.x * blockDim.x;
  const unsigned long long first_group = (unsigned long long)*layer * groups;

  for (unsigned begin = blockIdx.x * blockDim.x + threadIdx.x; begin < total;
       begin += LOADS * stride) {
    // In three passes over the lane's items: their places, all loads, all stores. So the loads of
    // each pass are in flight together; places are read without a branch, for padding as well.
    unsigned row[LOADS], group[LOADS], slot[LOADS], place[LOADS];
    bool meant[LOADS], missing[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const unsigned item = begin + i * stride;
      row[i] = min(item, total - 1) / vectors;
      group[i] = row[i] / fetched;
      slot[i] = slots[row[i]];
      place[i] = with_hot_set ? entry[row[i]] : 0;
      missing[i] = with_hot_set ? miss[row[i]] : true;
      meant[i] = item < total && (int)(row[i] - group[i] * fetched) < count[group[i]];
    }
    uint4 value[LOADS];
    uint4* keep[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const unsigned vector = begin + i * stride - row[i] * vectors;
      const unsigned long long host_row = (first_group + group[i]) * capacity + slot[i];
      const uint4* source = cache + host_row * vectors + vector;
      if (with_hot_set) {
        const unsigned long long hot_row = (unsigned long long)group[i] * entries + place[i];
        keep[i] = hot + hot_row * vectors + vector;
        if (!missing[i]) source = keep[i];
      }
      value[i] = make_uint4(0, 0, 0, 0);
      if (meant[i]) value[i] = __ldcs(source);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const unsigned item = begin + i * stride;
      if (item < total) rows[item] = value[i];
      if (with_hot_set && meant[i] && missing[i]) *keep[i] = value[i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(1024)
    gather_rows(const uint4* cache, const int* layer, const int* slots, const int* count,
                uint4* rows, int groups, int capacity, int fetched, int vectors) {
  gather<false>(cache, layer, slots, count, nullptr, nullptr, nullptr, rows, groups, capacity,
                fetched, vectors, 0);
}

extern "C" __global__ void __launch_bounds__(1024)
    gather_rows_hot(const uint4* cache, const int* layer, const int* slots, const int* count,
                    const uint4* /* hot_in */, const int* entry, const unsigned char* miss,
                    uint4* rows, uint4* hot_out, int groups, int capacity, int fetched,
                    int vectors, int entries) {
  gather<true>(cache, layer, slots, count, entry, miss, hot_out, rows, groups, capacity, fetched,
               vectors, entries);
}
