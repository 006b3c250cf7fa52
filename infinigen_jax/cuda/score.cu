// Scores of cached tokens by an index of 4-bit codes (index.py), read once.
//
//   query   [b][k][g][columns]      float32, in the index's coordinates
//   index   [b][k][words + 1][t]    codes, the first column lowest; then step and lowest value
//
//   index_scores
//   scores  [b][k][g][t]            of every slot
//
//   index_rest
//   positions [b], slots [b][k][n], count [b][k]    current tokens, and what is requested
//   rest    [b][k][g][t / tail_block]      log(sum(exp(score))) of each block of tail_block slots, of
//                                          those of sinks .. position - window that are not
//                                          requested; -inf where none is
//   entry   [b][k][g][t / tail_block][c]   mean of the leading c columns of the same slots' entries,
//                                          by the weights exp(score); 0 where there is none. c is 0,
//                                          8 or 16
//
// A block takes every `tiles`th tile of slots of one (b, k). A lane has LANE_SLOTS slots of it, and
// unpacks each code once for HEADS query heads; further heads go over the tile again, which is in the
// cache by then.
//
// A code becomes a float without conversion: put into the low bits of 2^23, of which 2^23 is then
// subtracted. It stays where it is in its half of a word, a power of two too large; so is the query
// too small.

constexpr int CODE_BITS = 4;
constexpr unsigned CODE_MASK = (1u << CODE_BITS) - 1;
constexpr int HALF_CODES = 16 / CODE_BITS;  // codes in half of a word
constexpr int HEADS = 4;
constexpr int LANE_SLOTS = 2;
constexpr int MAX_COLUMNS = 256;
constexpr int MAX_TILE = 512;
constexpr unsigned TWO_TO_23 = 0x4b000000u;

struct alignas(16) Column {
  float of[HEADS];
};

struct Query {
  Column column[MAX_COLUMNS];
  float sum[HEADS];
  float bias[HEADS];  // see `rounding_bias`
};

// HEADS heads of a query, zeros behind the last one. `shared` is there for all behind the barrier.
__device__ inline void load_query(const float* query, int heads, int columns, int words,
                                  Query* shared) {
  for (int i = threadIdx.x; i < words * 2 * HALF_CODES; i += blockDim.x) {
    const float scale = __int_as_float((127 - i % HALF_CODES * CODE_BITS) << 23);
    for (int head = 0; head < HEADS; ++head) {
      const bool there = head < heads && i < columns;
      shared->column[i].of[head] = there ? query[head * columns + i] * scale : 0.0f;
    }
  }
  for (int head = warp(); head < HEADS; head += warps()) {
    float total = 0, squares = 0;
    for (int i = lane(); head < heads && i < columns; i += WARP) {
      const float x = query[head * columns + i];
      total += x;
      squares += x * x;
    }
    total = reduce_warp(total, added);
    squares = reduce_warp(squares, added);
    if (lane() == 0) {
      shared->sum[head] = total;
      shared->bias[head] = squares / 24;
    }
  }
  __syncthreads();
}

