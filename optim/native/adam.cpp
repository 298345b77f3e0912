// Adam with L2 and decay on a CPU, for the rows of a batch.
#include <ATen/ops/empty.h>

#include <cmath>
#include <tuple>

#include "adam.h"

namespace {

// Gradients with the L2 term, and `[3, n]` squared norms: of the gradient over the clipped columns,
// over the others, of the weights over the clipped columns.
std::tuple<Tensor, Tensor> measure_rows(const Tensor& weights, const Tensor& rows,
                                        const Tensor& grads, int64_t clipped, double l2) {
  const int64_t n = rows.numel(), dim = weights.size(1);
  Tensor decayed = at::empty({n, dim}, at::kFloat), squares = at::empty({3, n}, at::kFloat);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  const float *all = weights.const_data_ptr<float>(), *given = grads.const_data_ptr<float>();
  const float decay = 2.0 * l2;
  float *grad = decayed.data_ptr<float>(), *out = squares.data_ptr<float>();
  in_blocks(n, ROWS, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + AHEAD < end) __builtin_prefetch(all + row[k + AHEAD] * dim);
      const float *w = all + row[k] * dim, *from = given + k * dim;
      float* g = grad + k * dim;
      float of_grad = 0, of_rest = 0, of_weight = 0;
      for (int64_t d = 0; d < dim; ++d) g[d] = fma(decay, w[d], from[d]);
#pragma omp simd reduction(+ : of_grad, of_weight)
      for (int64_t d = 0; d < clipped; ++d) {
        of_grad += g[d] * g[d];
        of_weight += w[d] * w[d];
      }
#pragma omp simd reduction(+ : of_rest)
      for (int64_t d = clipped; d < dim; ++d) of_rest += g[d] * g[d];
      out[k] = of_grad, out[n + k] = of_rest, out[2 * n + k] = of_weight;
    }
  });
  return {decayed, squares};
}

// The largest norm of a row's gradient, `max(relative * norm of its weights, least) * count`, over
// its first `columns` columns; nothing is clipped if `columns` is 0.
struct Clip {
  int64_t columns;
  float relative, least;
};

// The factor for the clipped columns of a gradient `g`.
inline float clip_factor(const float* g, const float* w, int64_t dim, int64_t count,
                         const Clip& clip) {
  float of_grad = 0, of_weight = 0;
#pragma omp simd reduction(+ : of_grad, of_weight)
  for (int64_t d = 0; d < dim; ++d) {
    of_grad += d < clip.columns ? g[d] * g[d] : 0.0f;
    of_weight += d < clip.columns ? w[d] * w[d] : 0.0f;
  }
  // Infinity times 0 would be NaN.
  const float of_row = clip.relative > 0.0f ? clip.relative * std::sqrt(of_weight) : 0.0f;
  const float norm = std::sqrt(of_grad);
  const float most = std::max(of_row, clip.least) * static_cast<float>(std::max<int64_t>(count, 1));
  return norm > most ? most / norm : 1.0f;
}

// L2, clip and step of the rows of a batch in one pass over them; returns how many were clipped.
// `factors` for the clipped columns are computed here if they are not given.
template <int WIDTH>
int64_t clip_and_step_of(const Array& array, const int64_t* rows, int64_t n, const float* grads,
                         const int64_t* counts, const float* factors, const Clip& clip, float decay,
                         const Betas& betas, const Step& step, int32_t* at_step, int32_t now) {
  const int64_t dim = WIDTH ? WIDTH : array.dim;
  int64_t clipped = 0;
  in_blocks(n, ROWS, [&](int64_t begin, int64_t end) {
    std::vector<float> decayed(dim);
    float* g = decayed.data();
    int64_t clipped_here = 0;
    for (int64_t k = begin; k < end; ++k) {
      if (k + AHEAD < end) array.prefetch(rows[k + AHEAD]);
      const int64_t at = rows[k] * dim;
      const float* from = grads + k * dim;
      float *__restrict w = array.weights + at, *__restrict first = array.m + at,
            *__restrict second = array.v + at;
      for (int64_t d = 0; d < dim; ++d) g[d] = fma(decay, w[d], from[d]);
      const float factor = factors ? factors[k] : clip_factor(g, w, dim, counts[k], clip);
      clipped_here += factor < 1.0f;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d)
        adam(w[d], first[d], second[d], d < clip.columns ? g[d] * factor : g[d], betas, step);
      if (at_step) at_step[rows[k]] = now;
    }
    __atomic_fetch_add(&clipped, clipped_here, __ATOMIC_RELAXED);
  });
  return clipped;
}

// Where `last` is given, the rows are at `now` afterwards.
int64_t clip_and_step_rows_(Tensor weights, Tensor m, Tensor v, const Tensor& rows,
                            const Tensor& grads, const Tensor& counts,
                            const std::optional<Tensor>& factors, int64_t columns, double relative,
                            double least, double l2, const Tensor& steps, double b1, double b2,
                            std::optional<Tensor> last, int64_t now) {
  const Array array(weights, m, v);
  const Clip clip{columns, static_cast<float>(relative), static_cast<float>(least)};
  return with_width(array.dim, [&](auto width) {
    return clip_and_step_of<width.value>(
        array, rows.const_data_ptr<int64_t>(), rows.numel(), grads.const_data_ptr<float>(),
        counts.const_data_ptr<int64_t>(), factors ? factors->const_data_ptr<float>() : nullptr,
        clip, 2.0 * l2, Betas(b1, b2), *steps_of(steps),
        last ? last->data_ptr<int32_t>() : nullptr, now);
  });
}

// Whether the squared norm of each row's gradient, L2 included, is finite.
template <int WIDTH>
bool are_finite_of(const float* weights, const int64_t* rows, int64_t n, const float* grads,
                   int64_t columns, float decay) {
  const int64_t dim = WIDTH ? WIDTH : columns;
  bool finite = true;
  in_blocks(n, ROWS, [&](int64_t begin, int64_t end) {
    bool here = true;
    for (int64_t k = begin; k < end; ++k) {
      if (k + 2 * AHEAD < end) __builtin_prefetch(weights + rows[k + 2 * AHEAD] * dim);
      const float *w = weights + rows[k] * dim, *from = grads + k * dim;
      float squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t d = 0; d < dim; ++d) {
        const float g = fma(decay, w[d], from[d]);
        squares += g * g;
      }
      here &= std::isfinite(squares);
    }
    if (!here) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
  });
  return finite;
}

bool are_finite(const Tensor& weights, const Tensor& rows, const Tensor& grads, double l2) {
  return with_width(weights.size(1), [&](auto width) {
    return are_finite_of<width.value>(weights.const_data_ptr<float>(),
                                      rows.const_data_ptr<int64_t>(), rows.numel(),
                                      grads.const_data_ptr<float>(), weights.size(1), 2.0 * l2);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede, library) {
  library.def("are_finite", &are_finite);
  library.def("clip_and_step_rows_", &clip_and_step_rows_);
  library.def("measure_rows", &measure_rows);
}
