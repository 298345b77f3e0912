// DIN's unit of attention over ids that follow each other sample by sample, and its activations, in
// one pass where torch takes several. All tensors are float32, but for lengths, int64.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "lanes.h"

namespace {

using at::Tensor;

// Calls for each sample with its number and those of its first id and the one after its last.
// In blocks, one thread takes all samples of a block of ROWS.
template <bool IN_BLOCKS = false, typename Do>
void each_sample(const Tensor& lengths, int64_t ids, const Do& task) {
  const int64_t samples = lengths.size(0);
  const auto* length = lengths.const_data_ptr<int64_t>();
  std::vector<int64_t> starts(samples + 1, 0);
  std::partial_sum(length, length + samples, starts.begin() + 1);
  TORCH_CHECK(starts[samples] == ids, "lengths must add up to the number of ids");
  const auto take = [&](int64_t first, int64_t stop) {
    for (int64_t n = first; n < stop; ++n) task(n, starts[n], starts[n + 1]);
  };
  if (IN_BLOCKS)
    each_block(samples, [&](int64_t, int64_t first, int64_t stop) { take(first, stop); });
  else
    at::parallel_for(0, samples, 16, take);
}

// Adds `a @ b` to c: a `[ROWS, depth]` has steps between rows and columns, those of b and c are next
// to each other, and a multiple of LANES.
template <int COUNT>
void add_rows_of_product(const float* a, int64_t row, int64_t column, int64_t depth, const float* b,
                         int64_t columns, float* c) {
  const Part whole(LANES);
  for (int64_t j = 0; j < columns; j += LANES) {
    Lanes sums[COUNT];
#pragma GCC unroll 6
    for (int r = 0; r < COUNT; ++r) sums[r] = whole.load(c + r * columns + j);
    for (int64_t d = 0; d < depth; ++d) {
      const Lanes factor = whole.load(b + d * columns + j);
#pragma GCC unroll 6
      for (int r = 0; r < COUNT; ++r)
        sums[r] = sums[r].plus_product(Lanes(a[r * row + d * column]), factor);
    }
#pragma GCC unroll 6
    for (int r = 0; r < COUNT; ++r) whole.store(c + r * columns + j, sums[r]);
  }
}

void add_product(const float* a, int64_t rows, int64_t row, int64_t column, int64_t depth,
                 const float* b, int64_t columns, float* c) {
  // As many sums as 16 registers hold.
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6)
    add_rows_of_product<6>(a + r * row, row, column, depth, b, columns, c + r * columns);
  a += r * row, c += r * columns;
  switch (rows - r) {
    case 5: return add_rows_of_product<5>(a, row, column, depth, b, columns, c);
    case 4: return add_rows_of_product<4>(a, row, column, depth, b, columns, c);
    case 3: return add_rows_of_product<3>(a, row, column, depth, b, columns, c);
    case 2: return add_rows_of_product<2>(a, row, column, depth, b, columns, c);
    case 1: return add_rows_of_product<1>(a, row, column, depth, b, columns, c);
  }
}

// The first layer of the unit gives `k @ of_key + (q * k) @ of_product` of each id, and what depends
// on the query alone. A sample's ids have one query, so the sample has a matrix of its own,
// `of_key + q * of_product`: a product of keys alone is left.
struct FirstLayer {
  const float *queries, *keys, *of_key, *of_product;
  int64_t ids, width, dim, columns;
  // Up to whole vectors.
  int64_t wide_dim, wide_columns;

  // Both matrices are `[columns, dim]`.
  FirstLayer(const Tensor& query, const Tensor& rows, const Tensor& key, const Tensor& product)
      : queries(query.const_data_ptr<float>()),
        keys(rows.const_data_ptr<float>()),
        of_key(key.const_data_ptr<float>()),
        of_product(product.const_data_ptr<float>()),
        ids(rows.size(0)),
        width(rows.size(1)),
        dim(key.size(1)),
        columns(key.size(0)),
        wide_dim((dim + LANES - 1) / LANES * LANES),
        wide_columns((columns + LANES - 1) / LANES * LANES) {
    TORCH_CHECK(query.size(1) == dim && product.sizes() == key.sizes() && width >= dim);
  }
  // `[dim, wide_columns]` with zeros at the end.
  std::vector<float> transposed(const float* matrix) const {
    std::vector<float> found(dim * wide_columns, 0.0f);
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t c = 0; c < dim; ++c) found[c * wide_columns + j] = matrix[j * dim + c];
    return found;
  }
  // `[columns, wide_dim]` with zeros at the end.
  std::vector<float> padded(const float* matrix) const {
    std::vector<float> found(columns * wide_dim, 0.0f);
    for (int64_t j = 0; j < columns; ++j)
      std::copy_n(matrix + j * dim, dim, found.data() + j * wide_dim);
    return found;
  }
};

