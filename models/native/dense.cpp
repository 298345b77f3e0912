// Passes over the activations of the dense layers on a CPU that torch takes several for.
//
// Sums over samples are the same for any number of threads: each block of rows has a sum of its
// own, and these are added in order.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <tuple>

#include "matrices.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#endif

namespace {

using at::Tensor;

// Rows that a thread takes at a time.
constexpr int64_t ROWS = 64;

inline float as_float(float value) { return value; }
inline float as_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline void rounded_to(float& to, float value) { to = value; }
// To the nearest bfloat16, of two as near to the even one.
inline void rounded_to(uint16_t& to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to = value != value ? 0x7fc0 : nearest;
}

template <typename Do>
void each_block(int64_t rows, const Do& task) {
  at::parallel_for(0, (rows + ROWS - 1) / ROWS, 1, [&](int64_t first, int64_t stop) {
    for (int64_t block = first; block < stop; ++block)
      task(block, block * ROWS, std::min((block + 1) * ROWS, rows));
  });
}

// The sums of blocks, in order.
void add_up(const float* sums, int64_t blocks, int64_t columns, float* sum) {
  std::fill(sum, sum + columns, 0.0f);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t c = 0; c < columns; ++c) sum[c] += sums[block * columns + c];
}

template <typename Value>
void relu_backward_of(const Value* grad, const Value* output, int64_t rows, int64_t columns,
                      Value* masked, float* sums, float* sum) {
  each_block(rows, [&](int64_t block, int64_t begin, int64_t end) {
    float* mine = sums + block * columns;
    std::fill(mine, mine + columns, 0.0f);
    for (int64_t row = begin; row < end; ++row) {
      const Value *g = grad + row * columns, *y = output + row * columns;
      Value* to = masked + row * columns;
      for (int64_t c = 0; c < columns; ++c) {
        const Value kept = as_float(y[c]) <= 0.0f ? Value(0) : g[c];
        to[c] = kept;
        mine[c] += as_float(kept);
      }
    }
  });
  add_up(sums, (rows + ROWS - 1) / ROWS, columns, sum);
}

// Of `y = relu(z)` the gradient of z, and its float32 sum over the rows. It is written into y where
// that is asked for.
std::tuple<Tensor, Tensor> relu_backward(const Tensor& grad, const Tensor& output,
                                         bool into_output) {
  check_matrix(grad, "the gradient");
  check_matrix(output, "the output");
  TORCH_CHECK(grad.sizes() == output.sizes() && grad.scalar_type() == output.scalar_type(),
              "the gradient must be like the output");
  const int64_t rows = grad.size(0), columns = grad.size(1);
  Tensor masked = into_output ? output : at::empty_like(grad);
  Tensor sum = at::empty({columns}, at::kFloat);
  Tensor sums = at::empty({(rows + ROWS - 1) / ROWS, columns}, at::kFloat);
  float *all = sums.data_ptr<float>(), *out = sum.data_ptr<float>();
  if (grad.scalar_type() == at::kFloat)
    relu_backward_of(grad.const_data_ptr<float>(), output.const_data_ptr<float>(), rows, columns,
                     masked.data_ptr<float>(), all, out);
  else
    relu_backward_of(static_cast<const uint16_t*>(grad.const_data_ptr()),
                     static_cast<const uint16_t*>(output.const_data_ptr()), rows, columns,
                     static_cast<uint16_t*>(masked.data_ptr()), all, out);
  return {masked, sum};
}

// ReLU in place, of bfloat16: torch's takes several times as long. NaN stays NaN.
void relu_(Tensor values) {
  TORCH_CHECK(values.scalar_type() == at::kBFloat16 && values.is_contiguous(),
              "the values must be contiguous bfloat16");
  auto* all = static_cast<uint16_t*>(values.data_ptr());
  at::parallel_for(0, values.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint16_t bits = all[i];
      // From minus zero to minus infinity.
      all[i] = bits >= 0x8000 && bits <= 0xff80 ? 0 : bits;
    }
  });
}

// Neighbouring numbers that are computed with together, and those of them that are in memory.
constexpr int64_t LANES = 16;

