// Linear layers of the draft pass with their row-gated LoRA on Hopper GPUs, for up to 64 rows. Both
// at once; d, where the ways for more rows leave the LoRA apart, is filled with zeros.
//
//     y[n] = x[n] W^T + bias + gate(n) h[n] B^T,   h[n] = x[n] A^T,   gate(n) = n % block_size != 0
//
// x [M, K]; W [N, K]; A [S * R, K]; B [N, R]; y [M, N]. The N columns fall into S <= 3 slices (q, k
// and v; gate and up); the columns of slice s use columns s R ... (s + 1) R - 1 of h. bf16 or fp16,
// sums in fp32, h rounded to x's dtype.
//
// With so few rows a pass over W at the memory's speed is all there is. One launch does everything:
// each multiprocessor has one thread block with an equal share of the rows of W and A, in groups of
// eight. One warp streams them through shared memory by the copy engine, as far ahead as there is
// room; two warpgroups multiply, a stage each in turn: `wgmma` takes 64 rows of W by 8 to 64 of x.
// What lies behind a block's last row of W in shared memory is multiplied too and never stored.
//
// A comes first, in units of eight rows by a part of K, so that every block has some: with one
// product's latency for each 64 columns of eight rows, whole rows would keep their blocks longest.
// The sums of a unit lie in memory; whoever adds the last one to a group adds them up, in their
// order, and signals. h B^T is R more columns of the same sum as x W^T, at its end.
//
// The weights do not depend on the kernel before: their first loads are issued while it ends
// (programmatic dependent launch). So a kernel that writes weights must not come directly before.
// Blocks wait for those with a group of A: all must become resident, which two such launches on two
// streams at a time do not promise. The draft pass has one stream.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace vllm_uno {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kSlices = 3;
constexpr int kGroup = 8;                  // rows: a swizzle atom of 8 x 128 bytes
constexpr int kChunk = 64;                 // columns: 128 bytes
constexpr int kRowBytes = 128;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kThreads = kConsumers + 32;  // and the producer's warp
constexpr int kParts = 8;                  // of K, in units of A; at most
constexpr int kMaxStages = 32;
constexpr int kMaxGroups = 32;             // of W in one thread block
constexpr int kTileRows = 64;              // of W in one product
constexpr int kTileBytes = kTileRows * kRowBytes;
constexpr int kMaxRows = 64;               // of x

struct Stream {
  CUtensorMap w[2];  // boxes of lo and of lo + 1 groups
  CUtensorMap x, a, h, b[kSlices];
  void* hidden;
  void* y;
  void* d;  // of y's shape
  const void* bias;  // or null
  float* partial;  // [groups of A, parts, warpgroups, x_rows, 8]
  // [0]: groups of A that are written; [1]: blocks that have seen all; [2 + group]: sums of it that
  // are written. All 0 at rest.
  int* sync;
  int rows, x_rows, k, n, rank, slices, block_size;
  int ends[kSlices];
  int lo, hi_blocks, groups;  // groups of W: lo in each block, one more in the first hi_blocks; most
  int a_groups, stages, chunks_per_stage;
  int parts, lo_units, hi_units;  // units of A in each block with few and with many groups of W
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define UNO_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define UNO_D8(i) UNO_D4(i), UNO_D4(i + 4)
#define UNO_R4 "%0,%1,%2,%3"
#define UNO_R8 UNO_R4 ",%4,%5,%6,%7"
#define UNO_R16 UNO_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define UNO_R32 UNO_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define UNO_ASM(N, TYPE, REGS, A, B, ...)                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS    \
               "}, %" #A ", %" #B ", 1, 1, 1, 0, 0;"                                        \
               : __VA_ARGS__                                                                \
               : "l"(w), "l"(x))
#define UNO_PRODUCT(N, REGS, A, B, ...)                                                     \
  template <typename T>                                                                     \
  __device__ __forceinline__ void product(float (&d)[N / 2], uint64_t w, uint64_t x) {      \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                       \
      UNO_ASM(N, "bf16", REGS, A, B, __VA_ARGS__);                                          \
    } else {                                                                                \
      UNO_ASM(N, "f16", REGS, A, B, __VA_ARGS__);                                           \
    }                                                                                       \
  }
