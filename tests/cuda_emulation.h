// CUDA on a CPU, as far as the package's kernels need it: their source, behind this header, compiles
// as C++, and `emulate` runs a kernel, its blocks one after the other.
//
// The threads of a block are fibers of one thread. Each runs until it meets a barrier (or an
// operation among a warp's lanes, which contains two), in an order that the seed shuffles anew at
// each barrier: a kernel whose threads race gives different results for different seeds. A barrier
// that some threads do not reach is an error. With -DEMULATE_THREADS they are real threads, for
// -fsanitize=thread.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>
#ifdef EMULATE_THREADS
#include <barrier>
#include <thread>
#else
#include <csetjmp>
#include <ucontext.h>
#endif

#define __device__
#define __shared__ static

struct uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace emulation {

constexpr int WARP_SIZE = 32;
enum State { RUNNING, AT_BARRIER, AT_WARP_BARRIER, DONE };

struct Lane {
  dim3 index;
  uint64_t exchanged = 0;  // what the lane gives to the others of its warp
  State state = RUNNING;
  bool begun = false;
#ifndef EMULATE_THREADS
  ucontext_t context;  // to begin with
  jmp_buf resumed;     // from then on: `swapcontext` takes two calls of the system
  std::unique_ptr<char[]> stack;
#endif
};

inline thread_local Lane* lane;  // the one that runs
inline std::vector<Lane> lanes;
inline dim3 block, grid_size, block_size;

[[noreturn]] inline void fail(const char* message) {
  std::fprintf(stderr, "emulation: %s\n", message);
  std::abort();
}

#ifdef EMULATE_THREADS
inline std::vector<std::unique_ptr<std::barrier<>>> barriers;  // the block's, then one a warp

inline void meet(State where) {
  const int number = where == AT_BARRIER ? 0 : 1 + lane->index.x / WARP_SIZE;
  barriers[number]->arrive_and_wait();
}

template <typename Body>
void run_block(Body body, uint64_t) {
  barriers.clear();
  barriers.push_back(std::make_unique<std::barrier<>>(lanes.size()));
  for (size_t i = 0; i < lanes.size(); i += WARP_SIZE) {
    barriers.push_back(std::make_unique<std::barrier<>>(WARP_SIZE));
  }
  std::vector<std::thread> threads;
  for (Lane& each : lanes) {
    threads.emplace_back([&each, &body] {
      lane = &each;
      body();
    });
  }
  for (std::thread& thread : threads) thread.join();
}
#else
inline jmp_buf scheduling;
inline void (*enter)(void*);
inline void* enter_argument;

inline void meet(State where) {
  lane->state = where;
  if (!_setjmp(lane->resumed)) _longjmp(scheduling, 1);
}

inline void run_lane() {
  enter(enter_argument);
  lane->state = DONE;
  _longjmp(scheduling, 1);
}

// Lets a lane run until it meets a barrier or ends.
inline void go_on(Lane& next) {
  lane = &next;
  if (_setjmp(scheduling)) return;
  if (next.begun) _longjmp(next.resumed, 1);
  next.begun = true;
  setcontext(&next.context);
}

// Lets the lanes that have all arrived at the same barrier go on. True if there were any.
inline bool release() {
  bool released = false;
  const auto all = [](auto begin, auto end, State state) {
    return std::all_of(begin, end, [=](const Lane& each) { return each.state == state; });
  };
  for (auto first = lanes.begin(); first != lanes.end(); first += WARP_SIZE) {
    if (all(first, first + WARP_SIZE, AT_WARP_BARRIER)) {
      std::for_each(first, first + WARP_SIZE, [](Lane& each) { each.state = RUNNING; });
      released = true;
    }
  }
  if (all(lanes.begin(), lanes.end(), AT_BARRIER)) {
    for (Lane& each : lanes) each.state = RUNNING;
    released = true;
  }
  return released;
}

template <typename Body>
void run_block(Body body, uint64_t seed) {
  constexpr size_t STACK = 1 << 16;
  enter = [](void* argument) { (*static_cast<Body*>(argument))(); };
  enter_argument = &body;
  for (Lane& each : lanes) {
    each.state = RUNNING;
    each.begun = false;
    if (!each.stack) each.stack.reset(new char[STACK]);
    getcontext(&each.context);
    each.context.uc_stack.ss_sp = each.stack.get();
    each.context.uc_stack.ss_size = STACK;
    each.context.uc_link = nullptr;
    makecontext(&each.context, run_lane, 0);
  }
  std::mt19937_64 random(seed);
  std::vector<Lane*> order;
  for (Lane& each : lanes) order.push_back(&each);
  do {
    std::shuffle(order.begin(), order.end(), random);
    for (Lane* each : order) {
      if (each->state == RUNNING) go_on(*each);
    }
  } while (release());
  for (Lane& each : lanes) {
    if (each.state != DONE) fail("a barrier that not all threads reach");
  }
}
#endif

// Every lane of the warp gives a value and gets those of all.
template <typename T, typename Use>
auto exchange(unsigned mask, T value, Use use) {
  if (mask != 0xffffffffu) fail("an operation among a part of a warp");
  lane->exchanged = 0;
  std::memcpy(&lane->exchanged, &value, sizeof value);
  meet(AT_WARP_BARRIER);
  const unsigned first = lane->index.x / WARP_SIZE * WARP_SIZE;
  auto result = use([first](unsigned other) {
    T given;
    std::memcpy(&given, &lanes[first + other % WARP_SIZE].exchanged, sizeof given);
    return given;
  });
  meet(AT_WARP_BARRIER);
  return result;
}

template <typename... P, size_t... I>
void run(void (*kernel)(P...), unsigned blocks, unsigned threads, void** parameters, uint64_t seed,
         std::index_sequence<I...>) {
  if (threads % WARP_SIZE || threads > 1024) fail("blocks have whole warps, at most 32");
  lanes = std::vector<Lane>(threads);
  grid_size.x = blocks;
  block_size.x = threads;
  for (unsigned i = 0; i < threads; ++i) lanes[i].index.x = i;
  for (unsigned i = 0; i < blocks; ++i) {
    block.x = i;
    run_block([&] { kernel(*static_cast<P*>(parameters[I])...); }, seed + i);
  }
}

// `parameters` holds the address of each.
template <typename... P>
void run(void (*kernel)(P...), unsigned blocks, unsigned threads, void** parameters,
         uint64_t seed) {
  run(kernel, blocks, threads, parameters, seed, std::index_sequence_for<P...>());
}

}  // namespace emulation

