// The LoRA-A product of the draft pass. Rows come in blocks of `block_size`, a seed row first;
// only the noise rows see the adapter:
//     h[n] = x[n] @ a^T  (sums in fp32)   where n % block_size != 0
//     h[n] = 0                            where n % block_size == 0, whatever x[n] holds
#include <algorithm>
#include <cstring>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

// Wheels are built for the oldest x86-64; the wider units are chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define UNO_CPU_CLONES __attribute__((target_clones("default", "arch=haswell")))
#else
#define UNO_CPU_CLONES
#endif

namespace vllm_uno {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Checks, and the output. The texts are those of vllm_uno/ops.py.
Tensor check_and_allocate(const Tensor& x, const Tensor& a, int64_t block_size) {
  STD_TORCH_CHECK(x.dim() == 2, "lora_shrink: x must be [rows, in], got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(a.dim() == 2, "lora_shrink: a must be [rank, in], got ", a.dim(), " dimensions");
  STD_TORCH_CHECK(x.size(1) == a.size(1), "lora_shrink: x has ", x.size(1),
                  " columns, but a has ", a.size(1));
  const auto dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Half,
                  "lora_shrink: x must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(a.scalar_type() == dtype, "lora_shrink: x and a must have the same dtype");
  STD_TORCH_CHECK(x.device() == a.device(), "lora_shrink: x and a must be on the same device");
  STD_TORCH_CHECK((x.stride(1) == 1 || x.size(1) <= 1) && (a.stride(1) == 1 || a.size(1) <= 1),
                  "lora_shrink: x and a must be contiguous in their last dimension");
  STD_TORCH_CHECK(block_size >= 1, "lora_shrink: block_size must be at least 1, got ", block_size);
  return torch::stable::new_empty(x, {x.size(0), a.size(0)});
}

// A tile of 4 x 2 sums is what 16 vector registers hold beside the operands; with fewer sums a
// load limits each multiply-add.
constexpr int64_t kLanes = 8, kTileRows = 4, kTileRank = 2;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

// sums[i][j] = x[i] . a[j]; rows are `n` apart, n a multiple of kLanes.
UNO_CPU_CLONES void dot_tile(const float* x, const float* a, int64_t n,
                             float (&sums)[kTileRows][kTileRank]) {
  Lanes acc[kTileRows][kTileRank] = {};
  for (int64_t k = 0; k < n; k += kLanes) {
    Lanes av[kTileRank];
    for (int64_t j = 0; j < kTileRank; ++j) std::memcpy(&av[j], a + j * n + k, sizeof(Lanes));
    for (int64_t i = 0; i < kTileRows; ++i) {
      Lanes xv;
      std::memcpy(&xv, x + i * n + k, sizeof(Lanes));
      for (int64_t j = 0; j < kTileRank; ++j) acc[i][j] += xv * av[j];
    }
  }
  for (int64_t i = 0; i < kTileRows; ++i) {
    for (int64_t j = 0; j < kTileRank; ++j) {
      float sum = 0.0F;
      for (int64_t l = 0; l < kLanes; ++l) sum += acc[i][j][l];
      sums[i][j] = sum;
    }
  }
}

template <typename T>
void widen(const T* from, float* to, int64_t n) {
  for (int64_t k = 0; k < n; ++k) to[k] = static_cast<float>(from[k]);
}

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <typename T>
void shrink(const Tensor& x, const Tensor& a, int64_t block_size, const Tensor& h) {
  const int64_t rows = x.size(0), in = x.size(1), rank = a.size(0);
  const int64_t x_stride = x.stride(0), a_stride = a.stride(0);
  const T* xp = static_cast<const T*>(x.const_data_ptr());
  const T* ap = static_cast<const T*>(a.const_data_ptr());
  T* hp = static_cast<T*>(h.mutable_data_ptr());

  std::vector<int64_t> noise;
  for (int64_t n = 0; n < rows; ++n) {
    if (n % block_size != 0) {
      noise.push_back(n);
    } else {  // never read: it may hold NaN
      std::fill_n(hp + n * rank, rank, static_cast<T>(0.0F));
    }
  }
  const int64_t count = static_cast<int64_t>(noise.size());
  if (count == 0 || rank == 0) return;
  // The noise rows as float32, filled up with zeros to whole tiles.
  const int64_t width = round_up(in, kLanes);
  std::vector<float> wide(round_up(count, kTileRows) * width);
  for (int64_t i = 0; i < count; ++i) widen(xp + noise[i] * x_stride, wide.data() + i * width, in);

  const int64_t pairs = (rank + kTileRank - 1) / kTileRank;
  // At least 4M multiply-adds a thread (some 0.4 ms): on a busy machine the wait for a thread that
  // was not scheduled takes milliseconds.
  const int64_t grain =
      std::max<int64_t>(1, 4'000'000 / std::max<int64_t>(1, count * width * kTileRank));
  torch::stable::parallel_for(0, pairs, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> adapter(kTileRank * width);
    float sums[kTileRows][kTileRank];
    for (int64_t r = begin * kTileRank; r < end * kTileRank; r += kTileRank) {
      const int64_t r_here = std::min(kTileRank, rank - r);  // a lone last row: the other's unused
      for (int64_t j = 0; j < r_here; ++j) {
        widen(ap + (r + j) * a_stride, adapter.data() + j * width, in);
      }
      for (int64_t i0 = 0; i0 < count; i0 += kTileRows) {
        dot_tile(wide.data() + i0 * width, adapter.data(), width, sums);
        for (int64_t i = 0; i < std::min(kTileRows, count - i0); ++i) {
          for (int64_t j = 0; j < r_here; ++j) {
            hp[noise[i0 + i] * rank + r + j] = static_cast<T>(sums[i][j]);
          }
        }
      }
    }
  });
}

Tensor lora_shrink_cpu(const Tensor& x, const Tensor& a, int64_t block_size) {
  Tensor h = check_and_allocate(x, a, block_size);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      shrink<float>(x, a, block_size, h);
      break;
    case ScalarType::BFloat16:
      shrink<c10::BFloat16>(x, a, block_size, h);
      break;
    default:  // the checks let nothing else through
      shrink<c10::Half>(x, a, block_size, h);
  }
  return h;
}

}  // namespace
}  // namespace vllm_uno

STABLE_TORCH_LIBRARY_IMPL(vllm_uno, CPU, m) {
  m.impl("lora_shrink", TORCH_BOX(&vllm_uno::lora_shrink_cpu));
}
