// Linear layers of the draft pass with their row-gated LoRA: y + d of
//
//     y[n] = x[n] W^T + bias,   d[n] = gate(n) h[n] B^T,   h[n] = x[n] A^T,   gate(n) = n % block_size != 0
//
// x [M, K]; W [N, K]; A [S * R, K]; B [N, R]; y, d [M, N]. The N columns fall into S <= 3 slices (q, k
// and v; gate and up) that end at ends[0], ends[1] and N; the columns of slice s use columns
// s R ... (s + 1) R - 1 of h. bf16 or fp16, sums in fp32, h rounded to x's dtype.
//
// `uno_linear_skinny` is for up to 32 rows, where a pass over W at the memory's speed is all there is: one
// launch, the adapter's bytes beside the weight's, y + d in y and zeros in d. Tensor cores multiply 16 rows of W by 8 rows of x;
// the order of K within a product is free, so that each thread reads 16 contiguous bytes of a row and
// feeds them to two products as they are: W goes through no shared memory. The first thread blocks
// compute h; the others stream W, and wait for h only when all of W is done.
//
// `lora_expand_` is the B side for many rows: d of all slices in one pass, from h.
#include <algorithm>
#include <cstdint>

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

constexpr int kWarp = 32;
constexpr int kExpandWarps = 8;
constexpr int kPair = 64;          // K elements of 128 bytes: a line of W, read by one warp at once

template <typename T>
struct Traits;
template <>
struct Traits<__nv_bfloat16> {
  static __device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
  static __device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
template <>
struct Traits<__half> {
  static __device__ __forceinline__ __half narrow(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ float widen(__half v) { return __half2float(v); }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// A weight is read once: it must not push x out of the first-level cache.
__device__ __forceinline__ uint4 load_streamed(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// What other thread blocks wrote in this launch: past the first-level cache.
__device__ __forceinline__ uint4 load_fresh(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Programmatic dependent launch (sm_90): before this, nothing of the kernel before may be touched: x,
// and the memory that h and y are made in. The kernel after may begin in turn.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Two products over 32 elements of K. `top`, `bottom`: 16 bytes of weight rows g and g + 8;
// `x`: 16 bytes of x's row g, at the same K.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& top, const uint4& bottom,
                                         const uint4& x) {
  const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y};
  const uint32_t second[4] = {top.z, bottom.z, top.w, bottom.w};
  Traits<T>::mma(c, first, x.x, x.y);
  Traits<T>::mma(c, second, x.z, x.w);
}

template <typename T>
struct Skinny {
  const T* x;
  const T* w;
  const T* bias;  // or null
  const T* a;
  const T* b;
  T* h;
  T* y;
  T* d;
  int* sync;  // [0]: blocks that have written h; [1]: blocks that need it no more; both 0 at rest
  int rows, k, n, rank, end0, end1, block_size, shrink_blocks, slices_rank;
  int64_t x_stride;
};

// One block: 16 MT weight rows, all of K, which its WARPS warps share, up to 8 NT rows of x; UNITS
// lines of each row are in flight ahead of the products.
template <typename T, int MT, int NT, int WARPS, int UNITS, int BLOCKS>
__global__ void __launch_bounds__(WARPS * kWarp, BLOCKS) skinny_kernel(const Skinny<T> p) {
  constexpr int kWarps = WARPS, kThreads = WARPS * kWarp, kUnits = UNITS;
  __shared__ float partial[kWarps][NT * 8][MT * 16 + 1];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int g = lane / 4, t = lane % 4;
  const bool shrinks = static_cast<int>(blockIdx.x) < p.shrink_blocks;
  const int tile = (shrinks ? blockIdx.x : blockIdx.x - p.shrink_blocks) * (16 * MT);
  const int columns = shrinks ? p.slices_rank : p.n;
  const T* weight = shrinks ? p.a : p.w;

  float c[MT][NT][4] = {};
  const T* rows_of_w[MT][2];
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    // Past the end (MT = 2 and an odd number of 16 rows): read a row that is there, write nothing.
    const int top = min(tile + 16 * i, columns - 16) + g;
    rows_of_w[i][0] = weight + static_cast<int64_t>(top) * p.k + 8 * t;
    rows_of_w[i][1] = rows_of_w[i][0] + static_cast<int64_t>(8) * p.k;
  }
  const T* rows_of_x[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    rows_of_x[j] = p.x + min(g + 8 * j, p.rows - 1) * p.x_stride + 8 * t;
  }

  const int pairs = p.k / kPair;
  uint4 next[kUnits][2][MT][2];
  const auto prefetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int pair = first + u * kWarps;
      if (pair >= pairs) continue;
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = pair * kPair + half * 32;
          next[u][half][i][0] = load_streamed(rows_of_w[i][0] + at);
          next[u][half][i][1] = load_streamed(rows_of_w[i][1] + at);
        }
      }
    }
  };
  prefetch(warp);
  wait_for_kernel_before();
  for (int first = warp; first < pairs; first += kUnits * kWarps) {
    uint4 now[kUnits][2][MT][2];
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          now[u][half][i][0] = next[u][half][i][0];
          now[u][half][i][1] = next[u][half][i][1];
        }
    prefetch(first + kUnits * kWarps);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int pair = first + u * kWarps;
      if (pair >= pairs) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = pair * kPair + half * 32;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          const uint4 xv = __ldg(reinterpret_cast<const uint4*>(rows_of_x[j] + at));