// d [64, N] += w [64, 16] x [N, 16]^T: operands by descriptors of shared memory.
UNO_PRODUCT(8, UNO_R4, 4, 5, UNO_D4(0))
UNO_PRODUCT(16, UNO_R8, 8, 9, UNO_D8(0))
UNO_PRODUCT(32, UNO_R16, 16, 17, UNO_D8(0), UNO_D8(8))
UNO_PRODUCT(64, UNO_R32, 32, 33, UNO_D8(0), UNO_D8(8), UNO_D8(16), UNO_D8(24))

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Rows of 128 bytes, swizzled as the copy engine writes them, groups of eight 1,024 bytes apart.
// The lower half; the upper one is the same for all.
__device__ __forceinline__ uint32_t descriptor(uint32_t address) {
  return (1U << 16) | ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ uint64_t whole(uint32_t lower) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(lower), "r"((1U << 30) | (1024U >> 4)));
  return d;
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap& map, uint32_t barrier,
                                         int column, int row, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint64_t policy_once() {  // a weight is read once a pass
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t policy_often() {  // by every block
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// What a thread block works on, for both of its roles alike.
struct Share {
  int first_row, groups;  // of W
  int first_unit, units;  // of A
  int stage_bytes, chunk_bytes, x_bytes;
  int a_chunk_bytes, a_step;  // with A, whose chunks are small, a stage holds more of them
  int unit_chunks;
};

__device__ __forceinline__ Share share_of(const Stream& p) {
  const int block = blockIdx.x;
  Share s;
  s.first_row = (block * p.lo + min(block, p.hi_blocks)) * kGroup;
  s.groups = p.lo + (block < p.hi_blocks ? 1 : 0);
  const int all = p.a_groups * p.parts, before_lo = p.hi_blocks * p.hi_units;
  const int unit = block < p.hi_blocks ? block * p.hi_units
                                       : before_lo + (block - p.hi_blocks) * p.lo_units;
  s.first_unit = min(all, unit);
  s.units = min(all, unit + (block < p.hi_blocks ? p.hi_units : p.lo_units)) - s.first_unit;
  s.unit_chunks = p.k / kChunk / p.parts;
  s.x_bytes = p.x_rows * kRowBytes;
  s.chunk_bytes = s.x_bytes + p.groups * kGroup * kRowBytes;
  s.stage_bytes = s.chunk_bytes * p.chunks_per_stage;
  s.a_chunk_bytes = s.x_bytes + kGroup * kRowBytes;
  // At least two stages: one for each warpgroup.
  s.a_step = min(min(32, s.stage_bytes / s.a_chunk_bytes), (s.unit_chunks + 1) / 2);
  return s;
}

struct Ring {
  uint32_t data, full, empty;  // shared addresses: stages, and a barrier of 8 bytes for each
  int stages;
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance(int by = 1) {  // at most by `stages`
    stage += by;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// By a whole warp: a lane for each chunk of a stage.
__device__ void produce(const Stream& p, const Share& s, Ring ring) {
  const uint64_t once = policy_once(), often = policy_often();
  const int k_chunks = p.k / kChunk;
  const int lane = threadIdx.x % 32;
  const CUtensorMap& w_map = p.w[s.groups > p.lo ? 1 : 0];
  const int w_bytes = s.groups * kGroup * kRowBytes, a_bytes = kGroup * kRowBytes;
  const auto load_weights = [&](const CUtensorMap& map, int bytes, int row, int first, int chunks,
                                int chunk_bytes) {
    const uint32_t barrier = ring.full + 8 * ring.stage;
    if (lane == 0) barrier_expect(barrier, chunks * (bytes + s.x_bytes));
    __syncwarp();
    if (lane < chunks) {
      load_box(ring.data + ring.stage * s.stage_bytes + lane * chunk_bytes + s.x_bytes, map, barrier,
               (first + lane) * kChunk, row, once);
    }
  };
  const auto load_x = [&](const CUtensorMap& map, int column, int chunks, int chunk_bytes) {
    if (lane < chunks) {
      load_box(ring.data + ring.stage * s.stage_bytes + lane * chunk_bytes, map,
               ring.full + 8 * ring.stage, column + lane * kChunk, 0, often);
    }
  };
  const auto wait_empty = [&] { barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1); };

  if (lane == 0) {
    prefetch_map(w_map);
    prefetch_map(p.x);
    prefetch_map(p.h);
    if (s.units > 0) prefetch_map(p.a);
    for (int slice = 0; slice < p.slices; ++slice) prefetch_map(p.b[slice]);
  }
  // Stages: those of A's units, then those of W.
  const int unit_stages = (s.unit_chunks + s.a_step - 1) / s.a_step;
  const int a_stages = s.units * unit_stages, step = p.chunks_per_stage;
  const int all_stages = a_stages + (k_chunks + step - 1) / step;
  const auto weights = [&](int stage) {
    if (stage < a_stages) {
      const int unit = s.first_unit + stage / unit_stages, at = stage % unit_stages * s.a_step;
      load_weights(p.a, a_bytes, unit / p.parts * kGroup, unit % p.parts * s.unit_chunks + at,
                   min(s.a_step, s.unit_chunks - at), s.a_chunk_bytes);
    } else {
      const int at = (stage - a_stages) * step;
      load_weights(w_map, w_bytes, s.first_row, at, min(step, k_chunks - at), s.chunk_bytes);
    }
  };
  const auto inputs = [&](int stage) {
    if (stage < a_stages) {
      const int unit = s.first_unit + stage / unit_stages, at = stage % unit_stages * s.a_step;
      load_x(p.x, (unit % p.parts * s.unit_chunks + at) * kChunk,
             min(s.a_step, s.unit_chunks - at), s.a_chunk_bytes);
    } else {
      const int at = (stage - a_stages) * step;
      load_x(p.x, at * kChunk, min(step, k_chunks - at), s.chunk_bytes);
    }
  };
  const int at_once = min(ring.stages, all_stages);
  for (int i = 0; i < at_once; ++i, ring.advance()) weights(i);
  ring.stage = ring.parity = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = 0; i < at_once; ++i, ring.advance()) inputs(i);
  for (int i = at_once; i < all_stages; ++i, ring.advance()) {
    wait_empty();
    weights(i);
    inputs(i);
  }

  // h B^T. B's boxes have as many rows as the larger shares: what is too much is not stored.
  const int last_row = s.first_row + s.groups * kGroup, r_chunks = p.rank / kChunk;
  bool seen = false;
  for (int slice = 0; slice < p.slices; ++slice) {
    const int start = slice == 0 ? 0 : p.ends[slice - 1];
    if (last_row <= start || s.first_row >= p.ends[slice]) continue;
    for (int first = 0; first < r_chunks; first += step, ring.advance()) {
      wait_empty();
      // Rows outside of the slice, before its start too, are filled with zeros.
      const int chunks = min(step, r_chunks - first);
      load_weights(p.b[slice], p.groups * kGroup * kRowBytes, s.first_row - start, first, chunks,
                   s.chunk_bytes);
      if (!seen) {
        seen = true;
        if (lane == 0) {
          while (load_acquire(p.sync) < p.a_groups) __nanosleep(20);
        }
        __syncwarp();
        asm volatile("fence.proxy.async;" ::: "memory");
      }
      load_x(p.h, slice * p.rank + first * kChunk, chunks, s.chunk_bytes);
    }
  }
  if (lane == 0 && atomicAdd(p.sync + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    // All have seen h complete: at rest again for the next launch.
    p.sync[0] = 0;
    p.sync[1] = 0;
    __threadfence();
  }
}

// The compiler does not know that sums change until `wait_group`.
template <int COUNT, int SUMS>
__device__ __forceinline__ void pin(float (&sum)[COUNT][SUMS]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
#pragma unroll
    for (int j = 0; j < SUMS; ++j) asm volatile("" : "+f"(sum[i][j])::"memory");
  }
}

// sum [64 COUNT rows of weights, ROWS of x] += over the chunks that come next, at least one: those
// in every second stage, the first of which is `skip` stages away (and is then, for the next call).
//
// As ptxas needs it: loops that run at least once, and fence, products and commit in one basic block.
// Else it waits after each product (its note C7520).
template <typename T, int ROWS, int COUNT>
__device__ __forceinline__ void consume(float (&sum)[COUNT][ROWS / 2], Ring& ring, int& skip,
                                        const Share& s, int chunk_bytes, int chunks, int step) {
  const int stages = (chunks + step - 1) / step;
  if (skip >= stages) {  // all are the other's
    ring.advance(stages);
    skip -= stages;
    return;
  }
  ring.advance(skip);
  int before = -1, index = skip;
  pin(sum);
#pragma unroll 1
  do {
    barrier_wait(ring.full + 8 * ring.stage, ring.parity);
    const uint32_t at = ring.data + ring.stage * s.stage_bytes;
    const int here = min(step, chunks - index * step);
    int c = 0;
#pragma unroll 1
    do {
      // By a shuffle: to uniform registers once, and not for each product.
      const uint32_t x = __shfl_sync(0xFFFFFFFF, descriptor(at + c * chunk_bytes), 0);
      const uint32_t w = x + (s.x_bytes >> 4);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          product<T>(sum[i], whole(w + 2 * k + i * (kTileBytes >> 4)), whole(x + 2 * k));
        }
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    } while (++c < here);
    // All but this stage's last chunk are done with: the stage before, too.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (before >= 0 && threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * before);
    before = ring.stage;
    index += 2;
    ring.advance(min(2, stages - index + 2));
  } while (index < stages);
  skip = index - stages;
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin(sum);
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * before);
}

