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
// A block takes `share` slots of one (b, k), for HEADS query heads at a time; further heads go over
// the slots again, which are in the cache by then. A warp takes TILE slots at a time; lane l has four
// of them, from l / QUAD * 4, for head l % QUAD. Products are those of the tensor cores
// (tensor.cu):
//
//   scores    codes [slots][columns] times query [columns][heads]
//   entries   codes [leading columns][slots] times weights [slots][heads]
//
// Codes need no conversion. A code in the low bits of a 16-bit half is a subnormal number of half
// precision, exactly code * 2^-24, and one that is 4 bits higher is 16 times as much; the query is
// scaled for both. In half precision queries and weights would lose digits: each head has two
// columns, for the rounded numbers and for the rests.

constexpr int CODE_BITS = 4;
constexpr int CODES = 32 / CODE_BITS;  // in a word
constexpr unsigned LOW_CODES = 0x000f000f;
constexpr int TILE = 32;
constexpr int HEADS = QUAD;  // at a time: lanes with the same slots
constexpr int LANE_SLOTS = 4;
constexpr int MAX_COLUMNS = 256;
constexpr int STEP_WORDS = 4;  // words of codes of two products
constexpr int STEPS = 4;       // whose codes are loaded together
constexpr int MAX_STEPS = MAX_COLUMNS / (STEP_WORDS * CODES);
constexpr int MAX_THREADS = 256;
constexpr int MAX_SHARE = 16384;
constexpr int CODE_EXPONENT = 24;  // a code is code * 2^-24

struct Query {
  uint4 columns[MAX_STEPS][WARP];  // of two products each, as `multiply` takes them
  float scale[HEADS];              // of sums of products
  float sum[HEADS];
  float bias[HEADS];  // see `rounding_bias`
};

// HEADS heads of a query, zeros behind the last one. `shared` is there for all behind the barrier.
__device__ inline void load_query(const float* query, int heads, int columns, int words,
                                  Query* shared) {
  __shared__ float scales[HEADS];
  for (int head = warp(); head < HEADS; head += warps()) {
    float total = 0, squares = 0, most = 0;
    for (int i = lane(); head < heads && i < columns; i += WARP) {
      const float x = query[head * columns + i];
      total += x;
      squares += x * x;
      most = fmaxf(most, fabsf(x));
    }
    total = reduce_warp(total, added);
    squares = reduce_warp(squares, added);
    most = reduce_warp(most, larger);
    if (lane() == 0) {
      scales[head] = power_of_two(scale_exponent(most));
      shared->scale[head] = power_of_two(CODE_EXPONENT - scale_exponent(most));
      shared->sum[head] = total;
      shared->bias[head] = squares / 24;
    }
  }
  __syncthreads();
  const int steps = (words + STEP_WORDS - 1) / STEP_WORDS;
  for (int i = threadIdx.x; i < steps * WARP; i += blockDim.x) {
    const int head = i % WARP / QUAD / 2, word = i / WARP * STEP_WORDS + i % QUAD;
    const bool rest = i / QUAD % 2;
    unsigned halves[4];
    for (int j = 0; j < 4; ++j) {  // codes j and j + 4 of the word, which are in one mask
      float x[2];
      for (int k = 0; k < 2; ++k) {
        const int column = word * CODES + j + k * CODES / 2;
        const bool there = head < heads && column < columns;
        x[k] = there ? query[head * columns + column] * scales[head] : 0.0f;
        if (j % 2) x[k] *= 1.0f / (1 << CODE_BITS);
      }
      halves[j] = to_halves(x, x + 1);
      if (rest) halves[j] = to_halves(x, x + 1);
    }
    shared->columns[i / WARP][i % WARP] = make_uint4(halves[0], halves[1], halves[2], halves[3]);
  }
  __syncthreads();
}