// Of the slots first, first + blockDim.x, ...; those beyond the end have the last one's scores.
__device__ inline void score_slots(const unsigned* __restrict__ index, int capacity, int words,
                                   const Query& query, int first,
                                   float (&score)[LANE_SLOTS][HEADS]) {
  float sum[LANE_SLOTS][HEADS] = {};
  int slot[LANE_SLOTS];
#pragma unroll
  for (int j = 0; j < LANE_SLOTS; ++j) slot[j] = min(first + j * (int)blockDim.x, capacity - 1);

#pragma unroll 4
  for (int i = 0; i < words; ++i) {
    const unsigned* row = index + (unsigned long long)i * capacity;
    unsigned word[LANE_SLOTS];
#pragma unroll
    for (int j = 0; j < LANE_SLOTS; ++j) word[j] = row[slot[j]];
#pragma unroll
    for (int c = 0; c < 2 * HALF_CODES; ++c) {
      const Column column = query.column[i * 2 * HALF_CODES + c];
#pragma unroll
      for (int j = 0; j < LANE_SLOTS; ++j) {
        const unsigned half = c < HALF_CODES ? word[j] : word[j] >> 16;
        const unsigned in_place = half & (CODE_MASK << (c % HALF_CODES * CODE_BITS));
        const float code = __uint_as_float(in_place | TWO_TO_23) - __uint_as_float(TWO_TO_23);
#pragma unroll
        for (int head = 0; head < HEADS; ++head) sum[j][head] += column.of[head] * code;
      }
    }
  }
  const unsigned* parameters = index + (unsigned long long)words * capacity;
#pragma unroll
  for (int j = 0; j < LANE_SLOTS; ++j) {
    const unsigned both = parameters[slot[j]];
    const float step = __uint_as_float(both & 0xffff0000u), low = __uint_as_float(both << 16);
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
      score[j][head] =
          sum[j][head] * step + low * query.sum[head] - step * step * query.bias[head];
    }
  }
}

extern "C" __global__ void __launch_bounds__(MAX_TILE / LANE_SLOTS)
    index_scores(const float* query, const unsigned* index, float* scores, int group, int columns,
                 int words, int capacity, int tiles) {
  __shared__ Query shared;
  const unsigned long long pair = blockIdx.x / tiles;
  const int tile = LANE_SLOTS * blockDim.x;
  query += pair * group * columns;
  index += pair * (words + 1) * capacity;
  scores += pair * group * capacity;
  for (int begin = 0; begin < group; begin += HEADS) {
    load_query(query + begin * columns, group - begin, columns, words, &shared);
    for (int start = blockIdx.x % tiles * tile; start < capacity; start += tiles * tile) {
      float score[LANE_SLOTS][HEADS];
      score_slots(index, capacity, words, shared, start + threadIdx.x, score);
      for (int j = 0; j < LANE_SLOTS; ++j) {
        const int slot = start + j * blockDim.x + threadIdx.x;
        for (int head = 0; head < HEADS; ++head) {
          if (slot < capacity && begin + head < group) {
            scores[(unsigned long long)(begin + head) * capacity + slot] = score[j][head];
          }
        }
      }
    }
    __syncthreads();  // the next heads' query takes this one's place
  }
}

// log(sum(exp(x))) of a tail block, by a warp.
__device__ inline float log_sum(const float* x, int tail_block) {
  float peak = minus_infinity(), total = 0;
  for (int i = lane(); i < tail_block; i += WARP) peak = fmaxf(peak, x[i]);
  peak = reduce_warp(peak, larger);
  if (peak == minus_infinity()) return peak;
  for (int i = lane(); i < tail_block; i += WARP) total += expf(x[i] - peak);
  return peak + logf(reduce_warp(total, added));
}

// Mean of the leading columns of a tail block's entries, by the weights exp(score - total), by a
// warp.
template <int LEADING>
__device__ inline void mean_entry(const unsigned* __restrict__ index, int capacity, int words,
                                  int first, int tail_block, const float* score, float total,
                                  float* entry) {
  constexpr int LEADING_WORDS = LEADING / (2 * HALF_CODES);
  float sum[LEADING] = {};
  for (int i = lane(); i < tail_block; i += WARP) {
    if (score[i] == minus_infinity()) continue;
    const unsigned* codes_of_slot = index + first + i;
    const unsigned both = codes_of_slot[(unsigned long long)words * capacity];
    const float step = __int_as_float(both & 0xffff0000u), low = __int_as_float(both << 16);
    const float weight = expf(score[i] - total);
#pragma unroll
    for (int word = 0; word < LEADING_WORDS; ++word) {
      const unsigned codes = word < words ? codes_of_slot[(unsigned long long)word * capacity] : 0;
#pragma unroll
      for (int c = 0; c < 2 * HALF_CODES; ++c) {
        const unsigned code = codes >> c * CODE_BITS & CODE_MASK;
        sum[word * 2 * HALF_CODES + c] += weight * (code * step + low);
      }
    }
  }
  // Half of the columns change hands at a time: what is left of each is in every LEADING-th lane.
#pragma unroll
  for (int half = LEADING / 2; half > 0; half /= 2) {
    const bool upper = lane() & half;
#pragma unroll
    for (int c = 0; c < half; ++c) {
      const float other = __shfl_xor_sync(ALL, upper ? sum[c] : sum[c + half], half);
      sum[c] = (upper ? sum[c + half] : sum[c]) + other;
    }
  }
#pragma unroll
  for (int step = LEADING; step < WARP; step *= 2) sum[0] += __shfl_xor_sync(ALL, sum[0], step);
  if (lane() < LEADING) entry[lane()] = sum[0];
}

