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
// A block takes every `tiles`th tile of slots of one (b, k), for HEADS query heads at a time; further
// heads go over the tiles again, which are in the cache by then. A warp multiplies SUBTILE slots with
// these heads on the tensor cores (mma.m16n8k16, sm_80 and newer).
//
// Codes need no conversion. A code in the low bits of a 16-bit half is a subnormal number of half
// precision, exactly code * 2^-24, and one that is 4 bits higher is 16 times as much; the query is
// scaled for both. In half precision the query would lose digits: each head has two rows of the
// product, for the rounded number and for the rest.

constexpr int CODE_BITS = 4;
constexpr int CODES = 32 / CODE_BITS;  // in a word
constexpr unsigned LOW_CODES = 0x000f000f;
constexpr int HEADS = 8;
constexpr int SUBTILE = 32;    // slots of a warp at a time
constexpr int QUAD = 4;        // lanes with the scores of one head
constexpr int LANE_SLOTS = 8;  // consecutive slots whose scores a lane has
constexpr int MAX_COLUMNS = 256;
constexpr int STEP_WORDS = 4;  // words of codes of two products
constexpr int PRODUCTS = 2 * MAX_COLUMNS / (STEP_WORDS * CODES);
constexpr int MAX_THREADS = 256;
constexpr int MAX_TAIL_BLOCK = 128;
constexpr int HIGHEST_EXPONENT = 13;   // of a scaled query, to keep it finite in half precision
constexpr int CODE_EXPONENT = 24;      // a code is code * 2^-24
constexpr int BIAS = 127, HALF_BIAS = 15;  // of exponents

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + BIAS) << 23); }

struct Query {
  uint4 rows[PRODUCTS][WARP];  // as mma takes them; head i in rows i and i + 8 of 16
  float scale[HEADS];          // of sums of products
  float sum[HEADS];
  float bias[HEADS];  // see `rounding_bias`
};