// Words of a row of the index, `row`, of the four slots from `first` on; 0 from `capacity` on.
__device__ inline void load_words(const unsigned* __restrict__ row, int first, int capacity,
                                  unsigned* words) {
  if (capacity % 4 == 0) {  // rows are aligned
    const uint4 four = first < capacity ? *(const uint4*)(row + first) : make_uint4(0, 0, 0, 0);
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
  } else {
    for (int i = 0; i < 4; ++i) words[i] = first + i < capacity ? row[first + i] : 0;
  }
}

__device__ inline float step_of(unsigned parameters) {
  return __uint_as_float(parameters & 0xffff0000u);
}
__device__ inline float low_of(unsigned parameters) { return __uint_as_float(parameters << 16); }

// The scores of a tile, of the lane's head and slots, and the parameters of these slots.
__device__ inline void score_tile(const unsigned* __restrict__ index, int capacity, int words,
                                  const Query& query, int first, float (&score)[LANE_SLOTS],
                                  unsigned (&parameters)[LANE_SLOTS]) {
  const int own = first + lane() / QUAD * LANE_SLOTS;
  float sum[2][4] = {};  // [i]: of slots own + 2 i and the next; rounded query and rest of each
  for (int step = 0; step * STEP_WORDS < words; step += STEPS) {
    unsigned codes[STEPS][LANE_SLOTS] = {};  // loaded before they are used: a warp waits for latency
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int word = (step + i) * STEP_WORDS + lane() % QUAD;
      if (word < words) load_words(index + (unsigned long long)word * capacity, own, capacity, codes[i]);
    }
    if (step == 0) {
      load_words(index + (unsigned long long)words * capacity, own, capacity, parameters);
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if ((step + i) * STEP_WORDS >= words) break;
      const uint4 columns = query.columns[step + i][lane()];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned x = codes[i][2 * j], y = codes[i][2 * j + 1];
        const unsigned x_rest = x >> 2 * CODE_BITS, y_rest = y >> 2 * CODE_BITS;
        constexpr unsigned HIGH_CODES = LOW_CODES << CODE_BITS;
        multiply(sum[j], make_uint4(x & LOW_CODES, y & LOW_CODES, x & HIGH_CODES, y & HIGH_CODES),
                 columns.x, columns.y);
        multiply(sum[j],
                 make_uint4(x_rest & LOW_CODES, y_rest & LOW_CODES, x_rest & HIGH_CODES,
                            y_rest & HIGH_CODES),
                 columns.z, columns.w);
      }
    }
  }
  const int head = lane() % QUAD;
  const float scale = query.scale[head], total = query.sum[head], bias = query.bias[head];
#pragma unroll
  for (int i = 0; i < LANE_SLOTS; ++i) {
    const float products = (sum[i / 2][i % 2 * 2] + sum[i / 2][i % 2 * 2 + 1]) * scale;
    const float step = step_of(parameters[i]), low = low_of(parameters[i]);
    score[i] = products * step + low * total - step * step * bias;
  }
}

// Stores four numbers to out + at, those before `end`.
__device__ inline void store_four(const float (&four)[4], float* out, int at, int end) {
  if (at + 4 <= end && ((unsigned long long)(out + at) & 15) == 0) {
    const uint4 bits = make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                  __float_as_uint(four[2]), __float_as_uint(four[3]));
    __stcg((uint4*)(out + at), bits);
  } else {
    for (int i = 0; i < 4 && at + i < end; ++i) out[at + i] = four[i];
  }
}

KERNEL(index_scores, MAX_THREADS, 4)
(const float* query, const unsigned* index, float* scores, int group, int columns, int words,
 int capacity, int share) {
  __shared__ Query shared;
  const int blocks = (capacity + share - 1) / share, start = blockIdx.x % blocks * share;
  const unsigned long long pair = blockIdx.x / blocks;
  query += pair * group * columns;
  index += pair * (words + 1) * capacity;
  scores += pair * group * capacity;
  for (int begin = 0; begin < group; begin += HEADS) {
    load_query(query + begin * columns, group - begin, columns, words, &shared);
    const int head = begin + lane() % QUAD;
    float* const out = scores + (unsigned long long)head * capacity;
    for (int first = start + warp() * TILE; first < min(start + share, capacity);
         first += warps() * TILE) {
      float score[LANE_SLOTS];
      unsigned parameters[LANE_SLOTS];
      score_tile(index, capacity, words, shared, first, score, parameters);
      if (head < group) store_four(score, out, first + lane() / QUAD * LANE_SLOTS, capacity);
    }
    __syncthreads();  // the next heads' query takes this one's place
  }
}

