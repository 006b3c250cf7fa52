// Selection of the rows to fetch, from speculated scores: what `selection.select` computes for
// count="head", in one launch of a block for each (b, k).
//
//   scores     [b][k][g][t]  speculated logits
//   positions  [b]           of the current tokens; eligible are sinks .. position - window
//   allowed    [b]           rows that the budget allows
//   slots      [b][k][n]     of the rows chosen, ascending, and zeros behind them
//   count      [b][k]        how many
//   keys       [b][k][t]     scratch
//
// Three passes over the eligible scores, at most six over the keys. Per query head, the peak and the
// logarithm of the softmax's denominator. Then for each token the margin to the peak, which decides
// whether it passes, and its rank, stored as an integer of the same order: 0 where it does not pass.
// Then the largest keys.

constexpr int MAX_GROUP = 128;

// Integer of the same order; 0 is below that of every finite number.
__device__ inline unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0.0 and 0.0 are equal
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Largest of a head's scores, and log(sum(exp(score))); 0 for both where all are -inf.
__device__ inline void measure(const float* scores, int first, int end, bool with_total,
                               float* peak_out, float* total_out) {
  float peak = minus_infinity(), total = 0;
  for (int begin = first + threadIdx.x; begin < end; begin += BATCH * blockDim.x) {
    float score[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int at = begin + i * blockDim.x;
      score[i] = at < end ? scores[at] : minus_infinity();
    }
    float highest = peak;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) highest = fmaxf(highest, score[i]);
    if (with_total && highest > minus_infinity()) {
      total *= expf(peak - highest);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) total += expf(score[i] - highest);
    }
    peak = highest;
  }
  const float highest = reduce(peak, larger);
  const bool any = highest > minus_infinity();
  if (with_total) {
    total = reduce(any ? total * expf(peak - highest) : 0.0f, added);
  }
  if (threadIdx.x == 0) {
    *peak_out = any ? highest : 0.0f;
    *total_out = any && with_total ? highest + logf(total) : 0.0f;
  }
}

// Sum over the group of the softmax of a token's scores, over the largest of them, `best`.
__device__ inline float group_weight(const float* __restrict__ score, const float* total, float best,
                                     int group, int capacity) {
  float weight = 0;
  for (int i = 0; i < group; ++i) {
    weight += expf(score[(unsigned long long)i * capacity] - total[i] - best);
  }
  return weight;
}

extern "C" __global__ void __launch_bounds__(1024)
    select_rows(const float* __restrict__ scores, const int* positions,
                const int* allowed, int* slots, int* count, unsigned* keys, int heads, int group,
                int capacity, int size, int sinks, int window, int alpha_bits) {
  __shared__ float peak[MAX_GROUP], total[MAX_GROUP];
  const int position = positions[blockIdx.x / heads];
  const int length = max(min(position - window + 1, capacity) - sinks, 0);
  scores += (unsigned long long)blockIdx.x * group * capacity;
  keys += (unsigned long long)blockIdx.x * capacity;
  slots += (unsigned long long)blockIdx.x * size;

  for (int i = 0; i < group; ++i) {
    measure(scores + (unsigned long long)i * capacity, sinks, sinks + length, group > 1, peak + i,
            total + i);
  }
  __syncthreads();

  int passing = 0;
  unsigned least = ALL, most = 0;
  for (int begin = threadIdx.x; begin < length; begin += BATCH * blockDim.x) {
    float margin[BATCH], best[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) margin[j] = best[j] = minus_infinity();
    for (int i = 0; i < group; ++i) {
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int at = begin + j * blockDim.x;
        if (at < length) {
          const float value = scores[(unsigned long long)i * capacity + sinks + at];
          margin[j] = fmaxf(margin[j], value - peak[i]);
          best[j] = fmaxf(best[j], value - total[i]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int at = begin + j * blockDim.x;
      if (at >= length) break;
      unsigned key = 0;
      if (margin[j] > -__int_as_float(alpha_bits)) {
        const float weight = group > 1 ? group_weight(scores + sinks + at, total, best[j], group,
                                                      capacity)
                                       : 1.0f;
        key = ordered(best[j] + logf(weight));
        ++passing;
        least = min(least, key);
        most = max(most, key);
      }
      keys[at] = key;
    }
  }
  passing = sum(passing);
  least = reduce(least, [](unsigned a, unsigned b) { return min(a, b); });
  most = reduce(most, [](unsigned a, unsigned b) { return max(a, b); });

  const int wanted = max(min(min(passing, allowed[blockIdx.x / heads]), size), 0);
  top(keys, length, passing, least, most, wanted, sinks, slots);
  for (int i = wanted + threadIdx.x; i < size; i += blockDim.x) slots[i] = 0;
  if (threadIdx.x == 0) count[blockIdx.x] = wanted;
}