// `to = a + factor * b`.
inline void plus_product(const float* a, float factor, const float* b, int64_t count, float* to) {
  const Part whole(LANES);
  for (int64_t j = 0; j < count; j += LANES)
    whole.store(to + j, whole.load(a + j).plus_product(Lanes(factor), whole.load(b + j)));
}

// Ids whose vectors are in cache together.
constexpr int64_t IDS = 60;

// The outputs `[ids, columns]` of the first layer; `of_sample` `[samples, columns]` is what depends
// on the query alone.
Tensor first_layer(const Tensor& of_sample, const Tensor& query, const Tensor& rows,
                   const Tensor& of_key, const Tensor& of_product, const Tensor& lengths) {
  const FirstLayer of(query, rows, of_key, of_product);
  const int64_t columns = of.columns, wide = of.wide_columns;
  const auto key = of.transposed(of.of_key), product = of.transposed(of.of_product);
  const float* starts = of_sample.const_data_ptr<float>();
  Tensor outputs = at::empty({of.ids, columns}, at::kFloat);
  float* out = outputs.data_ptr<float>();
  each_sample(lengths, of.ids, [&](int64_t n, int64_t begin, int64_t end) {
    thread_local std::vector<float> matrix, found;
    matrix.resize(of.dim * wide), found.resize(IDS * wide);
    for (int64_t c = 0; c < of.dim; ++c)
      plus_product(key.data() + c * wide, of.queries[n * of.dim + c], product.data() + c * wide, wide,
                   matrix.data() + c * wide);
    for (int64_t first = begin; first < end; first += IDS) {
      const int64_t count = std::min(IDS, end - first);
      float* to = wide == columns ? out + first * columns : found.data();
      for (int64_t i = 0; i < count; ++i)
        std::copy_n(starts + n * columns, columns, to + i * wide);
      add_product(of.keys + first * of.width, count, of.width, 1, of.dim, matrix.data(), wide, to);
      if (wide == columns) continue;
      for (int64_t i = 0; i < count; ++i)
        std::copy_n(to + i * wide, columns, out + (first + i) * columns);
    }
  });
  return outputs;
}