template <typename T>
__device__ __forceinline__ T narrow(float v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(v);
  } else {
    return __float2half_rn(v);
  }
}

template <typename T>
__device__ __forceinline__ float widen(T v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(v);
  } else {
    return __half2float(v);
  }
}

__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// A unit's sums, by the warp that has its eight rows: to memory, and h where they were the last.
template <typename T, int ROWS>
__device__ __forceinline__ void finish_unit(const Stream& p, const float (&sum)[1][ROWS / 2],
                                            int unit, int warpgroup) {
  constexpr int kSums = ROWS * kGroup;
  const int lane = threadIdx.x % 32, group = unit / p.parts;
  const int count = 2 * p.parts, mine = 2 * (unit % p.parts) + warpgroup;
  float* const sums = p.partial + static_cast<int64_t>(group) * count * kSums;
#pragma unroll
  for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      __stcg(sums + mine * kSums + (8 * j + 2 * (lane % 4) + e) * kGroup + lane / 4,
             sum[0][4 * j + e]);
    }
  }
  __syncwarp();
  int written = 0;
  if (lane == 0) {
    __threadfence();  // after the warp's barrier: it stands for all lanes' writes
    written = atomicAdd(p.sync + 2 + group, 1);
    __threadfence();
  }
  if (__shfl_sync(0xFFFFFFFF, written, 0) != count - 1) return;
  T* const h = static_cast<T*>(p.hidden) + group * kGroup;
  for (int at = lane; at < p.rows * kGroup; at += 32) {
    const int n = at / kGroup, m = at % kGroup;
    float total = 0.0F;
#pragma unroll 8
    for (int i = 0; i < count; ++i) total += __ldcg(sums + i * kSums + at);
    // A selection, not a product: a seed row may hold NaN.
    h[static_cast<int64_t>(n) * p.slices * p.rank + m] =
        narrow<T>(n % p.block_size == 0 ? 0.0F : total);
  }
  // Other blocks' copy engines read it.
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncwarp();
  if (lane == 0) {
    p.sync[2 + group] = 0;
    __threadfence();
    atomicAdd(p.sync, 1);
  }
  __syncwarp();
}