#pragma unroll
          for (int i = 0; i < MT; ++i) {
            multiply<T>(c[i][j], now[u][half][i][0], now[u][half][i][1], xv);
          }
        }
      }
    }
  }

  if (!shrinks && p.shrink_blocks > 0) {
    if (threadIdx.x == 0) {
      while (load_acquire(p.sync) < p.shrink_blocks) __nanosleep(32);
    }
    __syncthreads();
    for (int chunk = warp; chunk * 32 < p.rank; chunk += kWarps) {
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const int top = min(tile + 16 * i, columns - 16);
        const int slice = (top >= p.end0) + (top >= p.end1);
        const T* row = p.b + static_cast<int64_t>(top + g) * p.rank + chunk * 32 + 8 * t;
        const uint4 upper = load_streamed(row);
        const uint4 lower = load_streamed(row + static_cast<int64_t>(8) * p.rank);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          const int64_t n = min(g + 8 * j, p.rows - 1);
          const uint4 hv =
              load_fresh(p.h + n * p.slices_rank + slice * p.rank + chunk * 32 + 8 * t);
          multiply<T>(c[i][j], upper, lower, hv);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        partial[warp][8 * j + 2 * t + e % 2][16 * i + g + 8 * (e / 2)] = c[i][j][e];
      }
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < NT * 8 * MT * 16; at += kThreads) {
    const int n = at / (MT * 16), m = at % (MT * 16), column = tile + m;
    if (n >= p.rows || column >= columns) continue;
    float sum = 0.0F;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][n][m];
    if (shrinks) {
      // A selection, not a product: a seed row may hold NaN.
      p.h[static_cast<int64_t>(n) * p.slices_rank + column] =
          Traits<T>::narrow(n % p.block_size == 0 ? 0.0F : sum);
    } else {
      if (p.bias != nullptr) sum += Traits<T>::widen(p.bias[column]);
      const int64_t out = static_cast<int64_t>(n) * p.n + column;
      p.y[out] = Traits<T>::narrow(sum);
      p.d[out] = Traits<T>::narrow(0.0F);
    }
  }
  if (p.shrink_blocks == 0) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (shrinks) {
    __threadfence();
    atomicAdd(p.sync, 1);
  } else if (atomicAdd(p.sync + 1, 1) == static_cast<int>(gridDim.x) - p.shrink_blocks - 1) {
    // The last block: all have seen h complete. At rest again for the next launch.
    p.sync[0] = 0;
    p.sync[1] = 0;
    __threadfence();
  }
}

template <typename T>
struct Expand {
  const T* h;
  const T* b;
  T* d;
  int rows, n, rank, end0, end1, block_size, tiles;
  int64_t h_stride;
};

