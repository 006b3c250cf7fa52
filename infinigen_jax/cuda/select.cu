// Selection of the rows to fetch, from speculated scores: what `selection.select` computes for
// count="head", in one launch of a block for each (b, k).
//
//   scores     [b][k][g][t]  speculated logits
//   positions  [b]           of the current tokens; eligible are sinks .. position - window
//   allowed    [b]           rows that the budget allows
//   slots      [b][k][n]     of the rows chosen, ascending, and zeros behind them
//   count      [b][k]        how many
//   scratch    [b][k][2][t]  keys of the tokens that pass, in order, and their slots
//
// Two passes over the eligible scores, at most six over the keys. Per query head, the peak and the
// logarithm of the softmax's denominator. Then for each token the margin to the peak, which decides
// whether it passes, and its rank; those of tokens that pass are kept, as integers of the same order.
// Then the largest keys.
//
// A thread reads four slots of GROUP heads at a time. It keeps the scores of the second pass for the
// rank; those of a larger group are read again where a token passes.

constexpr int MAX_GROUP = 128;
constexpr int GROUP = 4;

// Integer of the same order; 0 is below that of every finite number.
__device__ inline unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0.0 and 0.0 are equal
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Scores of four slots from `at` on, -inf outside of first .. end - 1.
__device__ inline void load_scores(const float* __restrict__ scores, int at, int first, int end,
                                   float (&score)[4]) {
  load_four(scores, at, end, minus_infinity(), score);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + i < first) score[i] = minus_infinity();
  }
}

// Of up to GROUP heads: the largest of the scores, and log(sum(exp(score))); 0 for both where all
// are -inf.
__device__ inline void measure(const float* scores, int heads, int capacity, int first, int end,
                               bool with_total, float* peak_out, float* total_out) {
  float peak[GROUP], total[GROUP] = {};
#pragma unroll
  for (int head = 0; head < GROUP; ++head) peak[head] = minus_infinity();
  for (int at = first / 4 * 4 + 4 * threadIdx.x; at < end; at += 4 * blockDim.x) {
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
      if (head >= heads) break;
      float score[4];
      load_scores(scores + (unsigned long long)head * capacity, at, first, end, score);
      float highest = peak[head];
#pragma unroll
      for (int i = 0; i < 4; ++i) highest = fmaxf(highest, score[i]);
      if (with_total && highest > minus_infinity()) {
        total[head] *= expf(peak[head] - highest);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[head] += expf(score[i] - highest);
      }
      peak[head] = highest;
    }
  }
  float highest[GROUP];
#pragma unroll
  for (int head = 0; head < GROUP; ++head) highest[head] = peak[head];
  reduce(highest, minus_infinity(), larger);
  if (with_total) {
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
      total[head] = peak[head] > minus_infinity() ? total[head] * expf(peak[head] - highest[head]) : 0;
    }
    reduce(total, 0.0f, added);
  }
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int head = 0; head < GROUP; ++head) {
    if (head >= heads) break;
    const bool any = highest[head] > minus_infinity();
    peak_out[head] = any ? highest[head] : 0.0f;
    total_out[head] = any && with_total ? highest[head] + logf(total[head]) : 0.0f;
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

// Sum of the counts of the threads before this one; that of all is added to `all`. Barriers are as in
// a call of `reduce`.
__device__ inline int count_before(int count, int* all) {
  __shared__ int totals[WARP];
  int reached = count;  // by this lane and those before it
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int other = __shfl_up_sync(ALL, reached, distance);
    if (lane() >= distance) reached += other;
  }
  if (lane() == WARP - 1) totals[warp()] = reached;
  __syncthreads();
  int before = reached - count;
  for (int i = 0; i < warps(); ++i) {
    if (i < warp()) before += totals[i];
    *all += totals[i];
  }
  __syncthreads();
  return before;
}

KERNEL(select_rows, 1024, 1)
(const float* __restrict__ scores, const int* positions, const int* allowed, int* slots,
 int* count, unsigned* scratch, int heads, int group, int capacity, int size, int sinks, int window,
 int alpha_bits) {
  __shared__ float peak[MAX_GROUP], total[MAX_GROUP];
  const int position = positions[blockIdx.x / heads];
  const int end = min(position - window + 1, capacity), first = sinks / 4 * 4;
  scores += (unsigned long long)blockIdx.x * group * capacity;
  unsigned* const keys = scratch + 2ull * blockIdx.x * capacity;
  unsigned* const places = keys + capacity;
  slots += (unsigned long long)blockIdx.x * size;

  for (int i = 0; i < group; i += GROUP) {
    measure(scores + (unsigned long long)i * capacity, group - i, capacity, sinks, end, group > 1,
            peak + i, total + i);
  }
  __syncthreads();

  int passing = 0;  // so far, of all threads
  unsigned least = ALL, most = 0;
  for (int chunk = first; chunk < end; chunk += 4 * blockDim.x) {
    const int at = chunk + 4 * threadIdx.x;
    unsigned key[4] = {};
    int kept = 0;
    if (at < end) {
      float score[GROUP][4], margin[4], best[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) margin[j] = best[j] = minus_infinity();
      for (int begin = 0; begin < group; begin += GROUP) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
          const int head = begin + i;
          if (head >= group) break;
          load_scores(scores + (unsigned long long)head * capacity, at, sinks, end, score[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            margin[j] = fmaxf(margin[j], score[i][j] - peak[head]);
            best[j] = fmaxf(best[j], score[i][j] - total[head]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(margin[j] > -__int_as_float(alpha_bits))) continue;
        float weight = 0;
        if (group <= GROUP) {
#pragma unroll
          for (int i = 0; i < GROUP; ++i) {
            if (i < group) weight += expf(score[i][j] - total[i] - best[j]);
          }
        } else {
          weight = group_weight(scores + at + j, total, best[j], group, capacity);
        }
        // A head alone has no denominator: its rank is its score.
        key[j] = ordered(group > 1 ? best[j] + logf(weight) : best[j]);
        ++kept;
        least = min(least, key[j]);
        most = max(most, key[j]);
      }
    }
    const int before = passing;
    int number = before + count_before(kept, &passing);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!key[j]) continue;
      keys[number] = key[j];
      places[number++] = at + j;
    }
  }
  span(&least, &most);  // behind it, all threads see all keys

  const int wanted = max(min(min(passing, allowed[blockIdx.x / heads]), size), 0);
  top(keys, passing, passing, least, most, wanted, slots, [&](int number) { return places[number]; });
  for (int i = wanted + threadIdx.x; i < size; i += blockDim.x) slots[i] = 0;
  if (threadIdx.x == 0) count[blockIdx.x] = wanted;
}
