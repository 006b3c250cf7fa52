// Attention of one token to fetched rows in bfloat16, in proportion to the number of valid rows.
//
//   query     [b][k][g][d]     float32, scaled
//   rows      [b][k][n][2 d]   bfloat16, key and value; the first count[b][k] of each are valid
//   peak      [b][k][m][g]     softmax in progress over each SHARE rows, m = ceil(n / SHARE): the
//   total     [b][k][m][g]     largest score, the sum of exp(score - peak), and the sum of the
//   weighted  [b][k][m][g][d]  values by these weights; MASKED, 0 and 0 where no row is valid
//
// A block takes a share of one (b, k), for ATTENDED heads at a time. The lanes of a warp are dealt
// `width` to a row, each with VECTOR columns of the key and the same of the value. Each such group
// of lanes has a softmax of its own; they are joined at the end.

constexpr int SHARE = 128;   // rows of a block, as in calls.py
constexpr int ATTENDED = 4;  // query heads
constexpr int VECTOR = 8;    // columns of a lane, 16 bytes
constexpr int AT_ONCE = 4;   // rows of a lane that are loaded before they are used
constexpr int MAX_WARPS = 4;
constexpr int MAX_HEAD = WARP * VECTOR;
constexpr float MASKED = -1e30f;

__device__ inline void unpack(const uint4& vector, float (&x)[VECTOR]) {
  const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// A softmax in progress over some rows, for ATTENDED heads and the lane's columns.
struct Softmax {
  float peak[ATTENDED], total[ATTENDED], weighted[ATTENDED][VECTOR];

  __device__ Softmax() : total(), weighted() {
#pragma unroll
    for (int head = 0; head < ATTENDED; ++head) peak[head] = MASKED;
  }

  // Joins that of the lane at this distance.
  __device__ void join(int distance) {
#pragma unroll
    for (int head = 0; head < ATTENDED; ++head) {
      const float other = __shfl_xor_sync(ALL, peak[head], distance);
      const float highest = fmaxf(peak[head], other);
      const float kept = expf(peak[head] - highest), of_other = expf(other - highest);
      peak[head] = highest;
      total[head] = total[head] * kept + __shfl_xor_sync(ALL, total[head], distance) * of_other;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float others = __shfl_xor_sync(ALL, weighted[head][i], distance);
        weighted[head][i] = weighted[head][i] * kept + others * of_other;
      }
    }
  }
};

KERNEL(attend_rows, MAX_WARPS * WARP, 4)
(const float* query, const uint4* rows, const int* count, float* peak, float* total,
 float* weighted, int group, int fetched, int head_size, int shares, int cap_bits) {
  __shared__ float peaks[MAX_WARPS][ATTENDED], totals[MAX_WARPS][ATTENDED];
  __shared__ float sums[MAX_WARPS][ATTENDED][MAX_HEAD];
  const unsigned long long pair = blockIdx.x / shares;
  const int start = blockIdx.x % shares * SHARE, end = min(start + SHARE, count[pair]);
  const int vectors = head_size / VECTOR;  // of a key
  const float cap = __int_as_float(cap_bits);
  int width = 1;
  while (width < vectors) width *= 2;
  const int own = lane() % width, side_by_side = WARP / width;
  query += pair * group * head_size;
  rows += pair * fetched * 2 * vectors + min(own, vectors - 1);
  peak += (unsigned long long)blockIdx.x * group;
  total += (unsigned long long)blockIdx.x * group;
  weighted += (unsigned long long)blockIdx.x * group * head_size;

  if (start >= end) {
    for (int i = threadIdx.x; i < group * head_size; i += blockDim.x) {
      weighted[i] = 0;
      if (i < group) peak[i] = MASKED;
      if (i < group) total[i] = 0;
    }
    return;
  }

  for (int begin = 0; begin < group; begin += ATTENDED) {
    float q[ATTENDED][VECTOR];
#pragma unroll
    for (int head = 0; head < ATTENDED; ++head) {
      const bool there = begin + head < group && own < vectors;
      const int at = there ? (begin + head) * head_size + own * VECTOR : 0;
#pragma unroll
      for (int i = 0; i < VECTOR; i += 4) {
        float four[4];
        load_four(query, at + i, there ? at + i + 4 : 0, 0.0f, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) q[head][i + j] = four[j];
      }
    }
    Softmax softmax;
    // All lanes of a warp go round equally often.
    for (int first = start + warp() * side_by_side * AT_ONCE; first < end;
         first += warps() * side_by_side * AT_ONCE) {
      uint4 keys[AT_ONCE], values[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int row = min(first + i * side_by_side + lane() / width, end - 1);
        const uint4* const at = rows + (unsigned long long)row * 2 * vectors;
        keys[i] = at[0];
        values[i] = at[vectors];
      }
      float score[ATTENDED][AT_ONCE] = {};
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        float key[VECTOR];
        unpack(keys[i], key);
#pragma unroll
        for (int head = 0; head < ATTENDED; ++head) {
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) score[head][i] += q[head][j] * key[j];
        }
      }
      for (int distance = 1; distance < width; distance *= 2) {
#pragma unroll
        for (int i = 0; i < ATTENDED * AT_ONCE; ++i) {
          float& sum = score[i / AT_ONCE][i % AT_ONCE];
          sum += __shfl_xor_sync(ALL, sum, distance);
        }
      }
#pragma unroll
      for (int i = 0; i < ATTENDED * AT_ONCE; ++i) {
        float& sum = score[i / AT_ONCE][i % AT_ONCE];
        if (cap > 0) sum = cap * tanhf(sum / cap);
        if (first + i % AT_ONCE * side_by_side + lane() / width >= end) sum = MASKED;
      }
#pragma unroll
      for (int head = 0; head < ATTENDED; ++head) {
        float highest = softmax.peak[head];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) highest = fmaxf(highest, score[head][i]);
        const float kept = expf(softmax.peak[head] - highest);
        softmax.peak[head] = highest;
        softmax.total[head] *= kept;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) softmax.weighted[head][i] *= kept;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          // A lane that has had no valid row has a peak of MASKED.
          score[head][i] = score[head][i] == MASKED ? 0.0f : expf(score[head][i] - highest);
          softmax.total[head] += score[head][i];
        }
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        float value[VECTOR];
        unpack(values[i], value);
#pragma unroll
        for (int head = 0; head < ATTENDED; ++head) {
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) softmax.weighted[head][j] += score[head][i] * value[j];
        }
      }
    }
    for (int distance = width; distance < WARP; distance *= 2) softmax.join(distance);
    if (lane() < vectors) {  // the first lanes have all columns
#pragma unroll
      for (int head = 0; head < ATTENDED; ++head) {
        peaks[warp()][head] = softmax.peak[head];
        totals[warp()][head] = softmax.total[head];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          sums[warp()][head][own * VECTOR + i] = softmax.weighted[head][i];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ATTENDED * head_size; i += blockDim.x) {
      const int head = i / head_size, column = i % head_size;
      if (begin + head >= group) break;
      float highest = MASKED, all = 0, sum = 0;
      for (int j = 0; j < warps(); ++j) highest = fmaxf(highest, peaks[j][head]);
      for (int j = 0; j < warps(); ++j) {
        const float kept = expf(peaks[j][head] - highest);
        all += totals[j][head] * kept;
        sum += sums[j][head][column] * kept;
      }
      weighted[(begin + head) * head_size + column] = sum;
      if (column == 0) {
        peak[begin + head] = highest;
        total[begin + head] = all;
      }
    }
    __syncthreads();  // the next heads' sums take these ones' place
  }
}
