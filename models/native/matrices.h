// What all kernels of dense layers ask of the matrices they are given.
#pragma once

#include <torch/library.h>

inline void check_matrix(const at::Tensor& matrix, const char* name) {
  TORCH_CHECK(matrix.device().is_cpu() && matrix.dim() == 2 && matrix.is_contiguous(), name,
              " must be contiguous [rows, columns] on the CPU");
  TORCH_CHECK(matrix.scalar_type() == at::kFloat || matrix.scalar_type() == at::kBFloat16, name,
              " must be float32 or bfloat16, not ", matrix.scalar_type());
}
