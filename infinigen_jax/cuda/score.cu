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
// the slots again, which are in the cache by then. A warp takes TILE slots at a time. Products are
// those of the tensor cores (mma.m16n8k16, sm_80 and newer), with these heads as rows:
//
//   scores    [heads][columns] times codes [columns][slots]
//   entries   [heads][slots] (weights) times codes [slots][leading columns]
//
// Codes need no conversion. A code in the low bits of a 16-bit half is a subnormal number of half
// precision, exactly code * 2^-24, and one that is 4 bits higher is 16 times as much; the query is
// scaled for both. In half precision queries and weights would lose digits: each head has two rows,
// for the rounded numbers and for the rests.

constexpr int CODE_BITS = 4;
constexpr int CODES = 32 / CODE_BITS;  // in a word
constexpr unsigned LOW_CODES = 0x000f000f;
constexpr int HEADS = 8;
constexpr int TILE = 32;
constexpr int QUAD = 4;        // lanes with one head, lane() / QUAD
constexpr int LANE_SLOTS = 8;  // consecutive slots of a tile that a lane has, from lane() % QUAD
constexpr int MAX_COLUMNS = 256;
constexpr int STEP_WORDS = 4;  // words of codes of two products
constexpr int STEPS = 2;       // whose codes are loaded together
constexpr int PRODUCTS = 2 * MAX_COLUMNS / (STEP_WORDS * CODES);
constexpr int MAX_THREADS = 256;
constexpr int MAX_SHARE = 16384;
constexpr int EXPONENT = 13;       // of the largest number in half precision: finite, with a rest
constexpr int CODE_EXPONENT = 24;  // a code is code * 2^-24
constexpr int BIAS = 127;          // of exponents

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + BIAS) << 23); }

// Exponent of the scale that brings numbers up to `most` into the range of half precision.
__device__ inline int scale_exponent(float most) {
  const int exponent = (int)(__float_as_uint(most) >> 23) - BIAS;
  return min(max(EXPONENT - exponent, -BIAS / 2), BIAS / 2);
}

struct Query {
  uint4 rows[PRODUCTS][WARP];  // as `multiply` takes them; head i in rows i and i + 8 of 16
  float scale[HEADS];          // of sums of products
  float sum[HEADS];
  float bias[HEADS];  // see `rounding_bias`
};

// Two numbers in half precision, the first in the low bits; what is left of them stays in x and y.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ inline unsigned to_halves(float* x, float* y) {
  unsigned both;
  float low, high;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(*y), "f"(*x));
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(both));
  *x -= low;
  *y -= high;
  return both;
}
#else
constexpr int HALF_BIAS = 15;

__device__ inline unsigned to_half(float* x) {
  const unsigned rounded = (__float_as_uint(*x) + 0x1000) & 0xffffe000;
  const int exponent = (int)(rounded >> 23 & 0xff) - BIAS + HALF_BIAS;
  if (exponent < 1) return 0;  // subnormal numbers become 0
  *x -= __uint_as_float(rounded);
  return rounded >> 31 << 15 | exponent << 10 | (rounded >> 13 & 0x3ff);
}

__device__ inline unsigned to_halves(float* x, float* y) {
  const unsigned low = to_half(x);
  return low | to_half(y) << 16;
}
#endif

// What a lane gives of two rows, l / 4 and 8 further, for `multiply`.
__device__ inline uint4 two_rows(float x, float y, float z, float w) {
  const unsigned first = to_halves(&x, &y), second = to_halves(&z, &w);
  const unsigned first_rest = to_halves(&x, &y);
  return make_uint4(first, first_rest, second, to_halves(&z, &w));
}

// d += a b, of a [16][16] and b [16][8] in half precision, and d [16][8].
//
// Of lane l: d has row l / 4 and row l / 4 + 8, columns l % 4 * 2 and the next, of each. A word of a
// and b has two elements: columns of a (rows of b) l % 4 * 2 and the next, or those 8 further. a has
// these of row l / 4, of row l / 4 + 8, and again 8 columns further; b those of its column l / 4.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ inline void multiply(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
#else
__device__ inline float from_half(unsigned x) {
  const int exponent = x >> 10 & 0x1f, digits = x & 0x3ff;
  const float size = exponent ? (digits | 0x400) * power_of_two(exponent - HALF_BIAS - 10)
                              : digits * power_of_two(1 - HALF_BIAS - 10);
  return x >> 15 & 1 ? -size : size;
}

__device__ inline float product(unsigned a, unsigned b) {
  return from_half(a) * from_half(b) + from_half(a >> 16) * from_half(b >> 16);
}

__device__ inline unsigned long long pair(unsigned low, unsigned high) {
  return low | (unsigned long long)high << 32;
}

__device__ inline float product(unsigned long long a, unsigned long long b) {
  return product((unsigned)a, (unsigned)b) + product((unsigned)(a >> 32), (unsigned)(b >> 32));
}