// x in half precision, rounded, and what is left of x. Less than 2^-14 becomes 0.
__device__ inline unsigned to_half(float* x) {
  const unsigned rounded = (__float_as_uint(*x) + 0x1000) & 0xffffe000;
  const int exponent = (int)(rounded >> 23 & 0xff) - BIAS + HALF_BIAS;
  if (exponent < 1) return 0;
  *x -= __uint_as_float(rounded);
  return rounded >> 31 << 15 | exponent << 10 | (rounded >> 13 & 0x3ff);
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

__device__ inline void multiply(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
  for (int i = 0; i < QUAD; ++i) {
    const int row = lane() / QUAD * QUAD + i, column = lane() % QUAD * 2 * QUAD + i;
    const unsigned x = __shfl_sync(ALL, a.x, row), y = __shfl_sync(ALL, a.y, row);
    const unsigned z = __shfl_sync(ALL, a.z, row), w = __shfl_sync(ALL, a.w, row);
    for (int next = 0; next < 2; ++next) {
      const unsigned c0 = __shfl_sync(ALL, b0, column + QUAD * next);
      const unsigned c1 = __shfl_sync(ALL, b1, column + QUAD * next);
      d[next] += product(x, c0) + product(z, c1);
      d[2 + next] += product(y, c0) + product(w, c1);
    }
  }
}
#endif

// HEADS heads of a query, zeros behind the last one. `shared` is there for all behind the barrier.
__device__ inline void load_query(const float* query, int heads, int columns, Query* shared) {
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
    const int exponent = (int)(__float_as_uint(most) >> 23) - BIAS;
    const int up = min(max(HIGHEST_EXPONENT - exponent, -BIAS / 2), BIAS / 2);
    if (lane() == 0) {
      scales[head] = power_of_two(up);
      shared->scale[head] = power_of_two(CODE_EXPONENT - up);
      shared->sum[head] = total;
      shared->bias[head] = squares / 24;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < PRODUCTS * WARP; i += blockDim.x) {
    const int head = i % WARP / QUAD;
    // The first product of two has codes 0, 4, 1, 5 of each word, the second 2, 6, 3, 7.
    const int word = i / WARP / 2 * STEP_WORDS + i % QUAD, code = i / WARP % 2 * 2;
    unsigned part[4];
    for (int j = 0; j < 4; ++j) {
      const int column = word * CODES + code + j / 2 + j % 2 * CODES / 2;
      const bool there = head < heads && column < columns;
      float x = there ? query[head * columns + column] * scales[head] : 0.0f;
      if (j / 2) x *= 1.0f / (1 << CODE_BITS);
      const unsigned rounded = to_half(&x);
      part[j] = rounded | to_half(&x) << 16;
    }
    shared->rows[i / WARP][i % WARP] =
        make_uint4((part[0] & 0xffff) | part[1] << 16, part[0] >> 16 | (part[1] & 0xffff0000),
                   (part[2] & 0xffff) | part[3] << 16, part[2] >> 16 | (part[3] & 0xffff0000));
  }
  __syncthreads();
}

// The scores of slots `first` .. first + SUBTILE - 1: a lane has those of head lane() / QUAD, of
// LANE_SLOTS slots from first + lane() % QUAD * LANE_SLOTS; and the parameters of these slots.
__device__ inline void score_slots(const unsigned* __restrict__ index, int capacity, int words,
                                   const Query& query, int first, float (&score)[LANE_SLOTS],
                                   unsigned (&parameters)[LANE_SLOTS]) {
  float sum[4][4] = {};  // [i]: of the slots first + i, first + i + 4, ...
#pragma unroll 2
  for (int step = 0; step < words; step += STEP_WORDS) {
    const int word = step + lane() % QUAD;
    unsigned codes[4] = {};
    if (word < words) {
      load_four(index + (unsigned long long)word * capacity, first + lane() / QUAD * 4, capacity, 0u,
                codes);
    }
    const uint4 rows = query.rows[2 * step / STEP_WORDS][lane()];
    const uint4 next_rows = query.rows[2 * step / STEP_WORDS + 1][lane()];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply(sum[i], rows, codes[i] & LOW_CODES, codes[i] & LOW_CODES << CODE_BITS);
      const unsigned rest = codes[i] >> 2 * CODE_BITS;
      multiply(sum[i], next_rows, rest & LOW_CODES, rest & LOW_CODES << CODE_BITS);
    }
  }
  const unsigned* row = index + (unsigned long long)words * capacity;
  const int own = first + lane() % QUAD * LANE_SLOTS, head = lane() / QUAD;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned both[4];
    load_four(row, own + 4 * half, capacity, 0u, both);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float step = __uint_as_float(both[i] & 0xffff0000u);
      const float low = __uint_as_float(both[i] << 16);
      const float products = (sum[i][half] + sum[i][half + 2]) * query.scale[head];
      score[4 * half + i] = products * step + low * query.sum[head] - step * step * query.bias[head];
      parameters[4 * half + i] = both[i];
    }
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

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    index_scores(const float* query, const unsigned* index, float* scores, int group, int columns,
                 int words, int capacity, int tiles) {
  __shared__ Query shared;
  const unsigned long long pair = blockIdx.x / tiles;
  query += pair * group * columns;
  index += pair * (words + 1) * capacity;
  scores += pair * group * capacity;
  for (int begin = 0; begin < group; begin += HEADS) {
    load_query(query + begin * columns, group - begin, columns, &shared);
    const int head = begin + lane() / QUAD;
    float* const out = scores + (unsigned long long)head * capacity;
    for (int first = (blockIdx.x % tiles * warps() + warp()) * SUBTILE; first < capacity;
         first += tiles * warps() * SUBTILE) {
      float score[LANE_SLOTS];
      unsigned parameters[LANE_SLOTS];
      score_slots(index, capacity, words, shared, first, score, parameters);
      const int own = first + lane() % QUAD * LANE_SLOTS;
      if (head >= group) continue;
#pragma unroll
      for (int i = 0; i < LANE_SLOTS; i += 4) {
        store_four(score + i, out, own + i, capacity);
      }
    }
    __syncthreads();  // the next heads' query takes this one's place
  }
}

// The rest of one block of the tail so far, in each of the lanes that share the block: their peak,
// and their own parts of the sums.
template <int LEADING>
struct Rest {
  static constexpr int SUMS = LEADING ? LEADING + 1 : 0;
  float peak, total;
  float columns[SUMS + 1];  // [LEADING]: of the entries' lowest values, the same in all columns

  __device__ Rest() : peak(minus_infinity()), total(0), columns() {}

  // Adds slots: their scores, and their words of the index.
  __device__ void add(const float (&score)[LANE_SLOTS], const unsigned (&parameters)[LANE_SLOTS],
                      const unsigned (&codes)[LEADING / CODES + 1][LANE_SLOTS], int sharing) {
    float highest = peak;
#pragma unroll
    for (int i = 0; i < LANE_SLOTS; ++i) highest = fmaxf(highest, score[i]);
    for (int i = 1; i < sharing; i *= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, i));
    }
    const float base = highest > minus_infinity() ? highest : 0.0f, kept = expf(peak - base);
    peak = highest;
    total *= kept;
#pragma unroll
    for (int c = 0; c < SUMS; ++c) columns[c] *= kept;
