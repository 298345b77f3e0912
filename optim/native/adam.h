// Adam's step, and rows of weights with their moments.
#pragma once

#include <cmath>

#include "lookup.h"

namespace {

// Rows to prefetch ahead.
constexpr int64_t AHEAD = 8;
// Rows that a thread takes at a time.
constexpr int64_t ROWS = 1024;

// One Adam step: `alpha = lr * sqrt(1-b2^t) / (1-b1^t)`, `w = keep*w - alpha * m / (sqrt(v)+eps)`.
struct Step {
  float alpha, eps, keep;
};

struct Betas {
  float one, two, rest_one, rest_two;
  Betas(double b1, double b2)
      : one(b1), two(b2), rest_one(1.0 - b1), rest_two(1.0 - b2) {}
};

inline void adam(float& w, float& m, float& v, float g, const Betas& betas, const Step& step) {
  m = fma(betas.one, m, betas.rest_one * g);
  v = fma(betas.two, v, betas.rest_two * g * g);
  w = fma(step.keep, w, -(step.alpha * m / (std::sqrt(v) + step.eps)));
}

struct Array {
  float *weights, *m, *v;
  int64_t rows, dim;
  Array(Tensor& weights_, Tensor& m_, Tensor& v_)
      : weights(weights_.data_ptr<float>()),
        m(m_.data_ptr<float>()),
        v(v_.data_ptr<float>()),
        rows(weights_.size(0)),
        dim(weights_.size(1)) {}
  void prefetch(int64_t row) const {
    __builtin_prefetch(weights + row * dim, 1);
    __builtin_prefetch(m + row * dim, 1);
    __builtin_prefetch(v + row * dim, 1);
  }
};

inline const Step* steps_of(const Tensor& steps) {
  return reinterpret_cast<const Step*>(steps.const_data_ptr<float>());
}

}  // namespace
