// Replacement in the hot set: the result of `cache.hot_set.replacement`, in one launch of a
// block for each (b, k).
//
//   slots, count          the request, [b][k][n] and [b][k]
//   positions             [b], of the current tokens
//   hot_slots, used       [b][k][h], in place: the slot in each entry (-1: empty), its last use
//   place                 [b][k][t], in place: the entry of each slot, -1 without one
//   entry, miss           [b][k][n]: the replacement; 0 for padding
//   keys, victims         scratch, [b][k][h] and [b][k][n]

template <typename Place>
__device__ void replace(const int* slots, const int* count, const int* positions, int* entry,
                        unsigned char* miss, int* hot_slots, int* used, Place* place,
                        unsigned* keys, int* victims, int heads, int size, int entries,
                        int capacity) {
  const unsigned long long block = blockIdx.x;
  const int wanted = count[block];
  const int now = positions[block / heads];
  slots += block * size;
  entry += block * size;
  miss += block * size;
  victims += block * size;
  hot_slots += block * entries;
  used += block * entries;
  keys += block * entries;
  place += block * capacity;

  int missing = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const int found = i < wanted ? (int)place[slots[i]] : 0;
    if (i < wanted && found >= 0) used[found] = now;
    missing += found < 0;
    entry[i] = max(found, 0);
    miss[i] = found < 0;
  }
  missing = sum(missing);
  if (missing == 0) return;

  // Entries give way in order of their last use, empty ones first, those that were hit last.
  unsigned least = ALL, most = 0;
  for (int i = threadIdx.x; i < entries; i += blockDim.x) {
    const unsigned key = ~(unsigned)(used[i] + 1);
    keys[i] = key;
    least = min(least, key);
    most = max(most, key);
  }
  span(&least, &most);
  top(keys, entries, entries, least, most, missing, victims, [](int entry) { return entry; });

  // The first missing row gets the first victim, and so on. Each warp numbers its share.
  __shared__ int shares[WARP];
  const int share = ((size + WARP - 1) / WARP + warps() - 1) / warps() * WARP;
  const int begin = warp() * share, end = min(size, begin + share);
  int misses = 0;
  for (int i = begin; i < end; i += WARP) {
    misses += __popc(__ballot_sync(ALL, i + lane() < end && miss[i + lane()]));
  }
  if (lane() == 0) shares[warp()] = misses;
  __syncthreads();
  int turn = 0;
  for (int i = 0; i < warp(); ++i) turn += shares[i];
  for (int i = begin; i < end; i += WARP) {
    const bool missed = i + lane() < end && miss[i + lane()];
    const unsigned all_missed = __ballot_sync(ALL, missed);
    if (missed) {
      const int victim = victims[turn + __popc(all_missed & lanes_below())];
      const int evicted = hot_slots[victim];
      entry[i + lane()] = victim;
      if (evicted >= 0) place[evicted] = -1;
    }
    turn += __popc(all_missed);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < wanted; i += blockDim.x) {
    if (!miss[i]) continue;
    hot_slots[entry[i]] = slots[i];
    used[entry[i]] = now;
    place[slots[i]] = entry[i];
  }
}

#define REPLACE(name, Place)                                                                   \
  KERNEL(name, 1024, 1)                                                                        \
  (const int* slots, const int* count, const int* positions, const int* /* hot_slots */,       \
   const int* /* used */, const Place* /* place */, int* entry, unsigned char* miss,           \
   int* hot_slots, int* used, Place* place, unsigned* keys, int* victims, int heads, int size, \
   int entries, int capacity) {                                                                \
    replace(slots, count, positions, entry, miss, hot_slots, used, place, keys, victims,       \
            heads, size, entries, capacity);                                                   \
  }

REPLACE(replace_entries_16, short)
REPLACE(replace_entries_32, int)