// Of the lane's head, over the lanes that have it.
template <typename Combine>
__device__ inline float reduce_head(float x, Combine combine) {
#pragma unroll
  for (int distance = QUAD; distance < WARP; distance *= 2) {
    x = combine(x, __shfl_xor_sync(ALL, x, distance));
  }
  return x;
}

// The rest of a tail block so far: the peak of the lane's head, the lane's own parts of the sums of
// weights and of the entries' lowest values, and the sum of one of each CODES leading columns.
template <int WORDS>
struct Rest {
  float peak, total, low;
  float columns[WORDS + 1];

  __device__ Rest() : peak(minus_infinity()), total(0), low(0), columns() {}

  // Adds a tile: its scores, and the words with the leading codes of the 8 slots from l % QUAD * 8.
  __device__ void add(const float (&score)[LANE_SLOTS], const unsigned (&parameters)[LANE_SLOTS],
                      const unsigned (&codes)[WORDS + 1][2 * LANE_SLOTS]) {
    float highest = peak, most = 0;
#pragma unroll
    for (int i = 0; i < LANE_SLOTS; ++i) {
      highest = fmaxf(highest, score[i]);
      most = fmaxf(most, step_of(parameters[i]));
    }
    highest = reduce_head(highest, larger);
    const float base = highest > minus_infinity() ? highest : 0.0f, kept = expf(peak - base);
    peak = highest;
    total *= kept;
    low *= kept;
    float weight[LANE_SLOTS];
#pragma unroll
    for (int i = 0; i < LANE_SLOTS; ++i) {
      weight[i] = expf(score[i] - base);
      total += weight[i];
      low += weight[i] * low_of(parameters[i]);
    }
    if (WORDS == 0) return;
    const int exponent = scale_exponent(reduce_head(most, larger));
    const float up = power_of_two(exponent), down = power_of_two(CODE_EXPONENT - exponent);
    unsigned weights[LANE_SLOTS];  // [slot of each lane][head, rounded and rest], transposed
#pragma unroll
    for (int i = 0; i < LANE_SLOTS; ++i) {
      float scaled = weight[i] * (step_of(parameters[i]) * up), none = 0;
      const unsigned rounded = to_halves(&scaled, &none);
      weights[i] = transpose(rounded | to_halves(&scaled, &none) << 16);
    }
    const int shift = lane() / QUAD * CODE_BITS;  // of the column that is this lane's
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < LANE_SLOTS; i += 2) {
      unsigned code[2][2] = {};  // [word][slots i and i + 1 of two lanes]
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          constexpr unsigned CODE = (1 << CODE_BITS) - 1;
          code[word][j] = (codes[word][i + j] >> shift & CODE) |
                          (codes[word][i + j + LANE_SLOTS] >> shift & CODE) << 16;
        }
      }
      multiply(sum, make_uint4(code[0][0], code[1][0], code[0][1], code[1][1]), weights[i],
               weights[i + 1]);
    }
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      columns[word] = columns[word] * kept + (sum[2 * word] + sum[2 * word + 1]) * down;
    }
  }

  // The sums of all lanes of the head.
  __device__ void finish() {
    total = reduce_head(total, added);
    low = reduce_head(low, added);
  }
};