// In a sum, a thread's values [4 j + 2 side + e] are of weight row 16 warp + lane / 4 + 8 side and
// of x's row 8 j + 2 (lane % 4) + e.
template <typename T, int ROWS, int COUNT>
__device__ void multiply(const Stream& p, const Share& s, Ring ring, uint8_t* shared) {
  const int lane = threadIdx.x % 32, in_group = threadIdx.x % kWarpgroup;
  const int warp = __shfl_sync(0xFFFFFFFF, in_group / 32, 0);
  const int warpgroup = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x / kWarpgroup), 0);
  const int k_chunks = p.k / kChunk, step = p.chunks_per_stage;
  int skip = warpgroup;
  for (int unit = s.first_unit; unit < s.first_unit + s.units; ++unit) {
    float sum[1][ROWS / 2] = {};
    consume<T, ROWS, 1>(sum, ring, skip, s, s.a_chunk_bytes, s.unit_chunks, s.a_step);
    if (warp == 0) finish_unit<T, ROWS>(p, sum, unit, warpgroup);
  }
  float sum[COUNT][ROWS / 2] = {};
  consume<T, ROWS, COUNT>(sum, ring, skip, s, s.chunk_bytes, k_chunks, step);
  const int last_row = s.first_row + s.groups * kGroup;
  for (int slice = 0; slice < p.slices; ++slice) {
    const int start = slice == 0 ? 0 : p.ends[slice - 1];
    if (last_row <= start || s.first_row >= p.ends[slice]) continue;
    consume<T, ROWS, COUNT>(sum, ring, skip, s, s.chunk_bytes, p.rank / kChunk, step);
  }
  // Through shared memory, where no load is under way any more: the other warpgroup's sums, then
  // whole lines.
  constexpr int kPitch = COUNT * kTileRows + 8;
  float* const others = reinterpret_cast<float*>(shared);
  T* const out = reinterpret_cast<T*>(others + COUNT * (ROWS / 2) * kWarpgroup);
  const T* const bias = static_cast<const T*>(p.bias);
  sync_consumers();
  if (warpgroup == 1) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int j = 0; j < ROWS / 2; ++j) others[(i * (ROWS / 2) + j) * kWarpgroup + in_group] = sum[i][j];
    }
  }
  sync_consumers();
  if (warpgroup == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int m = i * kTileRows + warp * 16 + lane / 4 + 8 * side;
        const bool mine = m < s.groups * kGroup;
        const float added = bias != nullptr && mine ? widen<T>(bias[s.first_row + m]) : 0.0F;
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int n = 8 * j + 2 * (lane % 4) + e, at = 4 * j + 2 * side + e;
            out[n * kPitch + m] = narrow<T>(
                sum[i][at] + others[(i * (ROWS / 2) + at) * kWarpgroup + in_group] + added);
          }
        }
      }
    }
  }
  sync_consumers();
  T* const y = static_cast<T*>(p.y) + s.first_row;
  T* const d = static_cast<T*>(p.d) + s.first_row;
  for (int at = threadIdx.x; at < p.rows * s.groups; at += kConsumers) {
    const int n = at / s.groups, m = at % s.groups * kGroup;
    const int64_t to = static_cast<int64_t>(n) * p.n + m;
    *reinterpret_cast<uint4*>(y + to) = *reinterpret_cast<const uint4*>(out + n * kPitch + m);
    *reinterpret_cast<uint4*>(d + to) = uint4{};
  }
}

