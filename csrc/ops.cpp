// Schemas of all operators. Each kernel registers itself where it is defined.
#include <torch/csrc/stable/library.h>

// A fragment: Python code of this package may add operators to the same namespace.
STABLE_TORCH_LIBRARY_FRAGMENT(vllm_uno, m) {
  m.def("lora_shrink(Tensor x, Tensor a, int block_size) -> Tensor");
}
