// Products in half precision on the tensor cores (mma.m16n8k16, sm_80 and newer), and what older GPUs
// and the emulation compute instead.

constexpr int QUAD = 4;       // lanes with a row of a matrix
constexpr int EXPONENT = 13;  // of the largest number in half precision: finite, with a rest
constexpr int BIAS = 127;     // of exponents

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + BIAS) << 23); }

// Exponent of the scale that brings numbers up to `most` into the range of half precision.
__device__ inline int scale_exponent(float most) {
  const int exponent = (int)(__float_as_uint(most) >> 23) - BIAS;
  return min(max(EXPONENT - exponent, -BIAS / 2), BIAS / 2);
}

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

// The transpose of a matrix [8][8] of halves, of which lane l has columns l % 4 * 2 and the next of
// row l / 4.
__device__ inline unsigned transpose(unsigned x) {
  unsigned transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
  return transposed;
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

__device__ inline unsigned transpose(unsigned x) {
  const int row = lane() % QUAD * 2 * QUAD + lane() / 8;
  const unsigned first = __shfl_sync(ALL, x, row), next = __shfl_sync(ALL, x, row + QUAD);
  const int shift = lane() / QUAD % 2 * 16;
  return (first >> shift & 0xffff) | (next >> shift & 0xffff) << 16;
}
#endif