__device__ inline void multiply(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
  for (int i = 0; i < QUAD; ++i) {
    const int row = lane() / QUAD * QUAD + i, column = lane() % QUAD * 2 * QUAD + i;
    const unsigned long long own = __shfl_sync(ALL, pair(a.x, a.z), row);
    const unsigned long long further = __shfl_sync(ALL, pair(a.y, a.w), row);
    for (int next = 0; next < 2; ++next) {
      const unsigned long long b = __shfl_sync(ALL, pair(b0, b1), column + QUAD * next);
      d[next] += product(own, b);
      d[2 + next] += product(further, b);
    }
  }
}
#endif

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
  const int products = 2 * ((words + STEP_WORDS - 1) / STEP_WORDS);
  for (int i = threadIdx.x; i < products * WARP; i += blockDim.x) {
    const int head = i % WARP / QUAD;
    // The first product of two has codes 0, 4, 1, 5 of each word, the second 2, 6, 3, 7.
    const int word = i / WARP / 2 * STEP_WORDS + i % QUAD, code = i / WARP % 2 * 2;
    float x[4];
    for (int j = 0; j < 4; ++j) {
      const int column = word * CODES + code + j / 2 + j % 2 * CODES / 2;
      const bool there = head < heads && column < columns;
      x[j] = there ? query[head * columns + column] * scales[head] : 0.0f;
      if (j / 2) x[j] *= 1.0f / (1 << CODE_BITS);
    }
    shared->rows[i / WARP][i % WARP] = two_rows(x[0], x[1], x[2], x[3]);
  }
  __syncthreads();
}