// Marks which slots of a tile are requested.
__device__ inline void mark(const int* slots, int count, int start, int tile, unsigned* requested) {
  for (int i = threadIdx.x; i < MAX_TILE / WARP; i += blockDim.x) requested[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int at = slots[i] - start;
    if (at >= 0 && at < tile) atomicOr(requested + at / WARP, 1u << at % WARP);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(MAX_TILE / LANE_SLOTS)
    index_rest(const float* query, const unsigned* index, const int* positions, const int* slots,
               const int* count, float* rest, float* entry, int heads, int group, int columns,
               int words, int capacity, int tiles, int size, int tail_block, int sinks, int window,
               int leading) {
  __shared__ Query shared;
  __shared__ unsigned requested[MAX_TILE / WARP];
  __shared__ float tile_scores[HEADS][MAX_TILE];
  const unsigned long long pair = blockIdx.x / tiles;
  const int tile = LANE_SLOTS * blockDim.x, tail_blocks = tile / tail_block;
  const int end = min(positions[pair / heads] - window + 1, capacity);
  query += pair * group * columns;
  index += pair * (words + 1) * capacity;
  slots += pair * size;
  rest += pair * group * (capacity / tail_block);
  entry += pair * group * (capacity / tail_block) * leading;

  for (int start = blockIdx.x % tiles * tile; start < capacity; start += tiles * tile) {
    mark(slots, count[pair], start, tile, requested);
    // Nothing of the index is read for what the host does not have yet.
    const bool any = start < end && start + tile > sinks;
    for (int begin = 0; begin < group; begin += HEADS) {
      load_query(query + begin * columns, group - begin, columns, words, &shared);
      float score[LANE_SLOTS][HEADS];
      if (any) score_slots(index, capacity, words, shared, start + threadIdx.x, score);
      for (int j = 0; j < LANE_SLOTS; ++j) {
        const int at = j * blockDim.x + threadIdx.x, slot = start + at;
        const bool counts = any && slot >= sinks && slot < end &&
                            !(requested[at / WARP] >> at % WARP & 1);
        for (int head = 0; head < HEADS; ++head) {
          tile_scores[head][at] = counts ? score[j][head] : minus_infinity();
        }
      }
      __syncthreads();
      for (int i = warp(); i < min(HEADS, group - begin) * tail_blocks; i += warps()) {
        const int head = i / tail_blocks, at = i % tail_blocks * tail_block;
        if (start + at >= capacity) continue;
        const float value = log_sum(tile_scores[head] + at, tail_block);
        const unsigned long long place =
            (unsigned long long)(begin + head) * (capacity / tail_block) +
            (start + at) / tail_block;
        if (lane() == 0) rest[place] = value;
        const float* scores = tile_scores[head] + at;
        float* mean = entry + place * leading;
        if (leading == 8) {
          mean_entry<8>(index, capacity, words, start + at, tail_block, scores, value, mean);
        } else if (leading == 16) {
          mean_entry<16>(index, capacity, words, start + at, tail_block, scores, value, mean);
        }
      }
      __syncthreads();  // the next scores and query take the place of these
    }
  }
}