#pragma unroll
    for (int i = 0; i < LANE_SLOTS; ++i) {
      const float weight = expf(score[i] - base);
      total += weight;
      if (SUMS == 0) continue;
      const float scaled = weight * __uint_as_float(parameters[i] & 0xffff0000u);
      columns[LEADING] += weight * __uint_as_float(parameters[i] << 16);
#pragma unroll
      for (int c = 0; c < LEADING; ++c) {
        const unsigned code = codes[c / CODES][i] >> c % CODES * CODE_BITS & 15;
        columns[c] += scaled * (__uint_as_float(code | 0x4b000000u) - 8388608.0f);  // 2^23
      }
    }
  }

  // The sums of all lanes that share the block.
  __device__ void finish(int sharing) {
    for (int i = 1; i < sharing; i *= 2) {
      total += __shfl_xor_sync(ALL, total, i);
#pragma unroll
      for (int c = 0; c < SUMS; ++c) columns[c] += __shfl_xor_sync(ALL, columns[c], i);
    }
  }
};

// Marks which slots of a tile are requested.
__device__ inline void mark(const int* slots, int count, int start, int tile, unsigned* requested) {
  for (int i = threadIdx.x; i < tile / WARP; i += blockDim.x) requested[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int at = slots[i] - start;
    if (at >= 0 && at < tile) atomicOr(requested + at / WARP, 1u << at % WARP);
  }
  __syncthreads();
}

template <int LEADING>
__device__ void rest_of_tail(const float* query, const unsigned* index, int position,
                                          const int* slots, int count, float* rest, float* entry,
                                          int group, int columns, int words, int capacity, int tiles,
                                          int tail_block, int sinks, int window, Query* shared,
                                          unsigned* requested) {
  const int end = min(position - window + 1, capacity);
  const int own_slots = max(tail_block, SUBTILE);  // of a warp
  const int tile = warps() * own_slots, sharing = min(tail_block, SUBTILE) / LANE_SLOTS;
  const int tail_blocks = capacity / tail_block;

  for (int begin = 0; begin < group; begin += HEADS) {
    load_query(query + begin * columns, group - begin, columns, shared);
    const int head = begin + lane() / QUAD;
    for (int start = blockIdx.x % tiles * tile; start < capacity; start += tiles * tile) {
      mark(slots, count, start, tile, requested);
      const int own_start = start + warp() * own_slots;
      Rest<LEADING> sums;
      for (int first = own_start; first < own_start + own_slots; first += SUBTILE) {
        if (first >= end || first + SUBTILE <= sinks) continue;  // not on the host alone
        float score[LANE_SLOTS];
        unsigned parameters[LANE_SLOTS], codes[LEADING / CODES + 1][LANE_SLOTS] = {};
        score_slots(index, capacity, words, *shared, first, score, parameters);
        const int own = first + lane() % QUAD * LANE_SLOTS;
        const unsigned marks = requested[(first - start) / WARP] >> lane() % QUAD * LANE_SLOTS;
#pragma unroll
        for (int i = 0; i < LANE_SLOTS; ++i) {
          const bool counts = own + i >= sinks && own + i < end && !(marks >> i & 1);
          if (!counts) score[i] = minus_infinity();
        }
#pragma unroll
        for (int i = 0; i < LEADING / 4; ++i) {  // halves of a lane's slots, word by word
          const int word = i / 2, half = i % 2 * 4;
          unsigned four[4] = {};
          if (word < words) {
            load_four(index + (unsigned long long)word * capacity, own + half, capacity, 0u, four);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) codes[word][half + j] = four[j];
        }
        sums.add(score, parameters, codes, sharing);
      }
      sums.finish(sharing);
      const int at = own_start + lane() % QUAD * LANE_SLOTS;
      if (head < group && at < capacity && lane() % sharing == 0) {
        const unsigned long long place = (unsigned long long)head * tail_blocks + at / tail_block;
        const bool any = sums.total > 0;
        rest[place] = any ? sums.peak + logf(sums.total) : minus_infinity();
#pragma unroll
        for (int c = 0; c < LEADING; ++c) {
          const float mean = (sums.columns[c] + sums.columns[LEADING]) / sums.total;
          entry[place * LEADING + c] = any ? mean : 0.0f;
        }
      }
      __syncthreads();  // the next marks and query take the place of these
    }
  }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    index_rest(const float* query, const unsigned* index, const int* positions, const int* slots,
               const int* count, float* rest, float* entry, int heads, int group, int columns,
               int words, int capacity, int tiles, int size, int tail_block, int sinks, int window,
               int leading) {
  __shared__ Query shared;
  __shared__ unsigned requested[MAX_THREADS / WARP * MAX_TAIL_BLOCK / WARP];
  const unsigned long long pair = blockIdx.x / tiles;
  query += pair * group * columns;
  index += pair * (words + 1) * capacity;
  slots += pair * size;
  rest += pair * group * (capacity / tail_block);
  entry += pair * group * (capacity / tail_block) * leading;
#define REST(leading)                                                                             \
  rest_of_tail<leading>(query, index, positions[pair / heads], slots, count[pair], rest, entry,   \
                        group, columns, words, capacity, tiles, tail_block, sinks, window, &shared, \
                        requested)
  if (leading == 0) REST(0);
  if (leading == 8) REST(8);
  if (leading == 16) REST(16);
#undef REST
}