#endif  // sm_90a

template <typename T, int ROWS, int COUNT>
__global__ void __launch_bounds__(kThreads, 1) stream_kernel(const __grid_constant__ Stream p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * kMaxStages];
  const Share s = share_of(p);
  Ring ring;
  const uint32_t begin = shared_address(dynamic), aligned = (begin + 1023) & ~1023U;
  ring.data = aligned;
  ring.full = shared_address(barriers);
  ring.empty = ring.full + 8 * kMaxStages;
  ring.stages = p.stages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, kWarpgroup / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // By a shuffle: so that the compiler knows that a warp's threads go one way.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x / 32), 0);
  if (warp == kConsumers / 32) {
    produce(p, s, ring);
  } else {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    multiply<T, ROWS, COUNT>(p, s, ring, dynamic + (aligned - begin));
  }
#endif
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

Encode encoder() {
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    STD_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                    cudaEnableDefault, &result));
    STD_TORCH_CHECK(result == cudaDriverEntryPointSuccess && found != nullptr,
                    "uno_linear: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  return encode;
}

// A matrix [rows, columns] of 2-byte elements, read in boxes of `box` rows and 64 columns.
CUtensorMap matrix(const void* data, bool bf16, int64_t rows, int64_t columns, int64_t stride,
                   int box) {
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t boxes[2] = {kChunk, static_cast<cuuint32_t>(box)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult status = encoder()(
      &map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      const_cast<void*>(data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(status == CUDA_SUCCESS, "uno_linear: no tensor map for [", rows, ", ", columns,
                  "], stride ", stride, ": CUDA error ", static_cast<int>(status));
  return map;
}

struct Device {
  int multiprocessors, shared_bytes;
};

Device device_of(int index) {
  Device d{};
  STD_CUDA_CHECK(
      cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, index));
  STD_CUDA_CHECK(
      cudaDeviceGetAttribute(&d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  return d;
}

template <typename T, int ROWS, int COUNT>
void launch(Stream& p, int blocks, const Device& device, cudaStream_t stream) {
#ifdef UNO_TUNE
  const int kStageBytes = getenv("UNO_STAGE") ? atoi(getenv("UNO_STAGE")) * 1024 : 32 * 1024;
  const int kMaxChunks = getenv("UNO_CHUNKS") ? atoi(getenv("UNO_CHUNKS")) : 4;
#else
  constexpr int kStageBytes = 32 * 1024, kMaxChunks = 4;
#endif
  const int chunk = (ROWS + p.groups * kGroup) * kRowBytes;
  p.chunks_per_stage = std::clamp(kStageBytes / chunk, 1, kMaxChunks);
  // Behind the last stage lies what its products read too much.
#ifdef UNO_TUNE
  const bool two = getenv("UNO_BLOCKS") && atoi(getenv("UNO_BLOCKS")) == 2;
  const int room = (two ? 233472 / 2 - 1024 : device.shared_bytes) - 1024 - kTileBytes -
                   2 * kMaxStages * 8;
#else
  const int room = device.shared_bytes - 1024 - kTileBytes - 2 * kMaxStages * 8;
#endif
  // Even: each stage always has the same warpgroup, which waits for every one of its turns.
  p.stages = std::min(kMaxStages, room / (chunk * p.chunks_per_stage)) / 2 * 2;
#ifdef UNO_TUNE
  if (getenv("UNO_MAXSTAGES")) p.stages = std::min(p.stages, atoi(getenv("UNO_MAXSTAGES")));
#endif
  const int bytes = p.stages * chunk * p.chunks_per_stage + kTileBytes + 1024;
  const auto kernel = stream_kernel<T, ROWS, COUNT>;
  STD_TORCH_CHECK(p.stages >= 2, "uno_linear: a stage is kept while the next is waited for");
  // The most there may be, always: graphs hold launches of other sizes of the same kernel.
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      device.shared_bytes - 2 * kMaxStages * 8));
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
#ifdef UNO_TUNE
  if (getenv("UNO_PDL")) config.numAttrs = atoi(getenv("UNO_PDL"));
#endif
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<const Stream&>(p)));
}