// A row of the index for the lane's own slots.
__device__ inline void load_own(const unsigned* __restrict__ row, int capacity, int first,
                                unsigned (&words)[LANE_SLOTS]) {
  const int own = first + lane() % QUAD * LANE_SLOTS;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned four[4];
    load_four(row, own + 4 * half, capacity, 0u, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[4 * half + i] = four[i];
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
  float sum[4][4] = {};  // [i]: of the slots first + i, first + i + 4, ...
  load_own(index + (unsigned long long)words * capacity, capacity, first, parameters);
  for (int step = 0; step * STEP_WORDS < words; step += STEPS) {
    unsigned codes[STEPS][4] = {};  // loaded before they are used: a warp waits for latency
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int word = (step + i) * STEP_WORDS + lane() % QUAD;
      if (word < words) {
        load_four(index + (unsigned long long)word * capacity, first + lane() / QUAD * 4, capacity,
                  0u, codes[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if ((step + i) * STEP_WORDS >= words) break;
      const uint4 rows = query.rows[2 * (step + i)][lane()];
      const uint4 next_rows = query.rows[2 * (step + i) + 1][lane()];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned first_half = codes[i][j], rest = first_half >> 2 * CODE_BITS;
        multiply(sum[j], rows, first_half & LOW_CODES, first_half & LOW_CODES << CODE_BITS);
        multiply(sum[j], next_rows, rest & LOW_CODES, rest & LOW_CODES << CODE_BITS);
      }
    }
  }
  const int head = lane() / QUAD;
  const float scale = query.scale[head], total = query.sum[head], bias = query.bias[head];
#pragma unroll
  for (int i = 0; i < LANE_SLOTS; ++i) {
    const float products = (sum[i % 4][i / 4] + sum[i % 4][i / 4 + 2]) * scale;
    const float step = step_of(parameters[i]), low = low_of(parameters[i]);
    score[i] = products * step + low * total - step * step * bias;
  }
}

// Stores four numbers to out + at, those before `end`.
__device__ inline void store_four(const float* four, float* out, int at, int end) {
  if (at + 4 <= end && ((unsigned long long)(out + at) & 15) == 0) {
    *(uint4*)(out + at) = make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                     __float_as_uint(four[2]), __float_as_uint(four[3]));
  } else {
    for (int i = 0; i < 4 && at + i < end; ++i) out[at + i] = four[i];
  }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 3)
    index_scores(const float* query, const unsigned* index, float* scores, int group, int columns,
                 int words, int capacity, int share) {
  __shared__ Query shared;
  const int blocks = (capacity + share - 1) / share, start = blockIdx.x % blocks * share;
  const unsigned long long pair = blockIdx.x / blocks;
  query += pair * group * columns;
  index += pair * (words + 1) * capacity;
  scores += pair * group * capacity;
  for (int begin = 0; begin < group; begin += HEADS) {
    load_query(query + begin * columns, group - begin, columns, words, &shared);
    const int head = begin + lane() / QUAD;
    float* const out = scores + (unsigned long long)head * capacity;
    for (int first = start + warp() * TILE; first < min(start + share, capacity);
         first += warps() * TILE) {
      float score[LANE_SLOTS];
      unsigned parameters[LANE_SLOTS];
      score_tile(index, capacity, words, shared, first, score, parameters);
      const int own = first + lane() % QUAD * LANE_SLOTS;
      if (head < group) {
#pragma unroll
        for (int i = 0; i < LANE_SLOTS; i += 4) store_four(score + i, out, own + i, capacity);
      }
    }
    __syncthreads();  // the next heads' query takes this one's place
  }
}

// The rest of a tail block so far: the peak of the lane's head, the lane's own parts of the sums of
// weights and of the entries' lowest values, and sums of two of each CODES leading columns.
template <int WORDS>
struct Rest {
  float peak, total, low;
  float columns[WORDS + 1][2];

  __device__ Rest() : peak(minus_infinity()), total(0), low(0), columns() {}

  // Adds a tile: its scores, and the words of the lane's slots with the leading codes.
  __device__ void add(const float (&score)[LANE_SLOTS], const unsigned (&parameters)[LANE_SLOTS],
                      const unsigned (&codes)[WORDS + 1][LANE_SLOTS]) {
    float highest = peak, most = 0;
#pragma unroll
    for (int i = 0; i < LANE_SLOTS; ++i) {
      highest = fmaxf(highest, score[i]);
      most = fmaxf(most, step_of(parameters[i]));
    }
    for (int i = 1; i < QUAD; i *= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, i));
      most = fmaxf(most, __shfl_xor_sync(ALL, most, i));
    }
    const float base = highest > minus_infinity() ? highest : 0.0f, kept = expf(peak - base);
    const int exponent = scale_exponent(most);
    const float up = power_of_two(exponent), down = power_of_two(CODE_EXPONENT - exponent);
    peak = highest;
    total *= kept;
    low *= kept;
    float scaled[LANE_SLOTS];
#pragma unroll
    for (int i = 0; i < LANE_SLOTS; ++i) {
      const float weight = expf(score[i] - base);
      total += weight;
      low += weight * low_of(parameters[i]);
      scaled[i] = weight * (step_of(parameters[i]) * up);
    }
    uint4 rows[LANE_SLOTS / 4];
#pragma unroll
    for (int i = 0; i < LANE_SLOTS / 4 && WORDS; ++i) {
      const float* const x = scaled + 4 * i;
      rows[i] = two_rows(x[0], x[1], x[2], x[3]);
    }
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      float sum[4] = {};
#pragma unroll
      for (int i = 0; i < LANE_SLOTS; i += 4) {
        unsigned code[4];  // of the column that is this lane's in the product
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          code[j] = codes[word][i + j] >> lane() / QUAD * CODE_BITS & ((1 << CODE_BITS) - 1);
        }
        multiply(sum, rows[i / 4], code[0] | code[1] << 16, code[2] | code[3] << 16);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        columns[word][i] = columns[word][i] * kept + (sum[i] + sum[i + 2]) * down;
      }
    }
  }

  // The sums of all lanes of the head.
  __device__ void finish() {
    for (int i = 1; i < QUAD; i *= 2) {
      total += __shfl_xor_sync(ALL, total, i);
      low += __shfl_xor_sync(ALL, low, i);
    }
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
    const int head = begin + lane() / QUAD;
    for (int block = start + warp() * tail_block; block < min(start + share, capacity);
         block += warps() * tail_block) {
      Rest<WORDS> sums;
      for (int first = block; first < block + tail_block; first += TILE) {
        if (first >= end || first + TILE <= sinks) continue;  // not on the host alone
        float score[LANE_SLOTS];
        unsigned parameters[LANE_SLOTS], codes[WORDS + 1][LANE_SLOTS] = {};
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
          if (word < words) {
            load_own(index + (unsigned long long)word * capacity, capacity, first, codes[word]);
          }
        }
        score_tile(index, capacity, words, *shared, first, score, parameters);
        const int own = lane() % QUAD * LANE_SLOTS;
        const unsigned marks = requested[(first - start) / WARP] >> own;
#pragma unroll
        for (int i = 0; i < LANE_SLOTS; ++i) {
          const int slot = first + own + i;
          if (slot < sinks || slot >= end || (marks >> i & 1)) score[i] = minus_infinity();
        }
        sums.add(score, parameters, codes);
      }
      sums.finish();
      if (head < group) {
        const unsigned long long place = (unsigned long long)head * tail_blocks + block / tail_block;
        const bool any = sums.total > 0;
        if (lane() % QUAD == 0) rest[place] = any ? sums.peak + logf(sums.total) : minus_infinity();
#pragma unroll
        for (int i = 0; i < 2 * WORDS; ++i) {
          const int column = i / 2 * CODES + lane() % QUAD * 2 + i % 2;
          const float mean = (sums.columns[i / 2][i % 2] + sums.low) / sums.total;
          entry[place * WORDS * CODES + column] = any ? mean : 0.0f;
        }
      }
    }
    __syncthreads();  // the next heads' query takes this one's place
  }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 3)
    index_rest(const float* query, const unsigned* index, const int* positions, const int* slots,
               const int* count, float* rest, float* entry, int heads, int group, int columns,
               int words, int capacity, int share, int size, int tail_block, int sinks, int window,
               int leading) {
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
