// The B side of a row-gated LoRA on packed linear layers, all slices in one pass:
//
//     d[n] = gate(n) h[n] B^T,   h[n] = x[n] A^T,   gate(n) = n % block_size != 0
//
// h [M, S * R]; B [N, R]; d [M, N]. The N columns fall into S <= 3 slices (q, k and v; gate and up)
// that end at ends[0], ends[1] and N; the columns of slice s use columns s R ... (s + 1) R - 1 of h.
// bf16 or fp16, sums in fp32, h rounded to x's dtype.
//
// The order of K within a product is free, so that each thread reads 16 contiguous bytes of a row
// and feeds them to two products as they are: nothing goes through shared memory.
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

template <typename T>
struct Traits;
template <>
struct Traits<__nv_bfloat16> {
  static __device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
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
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// Two products over 32 elements of K. `top`, `bottom`: 16 bytes of h's rows g and g + 8; `column`:
// 16 bytes of the row of B that makes column g, at the same K.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& top, const uint4& bottom,
                                         const uint4& column) {
  const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y};
  const uint32_t second[4] = {top.z, bottom.z, top.w, bottom.w};
  Traits<T>::mma(c, first, column.x, column.y);
  Traits<T>::mma(c, second, column.z, column.w);
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

// Arguments are checked by vllm_uno/lora_kernels.py, which picks the shapes that the kernel takes.
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
  m.impl("lora_expand_", TORCH_BOX(&vllm_uno::lora_expand_into));
}