template <typename T, int ROWS>
void launch_tiles(Stream& p, int blocks, const Device& d, cudaStream_t stream) {
  switch ((p.groups * kGroup + kTileRows - 1) / kTileRows) {
    case 1:
      return launch<T, ROWS, 1>(p, blocks, d, stream);
    case 2:
      return launch<T, ROWS, 2>(p, blocks, d, stream);
    case 3:
      return launch<T, ROWS, 3>(p, blocks, d, stream);
    default:
      return launch<T, ROWS, 4>(p, blocks, d, stream);
  }
}

template <typename T>
void launch_rows(Stream& p, int blocks, const Device& d, cudaStream_t stream) {
  switch (p.x_rows) {
    case 8:
      return launch_tiles<T, 8>(p, blocks, d, stream);
    case 16:
      return launch_tiles<T, 16>(p, blocks, d, stream);
    case 32:
      return launch_tiles<T, 32>(p, blocks, d, stream);
    default:
      return launch_tiles<T, 64>(p, blocks, d, stream);
  }
}

// How many units of A to each block, so that the most that a block streams is the least.
void share_units(Stream& p, int blocks) {
  const int units = p.a_groups * p.parts, lo_blocks = blocks - p.hi_blocks;
  const int cost = 1 + p.x_rows / kGroup;  // of a unit; a group of W costs `parts`
  int best = -1;
  for (int hi = 0; hi <= units; ++hi) {
    const int left = std::max(0, units - hi * p.hi_blocks);
    const int lo = (left + lo_blocks - 1) / lo_blocks;
    const int most = std::max(p.lo * p.parts + lo * cost,
                              p.hi_blocks == 0 ? 0 : (p.lo + 1) * p.parts + hi * cost);
    if (best < 0 || most < best) {
      best = most;
      p.lo_units = lo;
      p.hi_units = hi;
    }
    if (left == 0 || p.hi_blocks == 0) break;
  }
}