// One warp: 32 columns; B's values for them stay in registers over `tiles` tiles of 16 rows.
template <typename T, int CHUNKS>
__global__ void __launch_bounds__(kExpandWarps * kWarp) expand_kernel(const Expand<T> p) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int g = lane / 4, t = lane % 4;
  const int column = (blockIdx.x * kExpandWarps + warp) * 32;
  if (column >= p.n) return;
  const int slice = (column >= p.end0) + (column >= p.end1);
  // Tile j of 8 columns holds columns 8 i + 2 j + {0, 1}, i = 0 ... 3: so a thread's results over
  // the four tiles are eight columns side by side.
  uint4 bv[4][CHUNKS];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t row = column + (g / 2) * 8 + 2 * j + g % 2;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
      bv[j][k] = __ldg(reinterpret_cast<const uint4*>(p.b + row * p.rank + k * 32 + 8 * t));
    }
  }
  for (int tile = 0; tile < p.tiles; ++tile) {
    const int row = (blockIdx.y * p.tiles + tile) * 16;
    if (row >= p.rows) return;
    float c[4][4] = {};
    const int upper = min(row + g, p.rows - 1), lower = min(row + g + 8, p.rows - 1);
    const T* hu = p.h + upper * p.h_stride + slice * p.rank + 8 * t;
    const T* hl = p.h + lower * p.h_stride + slice * p.rank + 8 * t;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
      const uint4 u = __ldg(reinterpret_cast<const uint4*>(hu + k * 32));
      const uint4 l = __ldg(reinterpret_cast<const uint4*>(hl + k * 32));
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply<T>(c[j], u, l, bv[j][k]);
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int n = row + g + 8 * side;
      if (n >= p.rows) continue;
      union {
        uint4 all;
        T each[8];
      } v;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        // A selection, not a product: a seed row's h may hold NaN.
        v.each[e] =
            Traits<T>::narrow(n % p.block_size == 0 ? 0.0F : c[e / 2][2 * side + e % 2]);
      }
      *reinterpret_cast<uint4*>(p.d + static_cast<int64_t>(n) * p.n + column + 8 * t) = v.all;
    }
  }
}

cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

template <typename T, int MT, int NT, int WARPS, int UNITS, int BLOCKS>
void launch_skinny(const Skinny<T>& p, cudaStream_t stream, bool early = true) {
  const auto blocks = [](int columns) { return (columns + 16 * MT - 1) / (16 * MT); };
  Skinny<T> q = p;
  q.shrink_blocks = blocks(p.slices_rank);
  // The weights do not depend on the kernel before: begin to read them while it ends.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(q.shrink_blocks + blocks(p.n));
  config.blockDim = dim3(WARPS * kWarp);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, skinny_kernel<T, MT, NT, WARPS, UNITS, BLOCKS>, q));
}

template <typename T>
void pick_skinny(const Skinny<T>& p, cudaStream_t stream) {
  if (p.rows <= 8) return launch_skinny<T, 1, 1, 8, 2, 2>(p, stream);
  if (p.rows <= 16) return launch_skinny<T, 1, 2, 8, 2, 2>(p, stream);
  // More rows of x: more weight rows share what is read of them.
  launch_skinny<T, 2, 4, 8, 1, 1>(p, stream);
}

template <typename T>
void skinny(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& a, const Tensor& b,
            int64_t end0, int64_t end1, int64_t block_size, const Tensor& sync, const Tensor& d,
            const Tensor& h, const Tensor& y) {
  Skinny<T> p{};
  p.x = static_cast<const T*>(x.const_data_ptr());
  p.w = static_cast<const T*>(w.const_data_ptr());
  p.bias = bias.numel() > 0 ? static_cast<const T*>(bias.const_data_ptr()) : nullptr;
  p.a = static_cast<const T*>(a.const_data_ptr());
  p.b = static_cast<const T*>(b.const_data_ptr());
  p.h = static_cast<T*>(h.mutable_data_ptr());
  p.y = static_cast<T*>(y.mutable_data_ptr());
  p.d = static_cast<T*>(d.mutable_data_ptr());
  p.sync = static_cast<int*>(sync.mutable_data_ptr());
  p.rows = static_cast<int>(x.size(0));
  p.k = static_cast<int>(x.size(1));
  p.n = static_cast<int>(w.size(0));
  p.rank = static_cast<int>(b.size(1));
  p.slices_rank = static_cast<int>(a.size(0));
  p.end0 = static_cast<int>(end0);
  p.end1 = static_cast<int>(end1);
  p.block_size = static_cast<int>(block_size);
  p.x_stride = x.stride(0);
  pick_skinny<T>(p, current_stream(x));
}

