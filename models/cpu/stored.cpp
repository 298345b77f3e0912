// From looked-up rows to a network's inputs, and back to the rows' gradient, on a CPU.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "lanes.h"

namespace {

using at::Tensor;

// Stored rows of a batch `[samples, fields, stored]`: `dim` columns of an embedding, one of a
// first-order weight, and padding of zeros.
struct StoredRows {
  const float* values;
  int64_t samples, fields, stored, dim;

  StoredRows(const Tensor& rows, int64_t dim_)
      : values(rows.const_data_ptr<float>()),
        samples(rows.size(0)),
        fields(rows.size(1)),
        stored(rows.size(2)),
        dim(dim_) {}
  int64_t at(int64_t n, int64_t f) const { return (n * fields + f) * stored; }
};

// Numbers of a batch `[samples, count]`; either all have a weight or none has.
struct Numbers {
  const float *values, *weights;
  int64_t count;

  Numbers(const Tensor& numbers, const std::optional<Tensor>& weights_)
      : values(numbers.const_data_ptr<float>()),
        weights(weights_ ? weights_->const_data_ptr<float>() : nullptr),
        count(numbers.size(1)) {
    TORCH_CHECK(!weights_ || weights_->numel() == count, "there must be a weight for each number");
  }
};

template <typename Value>
void join_of(const StoredRows& from, const Numbers& numbers, float scale, Value* joined,
             float* orders, float* total) {
  const int64_t dim = from.dim, count = numbers.count, width = from.fields * dim + count;
  each_block(from.samples, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      Value* to = joined + n * width;
      Lanes first, second;
      // The first-order weight follows the embedding.
      for (int64_t d = 0; d <= dim; d += LANES) {
        const Part embedding(dim - d), both(dim + 1 - d);
        Lanes sum, squares;
        for (int64_t f = 0; f < from.fields; ++f) {
          const Lanes e = both.load(from.values + from.at(n, f) + d);
          embedding.store(to + f * dim + d, e);
          sum = sum + e;
          squares = squares + e * e;
        }
        embedding.store(total + n * dim + d, sum);
        second = second + embedding.of(sum * sum - squares);
        first = first + Part::only(dim - d).of(sum);
      }
      for (int64_t k = 0; k < count; k += LANES) {
        const Part part(count - k);
        const Lanes x = part.load(numbers.values + n * count + k);
        part.store(to + from.fields * dim + k, x);
        if (numbers.weights) first = first + x * part.load(numbers.weights + k);
      }
      orders[n] = scale * first.added_up() + 0.5f * second.added_up();
    }
  });
}

// `of_weights` receives the gradient of the numbers' weights from each block of samples.
template <typename Value>
void join_backward_of(const StoredRows& from, const Numbers& numbers, float scale,
                      const Value* of_joined, const float* of_orders, const float* total,
                      float* grad, float* of_weights) {
  const int64_t dim = from.dim, count = numbers.count, width = from.fields * dim + count;
  each_block(from.samples, [&](int64_t block, int64_t begin, int64_t end) {
    float* sums = of_weights + block * count;
    std::fill_n(sums, count, 0.0f);
    for (int64_t n = begin; n < end; ++n) {
      const Lanes factor(of_orders[n]), first(scale * of_orders[n]);
      for (int64_t d = 0; d < from.stored; d += LANES) {
        const Part embedding(dim - d), row(from.stored - d);
        const Lanes sum = embedding.load(total + n * dim + d);
        const Lanes of_first = Part::only(dim - d).of(first);
        for (int64_t f = 0; f < from.fields; ++f) {
          const Lanes e = embedding.load(from.values + from.at(n, f) + d);
          const Lanes g = embedding.load(of_joined + n * width + f * dim + d);
          row.store(grad + from.at(n, f) + d, embedding.of(g + factor * (sum - e)) + of_first);
        }
      }
      for (int64_t k = 0; k < count; k += LANES) {
        const Part part(count - k);
        const Lanes x = part.load(numbers.values + n * count + k);
        part.store(sums + k, part.load(sums + k) + first * x);
      }
    }
  });
}

// `[e_1 .. e_F, x]` of each sample, `scale * (sum_f w_f + <w, x>) + sum_{i<j} <e_i, e_j>`, and
// `sum_i e_i`.
std::tuple<Tensor, Tensor, Tensor> join(const Tensor& stored, int64_t dim, const Tensor& numbers,
                                        const std::optional<Tensor>& number_weights, double scale,
                                        bool as_bf16) {
  const StoredRows from(stored, dim);
  const Numbers given(numbers, number_weights);
  TORCH_CHECK(numbers.size(0) == from.samples, "there must be numbers for each sample");
  const int64_t width = from.fields * dim + given.count;
  Tensor joined = at::empty({from.samples, width}, as_bf16 ? at::kBFloat16 : at::kFloat);
  Tensor orders = at::empty({from.samples}, at::kFloat);
  Tensor total = at::empty({from.samples, dim}, at::kFloat);
  with_type(joined, [&](auto number) {
    join_of(from, given, scale, written<decltype(number)>(joined), written<float>(orders),
            written<float>(total));
  });
  return {joined, orders, total};
}

// The gradients of the stored rows, and of the weights of the numbers.
std::tuple<Tensor, Tensor> join_backward(const Tensor& of_joined, const Tensor& of_orders,
                                         const Tensor& stored, int64_t dim, const Tensor& total,
                                         const Tensor& numbers, double scale) {
  const StoredRows from(stored, dim);
  const Numbers given(numbers, std::nullopt);
  Tensor grad = at::empty({from.samples, from.fields, from.stored}, at::kFloat);
  Tensor sums = at::empty({(from.samples + ROWS - 1) / ROWS, given.count}, at::kFloat);
  float* each = sums.data_ptr<float>();
  with_type(of_joined, [&](auto number) {
    join_backward_of(from, given, scale, read<decltype(number)>(of_joined), read<float>(of_orders),
                     read<float>(total), written<float>(grad), each);
  });
  Tensor of_weights = at::empty({1, given.count}, at::kFloat);
  add_up(each, sums.size(0), given.count, of_weights.data_ptr<float>());
  return {grad, of_weights};
}

// The gradient of stored rows `[samples, fields, stored]` from those of their embeddings and their
// first-order weights `[samples, fields, 1]`, either of which may be expanded; padding gets 0.
Tensor stored_backward(const Tensor& of_embeddings, const Tensor& of_first_order, int64_t stored) {
  const int64_t samples = of_embeddings.size(0), fields = of_embeddings.size(1);
  const int64_t dim = of_embeddings.size(2);
  const int64_t of_sample = of_embeddings.stride(0), of_field = of_embeddings.stride(1);
  const int64_t first_of_sample = of_first_order.stride(0);
  const int64_t first_of_field = of_first_order.stride(1);
  const float *embeddings = of_embeddings.const_data_ptr<float>(),
              *firsts = of_first_order.const_data_ptr<float>();
  Tensor grad = at::empty({samples, fields, stored}, at::kFloat);
  float* out = grad.data_ptr<float>();
  each_block(samples, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t f = 0; f < fields; ++f) {
        float* to = out + (n * fields + f) * stored;
        const float* from = embeddings + n * of_sample + f * of_field;
        for (int64_t d = 0; d < stored; d += LANES)
          Part(stored - d).store(to + d, Part(std::max<int64_t>(dim - d, 0)).load(from + d));
        to[dim] = firsts[n * first_of_sample + f * first_of_field];
      }
  });
  return grad;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede_dense, library) {
  library.def("join", &join);
  library.def("join_backward", &join_backward);
  library.def("stored_backward", &stored_backward);
}