// Arguments are checked by vllm_uno/lora_kernels.py, which picks the shapes that this takes.
Tensor uno_linear_sm90(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& a,
                       const Tensor& b, int64_t end0, int64_t end1, int64_t block_size,
                       const Tensor& sync, const Tensor& d) {
  const int index = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(index);
  Tensor h = torch::stable::new_empty(x, {x.size(0), a.size(0)});
  Tensor y = torch::stable::new_empty(x, {x.size(0), w.size(0)});
  if (x.size(0) == 0) return y;
  const Device device = device_of(index);
  const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
  Stream p{};
  p.rows = static_cast<int>(x.size(0));
  p.x_rows = p.rows <= 8 ? 8 : p.rows <= 16 ? 16 : p.rows <= 32 ? 32 : 64;
  p.k = static_cast<int>(x.size(1));
  p.n = static_cast<int>(w.size(0));
  p.rank = static_cast<int>(b.size(1));
  p.slices = static_cast<int>(a.size(0)) / p.rank;
  p.block_size = static_cast<int>(block_size);
  const int w_groups = p.n / kGroup, blocks = std::min(device.multiprocessors, w_groups);
  p.lo = w_groups / blocks;
  p.hi_blocks = w_groups - p.lo * blocks;
  p.a_groups = static_cast<int>(a.size(0)) / kGroup;
  // No more units than blocks, where that goes: the end of each takes its block some 2 us.
  p.parts = std::clamp(blocks / p.a_groups, 1, kParts);
#ifdef UNO_TUNE
  if (getenv("UNO_PARTS")) p.parts = atoi(getenv("UNO_PARTS"));
#endif
  while (p.k / kChunk % p.parts != 0) --p.parts;
  share_units(p, blocks);
  Tensor partial = torch::stable::new_empty(
      x, {p.a_groups * p.parts * 2 * p.x_rows * kGroup}, ScalarType::Float);
  p.partial = static_cast<float*>(partial.mutable_data_ptr());
  STD_TORCH_CHECK(sync.numel() >= 2 + p.a_groups, "uno_linear: ", p.a_groups, " groups of A in ",
                  sync.numel(), " words");
  p.groups = p.lo + (p.hi_blocks > 0 ? 1 : 0);
  STD_TORCH_CHECK(p.groups <= kMaxGroups, "uno_linear: ", p.n, " columns are too many");
  STD_TORCH_CHECK(p.rows <= kMaxRows, "uno_linear: ", p.rows, " rows are too many");
  p.w[0] = matrix(w.const_data_ptr(), bf16, p.n, p.k, p.k, p.lo * kGroup);
  p.w[1] = matrix(w.const_data_ptr(), bf16, p.n, p.k, p.k, p.groups * kGroup);
  // Of a single row any stride may be said.
  p.x = matrix(x.const_data_ptr(), bf16, p.rows, p.k, p.rows == 1 ? p.k : x.stride(0), p.x_rows);
  p.a = matrix(a.const_data_ptr(), bf16, a.size(0), p.k, p.k, kGroup);
  p.h = matrix(h.const_data_ptr(), bf16, p.rows, a.size(0), a.size(0), p.x_rows);
  const int ends[kSlices] = {static_cast<int>(end0), static_cast<int>(end1), p.n};
  for (int slice = 0, start = 0; slice < p.slices; ++slice) {
    p.ends[slice] = ends[slice];
    const auto* from =
        static_cast<const uint16_t*>(b.const_data_ptr()) + static_cast<int64_t>(start) * p.rank;
    p.b[slice] = matrix(from, bf16, ends[slice] - start, p.rank, p.rank, p.groups * kGroup);
    start = ends[slice];
  }
  p.hidden = h.mutable_data_ptr();
  p.y = y.mutable_data_ptr();
  p.d = d.mutable_data_ptr();
  p.bias = bias.numel() > 0 ? bias.const_data_ptr() : nullptr;
  p.sync = static_cast<int*>(sync.mutable_data_ptr());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  if (bf16) {
    launch_rows<__nv_bfloat16>(p, blocks, device, static_cast<cudaStream_t>(stream));
  } else {
    launch_rows<__half>(p, blocks, device, static_cast<cudaStream_t>(stream));
  }
  return y;
}

}  // namespace
}  // namespace vllm_uno

STABLE_TORCH_LIBRARY_IMPL(vllm_uno, CUDA, m) {
  m.impl("uno_linear_sm90", TORCH_BOX(&vllm_uno::uno_linear_sm90));
}