// The gradients of `of_sample`, query, rows, `of_key` and `of_product`.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> first_layer_backward(
    const Tensor& grad, const Tensor& query, const Tensor& rows, const Tensor& of_key,
    const Tensor& of_product, const Tensor& lengths) {
  const FirstLayer of(query, rows, of_key, of_product);
  const int64_t columns = of.columns, wide = of.wide_columns, dim = of.dim, wide_dim = of.wide_dim;
  const int64_t samples = lengths.size(0), size = dim * wide, blocks = (samples + ROWS - 1) / ROWS;
  const auto key = of.padded(of.of_key), product = of.padded(of.of_product);
  const auto product_of_dim = of.transposed(of.of_product);
  const float* grads = grad.const_data_ptr<float>();
  Tensor of_sample = at::empty({samples, columns}, at::kFloat);
  Tensor of_query = at::empty_like(query), of_rows = at::empty_like(rows);
  // Of both matrices, in each block of samples.
  Tensor sums = at::zeros({blocks, 2, dim, wide}, at::kFloat);
  float *to_sample = of_sample.data_ptr<float>(), *to_query = of_query.data_ptr<float>(),
        *to_rows = of_rows.data_ptr<float>(), *to_sums = sums.data_ptr<float>();
  each_sample<true>(lengths, of.ids, [&](int64_t n, int64_t begin, int64_t end) {
    thread_local std::vector<float> matrix, of_matrix, given, of_keys;
    matrix.resize(columns * wide_dim), of_matrix.assign(size, 0.0f);
    if (wide != columns) given.assign(IDS * wide, 0.0f);
    of_keys.resize(IDS * wide_dim);
    const float* q = of.queries + n * dim;
    float *total = to_sample + n * columns, *of_key_sum = to_sums + n / ROWS * 2 * size;
    const Part whole(LANES);
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t c = 0; c < wide_dim; c += LANES) {
        const int64_t at = j * wide_dim + c;
        const Lanes factor = whole.load(key.data() + at);
        whole.store(matrix.data() + at, factor.plus_product(Part(dim - c).load(q + c),
                                                            whole.load(product.data() + at)));
      }
    std::fill_n(total, columns, 0.0f);
    for (int64_t first = begin; first < end; first += IDS) {
      const int64_t count = std::min(IDS, end - first);
      const float *k = of.keys + first * of.width, *g = grads + first * columns;
      if (wide != columns) {
        for (int64_t i = 0; i < count; ++i)
          std::copy_n(g + i * columns, columns, given.data() + i * wide);
        g = given.data();
      }
      for (int64_t j = 0; j < columns; j += LANES) {
        const Part part(columns - j);
        Lanes sum = part.load(total + j);
        for (int64_t i = 0; i < count; ++i) sum = sum + whole.load(g + i * wide + j);
        part.store(total + j, sum);
      }
      std::fill(of_keys.begin(), of_keys.end(), 0.0f);
      add_product(g, count, wide, 1, columns, matrix.data(), wide_dim, of_keys.data());
      for (int64_t i = 0; i < count; ++i) {
        float* to = to_rows + (first + i) * of.width;
        std::copy_n(of_keys.data() + i * wide_dim, dim, to);
        std::fill(to + dim, to + of.width, 0.0f);
      }
      add_product(k, dim, 1, of.width, count, g, wide, of_matrix.data());
    }
    for (int64_t c = 0; c < dim; ++c) {
      const float* mine = of_matrix.data() + c * wide;
      Lanes sum;
      for (int64_t j = 0; j < wide; j += LANES)
        sum = sum.plus_product(whole.load(mine + j),
                               whole.load(product_of_dim.data() + c * wide + j));
      to_query[n * dim + c] = sum.added_up();
      float* to = of_key_sum + c * wide;
      plus_product(to, 1.0f, mine, wide, to);
      plus_product(to + size, q[c], mine, wide, to + size);
    }
  });
  const Tensor total = sums.sum(0).narrow(2, 0, columns).transpose(1, 2);
  return {of_sample, of_query, of_rows, total[0].contiguous(), total[1].contiguous()};
}

// The sum of each sample's rows, each times its weight.
Tensor weighted_sums(const Tensor& weights, const Tensor& rows, const Tensor& lengths) {
  const int64_t ids = rows.size(0), width = rows.size(1);
  const float *of_id = weights.const_data_ptr<float>(), *values = rows.const_data_ptr<float>();
  Tensor sums = at::empty({lengths.size(0), width}, at::kFloat);
  float* out = sums.data_ptr<float>();
  each_sample(lengths, ids, [&](int64_t n, int64_t begin, int64_t end) {
    float* __restrict sum = out + n * width;
    std::fill_n(sum, width, 0.0f);
    for (int64_t id = begin; id < end; ++id)
      for (int64_t c = 0; c < width; ++c) sum[c] += of_id[id] * values[id * width + c];
  });
  return sums;
}

// The gradients of weights and rows.
std::tuple<Tensor, Tensor> weighted_sums_backward(const Tensor& grad, const Tensor& weights,
                                                  const Tensor& rows, const Tensor& lengths) {
  const int64_t ids = rows.size(0), width = rows.size(1);
  const float *of_id = weights.const_data_ptr<float>(), *values = rows.const_data_ptr<float>(),
              *grads = grad.const_data_ptr<float>();
  Tensor of_weights = at::empty_like(weights), of_rows = at::empty_like(rows);
  float *to_weights = of_weights.data_ptr<float>(), *to_rows = of_rows.data_ptr<float>();
  each_sample(lengths, ids, [&](int64_t n, int64_t begin, int64_t end) {
    for (int64_t id = begin; id < end; ++id) {
      Lanes sum;
      for (int64_t c = 0; c < width; c += LANES) {
        const Part part(width - c);
        const Lanes g = part.load(grads + n * width + c);
        sum = sum + g * part.load(values + id * width + c);
        part.store(to_rows + id * width + c, g * Lanes(of_id[id]));
      }
      to_weights[id] = sum.added_up();
    }
  });
  return {of_weights, of_rows};
}