#if defined(__AVX512BW__) && defined(__AVX512VL__)
struct Lanes {
  __m512 values;
  Lanes() : values(_mm512_setzero_ps()) {}
  explicit Lanes(float value) : values(_mm512_set1_ps(value)) {}
  explicit Lanes(__m512 given) : values(given) {}
  Lanes operator+(Lanes b) const { return Lanes(_mm512_add_ps(values, b.values)); }
  Lanes operator-(Lanes b) const { return Lanes(_mm512_sub_ps(values, b.values)); }
  Lanes operator*(Lanes b) const { return Lanes(_mm512_mul_ps(values, b.values)); }
  // 0 where the other is at most 0.
  Lanes where_above_0(Lanes b) const {
    const __mmask16 kept = _mm512_cmp_ps_mask(b.values, _mm512_setzero_ps(), _CMP_NLE_UQ);
    return Lanes(_mm512_maskz_mov_ps(kept, values));
  }
  float added_up() const { return _mm512_reduce_add_ps(values); }
};

struct Part {
  __mmask16 mask;
  explicit Part(int64_t count)
      : mask(count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1) {}
  static Part only(int64_t lane) {
    Part part(0);
    if (0 <= lane && lane < LANES) part.mask = 1u << lane;
    return part;
  }
  // 0 in the other lanes.
  Lanes of(Lanes lanes) const { return Lanes(_mm512_maskz_mov_ps(mask, lanes.values)); }
  Lanes load(const float* from) const { return Lanes(_mm512_maskz_loadu_ps(mask, from)); }
  Lanes load(const uint16_t* from) const {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return Lanes(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
  }
  void store(float* to, Lanes lanes) const { _mm512_mask_storeu_ps(to, mask, lanes.values); }
  // As `rounded_to`.
  void store(uint16_t* to, Lanes lanes) const {
    const __m512i bits = _mm512_castps_si512(lanes.values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    nearest = _mm512_srli_epi32(nearest, 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(lanes.values, lanes.values, _CMP_UNORD_Q);
    nearest = _mm512_mask_mov_epi32(nearest, is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(nearest));
  }
};
#else
struct Lanes {
  float values[LANES] = {};
  Lanes() = default;
  explicit Lanes(float value) { std::fill_n(values, LANES, value); }
  Lanes operator+(const Lanes& b) const { return each(b, [](float x, float y) { return x + y; }); }
  Lanes operator-(const Lanes& b) const { return each(b, [](float x, float y) { return x - y; }); }
  Lanes operator*(const Lanes& b) const { return each(b, [](float x, float y) { return x * y; }); }
  template <typename Do>
  Lanes each(const Lanes& b, const Do& compute) const {
    Lanes found;
    for (int64_t k = 0; k < LANES; ++k) found.values[k] = compute(values[k], b.values[k]);
    return found;
  }
  Lanes where_above_0(const Lanes& b) const {
    return each(b, [](float x, float y) { return y <= 0.0f ? 0.0f : x; });
  }
  float added_up() const { return std::accumulate(values, values + LANES, 0.0f); }
};

struct Part {
  int64_t first = 0, stop;
  explicit Part(int64_t count) : stop(std::clamp<int64_t>(count, 0, LANES)) {}
  static Part only(int64_t lane) {
    Part part(0 <= lane && lane < LANES ? lane + 1 : 0);
    part.first = std::max<int64_t>(part.stop - 1, 0);
    return part;
  }
  // 0 in the other lanes.
  Lanes of(const Lanes& lanes) const { return load(lanes.values); }
  template <typename Value>
  Lanes load(const Value* from) const {
    Lanes lanes;
    for (int64_t k = first; k < stop; ++k) lanes.values[k] = as_float(from[k]);
    return lanes;
  }
  template <typename Value>
  void store(Value* to, const Lanes& lanes) const {
    for (int64_t k = first; k < stop; ++k) rounded_to(to[k], lanes.values[k]);
  }
};
#endif

// Embeddings as they lie in the rows of a lookup.
struct Embeddings {
  const float* values;
  int64_t samples, fields, dim, of_sample, of_field;

  explicit Embeddings(const Tensor& whole)
      : values(whole.const_data_ptr<float>()),
        samples(whole.size(0)),
        fields(whole.size(1)),
        dim(whole.size(2)),
        of_sample(whole.stride(0)),
        of_field(whole.stride(1)) {
    TORCH_CHECK(whole.stride(2) == 1 || dim == 1, "embeddings must have contiguous columns");
  }
};

// Stored rows of a batch `[samples, fields, stored]`: `dim` columns of an embedding, one of a
// first-order weight, and others that are zero.
struct StoredRows {
  const float* values;
  int64_t samples, fields, stored, dim;

  StoredRows(const Tensor& rows, int64_t dim_)
      : values(rows.const_data_ptr<float>()),
        samples(rows.size(0)),
        fields(rows.size(1)),
        stored(rows.size(2)),
        dim(dim_) {
    TORCH_CHECK(rows.is_contiguous() && dim < stored,
                "stored rows must be contiguous and have room for a first-order weight");
  }
  int64_t at(int64_t n, int64_t f) const { return (n * fields + f) * stored; }
};

// Numbers of a batch `[samples, count]`, with a weight each or none.
struct Numbers {
  const float *values, *weights;
  int64_t count;

  Numbers(const Tensor& numbers, const std::optional<Tensor>& weights_)
      : values(numbers.const_data_ptr<float>()),
        weights(weights_ ? weights_->const_data_ptr<float>() : nullptr),
        count(numbers.size(1)) {
    TORCH_CHECK(numbers.is_contiguous(), "numbers must be contiguous");
    TORCH_CHECK(!weights_ || (weights_->is_contiguous() && weights_->numel() == count),
                "there must be a weight for each number");
  }
};

template <typename Value>
void join_of(const StoredRows& from, const Numbers& numbers, Value* joined, float* orders,
             float* total) {
  const int64_t dim = from.dim, count = numbers.count, width = from.fields * dim + count;
  each_block(from.samples, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      Value* to = joined + n * width;
      Lanes first, second;
      // The first-order weight is in the lane after those of the embedding.
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
      orders[n] = first.added_up() + 0.5f * second.added_up();
    }
  });
}

// `of_weights` are the gradients of the numbers' weights, for each block of samples.
template <typename Value>
void join_backward_of(const StoredRows& from, const Numbers& numbers, const Value* of_joined,
                      const float* of_orders, const float* total, float* grad,
                      float* of_weights) {
  const int64_t dim = from.dim, count = numbers.count, width = from.fields * dim + count;
  each_block(from.samples, [&](int64_t block, int64_t begin, int64_t end) {
    float* sums = of_weights + block * count;
    std::fill_n(sums, count, 0.0f);
    for (int64_t n = begin; n < end; ++n) {
      const Lanes factor(of_orders[n]);
      for (int64_t d = 0; d < from.stored; d += LANES) {
        const Part embedding(dim - d), row(from.stored - d);
        const Lanes sum = embedding.load(total + n * dim + d);
        const Lanes of_first = Part::only(dim - d).of(factor);
        for (int64_t f = 0; f < from.fields; ++f) {
          const Lanes e = embedding.load(from.values + from.at(n, f) + d);
          const Lanes g = embedding.load(of_joined + n * width + f * dim + d);
          row.store(grad + from.at(n, f) + d, embedding.of(g + factor * (sum - e)) + of_first);
        }
      }
      for (int64_t k = 0; k < count; k += LANES) {
        const Part part(count - k);
        const Lanes x = part.load(numbers.values + n * count + k);
        part.store(sums + k, part.load(sums + k) + factor * x);
      }
    }
  });
}

template <typename Value>
void single_output_of(const Value* inputs, const float* weights, int64_t rows, int64_t columns,
                      float* outputs) {
  each_block(rows, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Lanes sum;
      for (int64_t c = 0; c < columns; c += LANES) {
        const Part part(columns - c);
        sum = sum + part.load(inputs + row * columns + c) * part.load(weights + c);
      }
      outputs[row] = sum.added_up();
    }
  });
}

