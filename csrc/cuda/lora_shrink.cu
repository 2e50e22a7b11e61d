#include "../lora_shrink.h"

#include <cstdint>
#include <limits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

namespace vllm_uno {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 4;

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T narrow(float v);
template <>
__device__ __forceinline__ float narrow<float>(float v) { return v; }
template <>
__device__ __forceinline__ __half narrow<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// 16 bytes of T: one load per lane.
template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T v[kSize];
};

// One warp per element of h. kAligned: both row starts lie on 16 bytes.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    lora_shrink_kernel(const T* __restrict__ x, const T* __restrict__ a, T* __restrict__ h,
                       int64_t outputs, int64_t rank, int64_t in, int64_t x_stride,
                       int64_t a_stride, int64_t block_size) {
  const int lane = threadIdx.x;
  const int64_t out = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.y;
  if (out >= outputs) return;  // whole warps leave together
  const int64_t n = out / rank;
  if (n % block_size == 0) {  // the seed row is never read: it may hold NaN
    if (lane == 0) h[out] = narrow<T>(0.0F);
    return;
  }
  const T* xr = x + n * x_stride;
  const T* ar = a + (out % rank) * a_stride;
  float sum = 0.0F;
  int64_t done = 0;
  if constexpr (kAligned) {
    using P = Pack<T>;
    const int64_t packs = in / P::kSize;
    for (int64_t k = lane; k < packs; k += kWarp) {
      const P xv = reinterpret_cast<const P*>(xr)[k];
      const P av = reinterpret_cast<const P*>(ar)[k];
#pragma unroll
      for (int i = 0; i < P::kSize; ++i) sum = fmaf(widen(xv.v[i]), widen(av.v[i]), sum);
    }
    done = packs * P::kSize;
  }
  for (int64_t k = done + lane; k < in; k += kWarp) sum = fmaf(widen(xr[k]), widen(ar[k]), sum);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(0xffffffffU, sum, offset);
  }
  if (lane == 0) h[out] = narrow<T>(sum);
}

template <typename T>
bool rows_aligned(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0 &&
         (t.stride(0) * static_cast<int64_t>(sizeof(T))) % 16 == 0;
}

template <typename T>
void launch(const Tensor& x, const Tensor& a, int64_t block_size, const Tensor& h,
            cudaStream_t stream) {
  const int64_t outputs = x.size(0) * a.size(0);
  if (outputs == 0) return;  // an empty grid is a launch error
  const int64_t blocks = (outputs + kWarpsPerBlock - 1) / kWarpsPerBlock;
  STD_TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(),
                  "lora_shrink: too many outputs for one launch: ", outputs);
  const auto kernel = rows_aligned<T>(x) && rows_aligned<T>(a) ? lora_shrink_kernel<T, true>
                                                               : lora_shrink_kernel<T, false>;
  kernel<<<static_cast<unsigned>(blocks), dim3(kWarp, kWarpsPerBlock), 0, stream>>>(
      static_cast<const T*>(x.const_data_ptr()), static_cast<const T*>(a.const_data_ptr()),
      static_cast<T*>(h.mutable_data_ptr()), outputs, a.size(0), x.size(1), x.stride(0),
      a.stride(0), block_size);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor lora_shrink_cuda(const Tensor& x, const Tensor& a, int64_t block_size) {
  Tensor h = check_and_allocate(x, a, block_size);
  const auto device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const auto s = static_cast<cudaStream_t>(stream);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      launch<float>(x, a, block_size, h, s);
      break;
    case ScalarType::BFloat16:
      launch<__nv_bfloat16>(x, a, block_size, h, s);
      break;
    default:  // the checks let nothing else through
      launch<__half>(x, a, block_size, h, s);
  }
  return h;
}

}  // namespace
}  // namespace vllm_uno

STABLE_TORCH_LIBRARY_IMPL(vllm_uno, CUDA, m) {
  m.impl("lora_shrink", TORCH_BOX(&vllm_uno::lora_shrink_cuda));
}