#define threadIdx (emulation::lane->index)
#define blockIdx (emulation::block)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)

inline void __syncthreads() { emulation::meet(emulation::AT_BARRIER); }

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  return emulation::exchange(mask, predicate, [](auto of) {
    unsigned votes = 0;
    for (unsigned i = 0; i < emulation::WARP_SIZE; ++i) votes |= unsigned(of(i)) << i;
    return votes;
  });
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return emulation::exchange(
      mask, value, [=](auto of) { return of(threadIdx.x % emulation::WARP_SIZE ^ distance); });
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulation::exchange(mask, value, [=](auto of) { return of(source); });
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const unsigned own = threadIdx.x % emulation::WARP_SIZE;
  return emulation::exchange(mask, value,
                             [=](auto of) { return of(own < distance ? own : own - distance); });
}

template <typename T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline unsigned atomicOr(unsigned* address, unsigned value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}

template <typename T>
T __ldcs(const T* address) {
  return *address;
}

template <typename T>
void __stcg(T* address, T value) {
  *address = value;
}

template <typename To, typename From>
To emulation_cast(From value) {
  To result;
  static_assert(sizeof result == sizeof value);
  std::memcpy(&result, &value, sizeof result);
  return result;
}
inline float __int_as_float(int x) { return emulation_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emulation_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return emulation_cast<unsigned>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