// Sums of the columns of the masked gradient and of the inputs weighted by the gradient, for each
// block of rows.
template <typename Value>
void single_output_backward_of(const float* grad, const Value* inputs, const float* weights,
                               int64_t rows, int64_t columns, Value* masked, float* sums) {
  each_block(rows, [&](int64_t block, int64_t begin, int64_t end) {
    float *of_masked = sums + block * 2 * columns, *of_weights = of_masked + columns;
    std::fill_n(of_masked, 2 * columns, 0.0f);
    for (int64_t row = begin; row < end; ++row) {
      const Lanes g(grad[row]);
      for (int64_t c = 0; c < columns; c += LANES) {
        const Part part(columns - c);
        const Lanes x = part.load(inputs + row * columns + c);
        const Lanes kept = (g * part.load(weights + c)).where_above_0(x);
        part.store(masked + row * columns + c, kept);
        part.store(of_masked + c, part.load(of_masked + c) + kept);
        part.store(of_weights + c, part.load(of_weights + c) + g * x);
      }
    }
  });
}

void check_single_output(const Tensor& inputs, const Tensor& weights) {
  check_matrix(inputs, "inputs");
  TORCH_CHECK(weights.device().is_cpu() && weights.scalar_type() == at::kFloat &&
                  weights.is_contiguous() && weights.numel() == inputs.size(1),
              "there must be a float32 weight for each column");
}