// Without branches, for vectors. exp(-x) by Cephes' expf: 2^n * exp(r), |r| <= log(2) / 2.
inline float sigmoid(float x) {
  const float y = std::min(std::max(-x, -87.0f), 87.0f);
  // Adding 1.5 * 2^23 rounds to a whole number.
  const float n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  float e = 1.9875691500e-4f;
  e = e * r + 1.3981999507e-3f;
  e = e * r + 8.3334519073e-3f;
  e = e * r + 4.1665795894e-2f;
  e = e * r + 1.6666665459e-1f;
  e = e * r + 5.0000001201e-1f;
  e = e * r * r + r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return 1.0f / (1.0f + e * power);
}

// Of each column of Dice's values: mean, 1 / standard deviation, and the learned slope.
struct Columns {
  const float *mean, *scale, *alpha;
  int64_t count;
  Columns(const Tensor& mean_, const Tensor& scale_, const Tensor& alpha_)
      : mean(mean_.const_data_ptr<float>()),
        scale(scale_.const_data_ptr<float>()),
        alpha(alpha_.const_data_ptr<float>()),
        count(alpha_.numel()) {}
};

// `p * x + (1 - p) * alpha * x` with `p = sigmoid((x - mean) * scale)`; with `output` `[1, columns]`,
// its products with each row instead, `[rows, 1]`, which saves passes over wide tensors.
Tensor dice(const Tensor& values, const Tensor& mean, const Tensor& scale, const Tensor& alpha,
            const std::optional<Tensor>& output) {
  const Columns of(mean, scale, alpha);
  const float* all = values.const_data_ptr<float>();
  const float* weights = output ? output->const_data_ptr<float>() : nullptr;
  Tensor outputs = output ? at::empty({values.size(0), 1}, at::kFloat) : at::empty_like(values);
  float* out = outputs.data_ptr<float>();
  each_block(values.size(0), [&](int64_t, int64_t begin, int64_t end) {
    std::vector<float> kept(of.count);
    for (int64_t row = begin; row < end; ++row) {
      const float* x = all + row * of.count;
      float* __restrict y = weights ? kept.data() : out + row * of.count;
      for (int64_t c = 0; c < of.count; ++c) {
        const float p = sigmoid((x[c] - of.mean[c]) * of.scale[c]);
        y[c] = x[c] * (of.alpha[c] + (1.0f - of.alpha[c]) * p);
      }
      if (!weights) continue;
      Lanes sum;
      for (int64_t c = 0; c < of.count; c += LANES) {
        const Part part(of.count - c);
        sum = sum + part.load(y + c) * part.load(weights + c);
      }
      out[row] = sum.added_up();
    }
  });
  return outputs;
}

// Adds a row to the sums. A function of its own, as GCC minds `restrict` of parameters alone.
[[gnu::noinline]] void add_to_sums(const float* __restrict g, const float* __restrict x,
                                   const Columns& of, float of_row, float* __restrict of_normal,
                                   float* __restrict of_product, float* __restrict of_slope,
                                   float* __restrict of_output) {
  const float *__restrict mean = of.mean, *__restrict scale = of.scale, *__restrict alpha = of.alpha;
  for (int64_t c = 0; c < of.count; ++c) {
    const float u = (x[c] - mean[c]) * scale[c], p = sigmoid(u);
    const float of_alpha = g[c] * x[c] * (1.0f - p), of_u = of_alpha * p * (1.0f - alpha[c]);
    of_normal[c] += of_u;
    of_product[c] += of_u * u;
    of_slope[c] += of_alpha;
    of_output[c] += of_row * x[c] * (alpha[c] + (1.0f - alpha[c]) * p);
  }
}

// Rows of the gradient of Dice: those given, or that of the products with an output.
struct Gradient {
  const float *values, *weights;
  int64_t count;
  Gradient(const Tensor& grad, const std::optional<Tensor>& output, int64_t count_)
      : values(grad.const_data_ptr<float>()),
        weights(output ? output->const_data_ptr<float>() : nullptr),
        count(count_) {}
  float of_row(int64_t row) const { return weights ? values[row] : 0.0f; }
  // In `room`, if it is not stored.
  const float* at(int64_t row, std::vector<float>& room) const {
    if (!weights) return values + row * count;
    float* __restrict found = room.data();
    for (int64_t c = 0; c < count; ++c) found[c] = values[row] * weights[c];
    return found;
  }
};