// Arguments are checked by vllm_uno/lora_kernels.py, which picks the shapes that these kernels take.
Tensor uno_linear_skinny(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& a,
                         const Tensor& b, int64_t end0, int64_t end1, int64_t block_size,
                         const Tensor& sync, const Tensor& d) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor h = torch::stable::new_empty(x, {x.size(0), a.size(0)});
  Tensor y = torch::stable::new_empty(x, {x.size(0), w.size(0)});
  if (x.size(0) == 0) return y;
  if (x.scalar_type() == ScalarType::BFloat16) {
    skinny<__nv_bfloat16>(x, w, bias, a, b, end0, end1, block_size, sync, d, h, y);
  } else {
    skinny<__half>(x, w, bias, a, b, end0, end1, block_size, sync, d, h, y);
  }
  return y;
}

template <typename T>
void expand(const Tensor& d, const Tensor& h, const Tensor& b, int64_t end0, int64_t end1,
            int64_t block_size) {
  Expand<T> p{};
  p.h = static_cast<const T*>(h.const_data_ptr());
  p.b = static_cast<const T*>(b.const_data_ptr());
  p.d = static_cast<T*>(d.mutable_data_ptr());
  p.rows = static_cast<int>(d.size(0));
  p.n = static_cast<int>(d.size(1));
  p.rank = static_cast<int>(b.size(1));
  p.end0 = static_cast<int>(end0);
  p.end1 = static_cast<int>(end1);
  p.block_size = static_cast<int>(block_size);
  p.h_stride = h.stride(0);
  const int row_tiles = (p.rows + 15) / 16, groups = (p.n + 32 * kExpandWarps - 1) / (32 * kExpandWarps);
  // Enough blocks for three on each of 132 multiprocessors, and B read as seldom as that allows.
  const int splits = std::min(row_tiles, (396 + groups - 1) / groups);
  p.tiles = (row_tiles + splits - 1) / splits;
  const dim3 grid(groups, (row_tiles + p.tiles - 1) / p.tiles);
  const cudaStream_t stream = current_stream(d);
  switch (p.rank) {
    case 64:
      expand_kernel<T, 2><<<grid, kExpandWarps * kWarp, 0, stream>>>(p);
      break;
    case 128:
      expand_kernel<T, 4><<<grid, kExpandWarps * kWarp, 0, stream>>>(p);
      break;
    default:
      expand_kernel<T, 8><<<grid, kExpandWarps * kWarp, 0, stream>>>(p);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor lora_expand_into(const Tensor& d, const Tensor& h, const Tensor& b, int64_t end0,
                        int64_t end1, int64_t block_size) {
  const torch::stable::accelerator::DeviceGuard guard(d.get_device_index());
  if (d.size(0) == 0) return d;
  if (d.scalar_type() == ScalarType::BFloat16) {
    expand<__nv_bfloat16>(d, h, b, end0, end1, block_size);
  } else {
    expand<__half>(d, h, b, end0, end1, block_size);
  }
  return d;
}

}  // namespace
}  // namespace vllm_uno

STABLE_TORCH_LIBRARY_IMPL(vllm_uno, CUDA, m) {
  m.impl("uno_linear_skinny", TORCH_BOX(&vllm_uno::uno_linear_skinny));
  m.impl("lora_expand_", TORCH_BOX(&vllm_uno::lora_expand_into));
}