// `inputs @ weights^T` of weights `[1, columns]`, float32 `[rows, 1]`.
Tensor single_output(const Tensor& inputs, const Tensor& weights) {
  check_single_output(inputs, weights);
  const int64_t rows = inputs.size(0), columns = inputs.size(1);
  Tensor outputs = at::empty({rows, 1}, at::kFloat);
  const float* factors = weights.const_data_ptr<float>();
  float* to = outputs.data_ptr<float>();
  if (inputs.scalar_type() == at::kFloat)
    single_output_of(inputs.const_data_ptr<float>(), factors, rows, columns, to);
  else
    single_output_of(static_cast<const uint16_t*>(inputs.const_data_ptr()), factors, rows, columns,
                     to);
  return outputs;
}

// Of inputs that are the outputs of ReLUs: the gradient of what went into these, its sum over the
// rows, and the gradient of the weights. The first is written into the inputs where that is asked
// for.
std::tuple<Tensor, Tensor, Tensor> single_output_backward(const Tensor& grad, const Tensor& inputs,
                                                          const Tensor& weights,
                                                          bool into_inputs) {
  check_single_output(inputs, weights);
  const int64_t rows = inputs.size(0), columns = inputs.size(1);
  TORCH_CHECK(grad.scalar_type() == at::kFloat && grad.is_contiguous() && grad.numel() == rows,
              "there must be a float32 gradient for each row");
  Tensor masked = into_inputs ? inputs : at::empty_like(inputs);
  Tensor sums = at::empty({(rows + ROWS - 1) / ROWS, 2, columns}, at::kFloat);
  const float *given = grad.const_data_ptr<float>(), *factors = weights.const_data_ptr<float>();
  float* each = sums.data_ptr<float>();
  if (inputs.scalar_type() == at::kFloat)
    single_output_backward_of(given, inputs.const_data_ptr<float>(), factors, rows, columns,
                              masked.data_ptr<float>(), each);
  else
    single_output_backward_of(given, static_cast<const uint16_t*>(inputs.const_data_ptr()), factors,
                              rows, columns, static_cast<uint16_t*>(masked.data_ptr()), each);
  const Tensor total = sums.sum(0);
  return {masked, total[0].clone(), total[1].clone().unsqueeze(0)};
}

