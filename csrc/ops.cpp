// Schemas of all operators. Each kernel registers itself where it is defined.
#include <torch/csrc/stable/library.h>

// A fragment: Python code of this package may add operators to the same namespace.
STABLE_TORCH_LIBRARY_FRAGMENT(vllm_uno, m) {
  m.def("lora_shrink(Tensor x, Tensor a, int block_size) -> Tensor");
  // CUDA only; vllm_uno/lora_kernels.py has the rest.
  m.def(
      "lora_expand_(Tensor(a!) d, Tensor h, Tensor b, int end0, int end1, int block_size) -> "
      "Tensor(a!)");
}
