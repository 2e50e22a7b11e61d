// The LoRA-A product of the draft pass. Rows come in blocks of `block_size`, a seed row first;
// only the noise rows see the adapter:
//     h[n] = x[n] @ a^T  (sums in fp32)   where n % block_size != 0
//     h[n] = 0                            where n % block_size == 0, whatever x[n] holds
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace vllm_uno {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Device-independent checks, and the output. The texts are those of vllm_uno/ops.py.
inline Tensor check_and_allocate(const Tensor& x, const Tensor& a, int64_t block_size) {
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

}  // namespace vllm_uno