// Marks which of the slots from `start` on are requested.
__device__ inline void mark(const int* slots, int count, int start, int share, unsigned* requested) {
  for (int i = threadIdx.x; i < share / WARP; i += blockDim.x) requested[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int at = slots[i] - start;
    if (at >= 0 && at < share) atomicOr(requested + at / WARP, 1u << at % WARP);
  }
  __syncthreads();
}

// As `index_rest`, with pointers to the arrays of this (b, k), for WORDS * CODES leading columns.
template <int WORDS>
__device__ void rest_of_share(const float* query, const unsigned* index, int position, float* rest,
                              float* entry, int group, int columns, int words, int capacity,
                              int start, int share, int tail_block, int sinks, int window,
                              Query* shared, const unsigned* requested) {
  const int end = min(position - window + 1, capacity), tail_blocks = capacity / tail_block;
  for (int begin = 0; begin < group; begin += HEADS) {
    load_query(query + begin * columns, group - begin, columns, words, shared);
    const int head = begin + lane() % QUAD;
    for (int block = start + warp() * tail_block; block < min(start + share, capacity);
         block += warps() * tail_block) {
      Rest<WORDS> sums;
      for (int first = block; first < block + tail_block; first += TILE) {
        if (first >= end || first + TILE <= sinks) continue;  // not on the host alone
        float score[LANE_SLOTS];
        unsigned parameters[LANE_SLOTS], codes[WORDS + 1][2 * LANE_SLOTS] = {};
        score_tile(index, capacity, words, *shared, first, score, parameters);
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
          if (word < words) {
            const unsigned* const row = index + (unsigned long long)word * capacity;
            const int own = first + lane() % QUAD * 2 * LANE_SLOTS;
            load_words(row, own, capacity, codes[word]);
            load_words(row, own + LANE_SLOTS, capacity, codes[word] + LANE_SLOTS);
          }
        }
        unsigned left_out = requested[(first - start) / WARP];
        if (first < sinks) left_out |= (1u << (sinks - first)) - 1;
        if (end - first < TILE) left_out |= ALL << (end - first);
        left_out >>= lane() / QUAD * LANE_SLOTS;
#pragma unroll
        for (int i = 0; i < LANE_SLOTS; ++i) {
          if (left_out >> i & 1) score[i] = minus_infinity();
        }
        sums.add(score, parameters, codes);
      }
      sums.finish();
      if (head < group) {
        const unsigned long long place = (unsigned long long)head * tail_blocks + block / tail_block;
        const bool any = sums.total > 0;
        if (lane() < QUAD) rest[place] = any ? sums.peak + logf(sums.total) : minus_infinity();
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
          const float mean = (sums.columns[word] + sums.low) / sums.total;
          entry[(place * WORDS + word) * CODES + lane() / QUAD] = any ? mean : 0.0f;
        }
      }
    }
    __syncthreads();  // the next heads' query takes this one's place
  }
}

KERNEL(index_rest, MAX_THREADS, 4)
(const float* query, const unsigned* index, const int* positions, const int* slots,
 const int* count, float* rest, float* entry, int heads, int group, int columns, int words,
 int capacity, int share, int size, int tail_block, int sinks, int window, int leading) {
  __shared__ Query shared;
  __shared__ unsigned requested[MAX_SHARE / WARP];
  const int blocks = (capacity + share - 1) / share, start = blockIdx.x % blocks * share;
  const unsigned long long pair = blockIdx.x / blocks;
  query += pair * group * columns;
  index += pair * (words + 1) * capacity;
  slots += pair * size;
  rest += pair * group * (capacity / tail_block);
  entry += pair * group * (capacity / tail_block) * leading;
  mark(slots, count[pair], start, share, requested);
#define REST(leading_words)                                                                        \
  rest_of_share<leading_words>(query, index, positions[pair / heads], rest, entry, group, columns, \
                               words, capacity, start, share, tail_block, sinks, window, &shared,  \
                               requested)
  if (leading == 0) REST(0);
  if (leading == CODES) REST(1);
  if (leading == 2 * CODES) REST(2);
#undef REST
}