// `[e_1 .. e_F, x]` of each sample, `sum_f w_f + <w, x> + sum_{i<j} <e_i, e_j>`, and `sum_i e_i`.
std::tuple<Tensor, Tensor, Tensor> join(const Tensor& stored, int64_t dim, const Tensor& numbers,
                                        const std::optional<Tensor>& number_weights,
                                        bool as_bf16) {
  const StoredRows from(stored, dim);
  const Numbers given(numbers, number_weights);
  TORCH_CHECK(numbers.size(0) == from.samples, "there must be numbers for each sample");
  const int64_t width = from.fields * dim + given.count;
  Tensor joined = at::empty({from.samples, width}, as_bf16 ? at::kBFloat16 : at::kFloat);
  Tensor orders = at::empty({from.samples}, at::kFloat);
  Tensor total = at::empty({from.samples, dim}, at::kFloat);
  float *sums = orders.data_ptr<float>(), *totals = total.data_ptr<float>();
  if (as_bf16)
    join_of(from, given, static_cast<uint16_t*>(joined.data_ptr()), sums, totals);
  else
    join_of(from, given, joined.data_ptr<float>(), sums, totals);
  return {joined, orders, total};
}

// The gradients of the stored rows, and of the weights of the numbers.
std::tuple<Tensor, Tensor> join_backward(const Tensor& of_joined, const Tensor& of_orders,
                                         const Tensor& stored, int64_t dim, const Tensor& total,
                                         const Tensor& numbers) {
  const StoredRows from(stored, dim);
  const Numbers given(numbers, std::nullopt);
  check_matrix(of_joined, "the gradient");
  const int64_t samples = from.samples, width = from.fields * dim + given.count;
  TORCH_CHECK(numbers.size(0) == samples && of_joined.size(0) == samples &&
                  of_joined.size(1) == width && of_orders.numel() == samples &&
                  total.numel() == samples * dim,
              "gradients, sums and numbers must be those of the rows");
  TORCH_CHECK(of_orders.is_contiguous() && of_orders.scalar_type() == at::kFloat &&
                  total.is_contiguous(),
              "gradient and sums must be contiguous float32");
  Tensor grad = at::empty({from.samples, from.fields, from.stored}, at::kFloat);
  Tensor sums = at::empty({(from.samples + ROWS - 1) / ROWS, given.count}, at::kFloat);
  const float *factors = of_orders.const_data_ptr<float>(),
              *totals = total.const_data_ptr<float>();
  float *to = grad.data_ptr<float>(), *each = sums.data_ptr<float>();
  if (of_joined.scalar_type() == at::kFloat)
    join_backward_of(from, given, of_joined.const_data_ptr<float>(), factors, totals, to, each);
  else
    join_backward_of(from, given, static_cast<const uint16_t*>(of_joined.const_data_ptr()), factors,
                     totals, to, each);
  Tensor of_weights = at::empty({1, given.count}, at::kFloat);
  add_up(each, sums.size(0), given.count, of_weights.data_ptr<float>());
  return {grad, of_weights};
}

// The gradient of stored rows `[samples, fields, stored]` from that of their embeddings and that of
// their first-order weights `[samples, fields, 1]`, either of which may be expanded; the rest is 0.
Tensor stored_backward(const Tensor& of_embeddings, const Tensor& of_first_order, int64_t stored) {
  const Embeddings given(of_embeddings);
  TORCH_CHECK(of_first_order.scalar_type() == at::kFloat && stored > given.dim,
              "first-order gradients are float32, and rows have room for them");
  const float* firsts = of_first_order.const_data_ptr<float>();
  const int64_t of_sample = of_first_order.stride(0), of_field = of_first_order.stride(1);
  Tensor grad = at::empty({given.samples, given.fields, stored}, at::kFloat);
  float* out = grad.data_ptr<float>();
  each_block(given.samples, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t f = 0; f < given.fields; ++f) {
        float* to = out + (n * given.fields + f) * stored;
        const float* from = given.values + n * given.of_sample + f * given.of_field;
        for (int64_t d = 0; d < stored; d += LANES)
          Part(stored - d).store(to + d, Part(std::max<int64_t>(given.dim - d, 0)).load(from + d));
        to[given.dim] = firsts[n * of_sample + f * of_field];
      }
  });
  return grad;
}

}  // namespace

TORCH_LIBRARY(stampede_dense, library) {
  library.def("relu_", &relu_);
  library.def("relu_backward", &relu_backward);
  library.def("single_output", &single_output);
  library.def("single_output_backward", &single_output_backward);
  library.def("join", &join);
  library.def("join_backward", &join_backward);
  library.def("stored_backward", &stored_backward);
}