// Sums over the rows, `[4, columns]`: of the gradient of the normalized values u, of it times u, of
// the gradient of alpha, and of that of the output.
Tensor dice_sums(const Tensor& grad, const Tensor& values, const Tensor& mean, const Tensor& scale,
                 const Tensor& alpha, const std::optional<Tensor>& output) {
  const Columns of(mean, scale, alpha);
  const int64_t rows = values.size(0), count = of.count;
  const float* all = values.const_data_ptr<float>();
  const Gradient gradient(grad, output, count);
  Tensor sums = at::empty({(rows + ROWS - 1) / ROWS, 4, count}, at::kFloat);
  float* out = sums.data_ptr<float>();
  each_block(rows, [&](int64_t block, int64_t begin, int64_t end) {
    std::vector<float> room(count);
    float* sum = out + block * 4 * count;
    std::fill_n(sum, 4 * count, 0.0f);
    for (int64_t row = begin; row < end; ++row)
      add_to_sums(gradient.at(row, room), all + row * count, of, gradient.of_row(row), sum,
                  sum + count, sum + 2 * count, sum + 3 * count);
  });
  return sums.sum(0);
}

// The gradient of the values; `means` `[2, columns]` are the first two sums over the number of rows.
Tensor dice_backward(const Tensor& grad, const Tensor& values, const Tensor& mean,
                     const Tensor& scale, const Tensor& alpha,
                     const std::optional<Tensor>& output, const Tensor& means) {
  const Columns of(mean, scale, alpha);
  const int64_t count = of.count;
  const Gradient gradient(grad, output, count);
  const float *all = values.const_data_ptr<float>(), *first = means.const_data_ptr<float>(),
              *second = first + count;
  Tensor of_values = at::empty_like(values);
  float* out = of_values.data_ptr<float>();
  each_block(values.size(0), [&](int64_t, int64_t begin, int64_t end) {
    std::vector<float> room(count);
    for (int64_t row = begin; row < end; ++row) {
      const float *x = all + row * count, *g = gradient.at(row, room);
      float* __restrict to = out + row * count;
      for (int64_t c = 0; c < count; ++c) {
        const float u = (x[c] - of.mean[c]) * of.scale[c], p = sigmoid(u);
        const float slope = 1.0f - of.alpha[c];
        const float of_u = g[c] * x[c] * slope * p * (1.0f - p);
        to[c] = g[c] * (of.alpha[c] + slope * p) +
                of.scale[c] * (of_u - first[c] - u * second[c]);
      }
    }
  });
  return of_values;
}

// See `add_to_sums`.
[[gnu::noinline]] void prelu_row(const float* __restrict g, const float* __restrict x,
                                 const float* __restrict slopes, int64_t count,
                                 float* __restrict to, float* __restrict of_slopes) {
  for (int64_t c = 0; c < count; ++c) {
    const float above = x[c] > 0.0f ? 1.0f : slopes[c];
    to[c] = g[c] * above;
    of_slopes[c] += g[c] * std::min(x[c], 0.0f);
  }
}

// The gradients of values and slopes of `max(x, 0) + alpha * min(x, 0)`.
std::tuple<Tensor, Tensor> prelu_backward(const Tensor& grad, const Tensor& values,
                                          const Tensor& alpha) {
  const int64_t rows = values.size(0), count = alpha.numel();
  const float *all = values.const_data_ptr<float>(), *grads = grad.const_data_ptr<float>(),
              *slopes = alpha.const_data_ptr<float>();
  Tensor of_values = at::empty_like(values);
  Tensor sums = at::empty({(rows + ROWS - 1) / ROWS, count}, at::kFloat);
  float *out = of_values.data_ptr<float>(), *all_sums = sums.data_ptr<float>();
  each_block(rows, [&](int64_t block, int64_t begin, int64_t end) {
    float* sum = all_sums + block * count;
    std::fill_n(sum, count, 0.0f);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * count;
      prelu_row(grads + at, all + at, slopes, count, out + at, sum);
    }
  });
  return {of_values, sums.sum(0)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede_dense, library) {
  library.def("first_layer", &first_layer);
  library.def("first_layer_backward", &first_layer_backward);
  library.def("weighted_sums", &weighted_sums);
  library.def("weighted_sums_backward", &weighted_sums_backward);
  library.def("dice", &dice);
  library.def("dice_sums", &dice_sums);
  library.def("dice_backward", &dice_backward);
  library.def("prelu_backward", &prelu_backward);
}
