// Operations on the activations of dense layers on a CPU, in one pass where torch takes several.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include <tuple>

#include "lanes.h"

namespace {

using at::Tensor;

template <typename Value>
void relu_backward_of(const Value* grad, const Value* output, int64_t rows, int64_t columns,
                      float scale, Value* masked, float* sums, float* sum) {
  const Lanes factor(scale);
  each_block(rows, [&](int64_t block, int64_t begin, int64_t end) {
    float* mine = sums + block * columns;
    std::fill(mine, mine + columns, 0.0f);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t c = 0; c < columns; c += LANES) {
        const Part part(columns - c);
        const int64_t at = row * columns + c;
        const Lanes kept = (part.load(grad + at) * factor).where_above_0(part.load(output + at));
        part.store(masked + at, kept);
        part.store(mine + c, part.load(mine + c) + kept);
      }
    }
  });
  add_up(sums, (rows + ROWS - 1) / ROWS, columns, sum);
}

// The gradient of z in `y = scale * relu(z)`, and its float32 sum over the rows. `into_output`: the
// gradient overwrites y.
std::tuple<Tensor, Tensor> relu_backward(const Tensor& grad, const Tensor& output,
                                         bool into_output, double scale) {
  const int64_t rows = grad.size(0), columns = grad.size(1);
  Tensor masked = into_output ? output : at::empty_like(grad);
  Tensor sum = at::empty({columns}, at::kFloat);
  Tensor sums = at::empty({(rows + ROWS - 1) / ROWS, columns}, at::kFloat);
  with_type(grad, [&](auto number) {
    using Value = decltype(number);
    relu_backward_of(read<Value>(grad), read<Value>(output), rows, columns, scale,
                     written<Value>(masked), written<float>(sums), written<float>(sum));
  });
  return {masked, sum};
}

// In-place ReLU of bfloat16, several times as fast as torch's. NaN stays NaN.
void relu_(Tensor values) {
  auto* all = written<uint16_t>(values);
  at::parallel_for(0, values.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint16_t bits = all[i];
      // From minus zero to minus infinity.
      all[i] = bits >= 0x8000 && bits <= 0xff80 ? 0 : bits;
    }
  });
}

inline uint64_t mixed(uint64_t key) {
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
  key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
  return key ^ (key >> 31);
}

// As `sample_keys` of models/dropout.py, of the rows `[n]` int64.
Tensor sample_keys(const Tensor& rows, int64_t seed) {
  Tensor keys = at::empty_like(rows);
  const auto* from = rows.const_data_ptr<int64_t>();
  auto* to = keys.data_ptr<int64_t>();
  for (int64_t n = 0; n < rows.numel(); ++n)
    to[n] = mixed(uint64_t(from[n]) * 0x9E3779B97F4A7C15u + uint64_t(seed));
  return keys;
}

// The values of one sample; as `_factors` of models/dropout.py, which explains the constants. By
// value, as a compiler vectorizes only what the stores cannot change.
template <typename Value>
void drop_sample(Value* values, uint32_t elements, uint64_t key, uint32_t threshold, float kept) {
  const uint32_t low = key, high = key >> 32;
  for (uint32_t i = 0; i < elements; ++i) {
    uint32_t hash = i * 0x9E3779B1u + low;
    hash = ((hash ^ (hash >> 16)) * 0x85EBCA6Bu) ^ high;
    hash = (hash ^ (hash >> 13)) * 0xC2B2AE35u;
    hash ^= hash >> 16;
    rounded_to(values[i], as_float(values[i]) * (hash < threshold ? 0.0f : kept));
  }
}

template <typename Value>
void dropout_of(Value* values, const int64_t* keys, int64_t samples, int64_t elements,
                uint64_t mask, uint32_t threshold, float kept) {
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(elements, 1));
  at::parallel_for(0, samples, grain, [&](int64_t first, int64_t stop) {
    for (int64_t n = first; n < stop; ++n) {
      const uint64_t key = mixed(uint64_t(keys[n]) + mask * 0x9E3779B97F4A7C15u);
      drop_sample(values + n * elements, elements, key, threshold, kept);
    }
  });
}

void dropout_(Tensor values, const Tensor& keys, int64_t mask, int64_t threshold, double kept) {
  const int64_t samples = keys.numel(), elements = samples ? values.numel() / samples : 0;
  TORCH_CHECK(elements * samples == values.numel(), "every sample must have as many values");
  with_type(values, [&](auto number) {
    dropout_of(written<decltype(number)>(values), keys.const_data_ptr<int64_t>(), samples, elements,
               mask, threshold, kept);
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

// For each block of rows, sums over the columns of the masked gradient, and of the inputs weighted
// by the gradient.
template <typename Value>
void single_output_backward_of(const float* grad, const Value* inputs, const float* weights,
                               int64_t rows, int64_t columns, float scale, Value* masked,
                               float* sums) {
  each_block(rows, [&](int64_t block, int64_t begin, int64_t end) {
    float *of_masked = sums + block * 2 * columns, *of_weights = of_masked + columns;
    std::fill_n(of_masked, 2 * columns, 0.0f);
    for (int64_t row = begin; row < end; ++row) {
      const Lanes g(grad[row]), scaled(grad[row] * scale);
      for (int64_t c = 0; c < columns; c += LANES) {
        const Part part(columns - c);
        const Lanes x = part.load(inputs + row * columns + c);
        const Lanes kept = (scaled * part.load(weights + c)).where_above_0(x);
        part.store(masked + row * columns + c, kept);
        part.store(of_masked + c, part.load(of_masked + c) + kept);
        part.store(of_weights + c, part.load(of_weights + c) + g * x);
      }
    }
  });
}

// `inputs @ weights^T` of weights `[1, columns]`, float32 `[rows, 1]`.
Tensor single_output(const Tensor& inputs, const Tensor& weights) {
  const int64_t rows = inputs.size(0), columns = inputs.size(1);
  TORCH_CHECK(weights.numel() == columns, "there must be a weight for each column");
  Tensor outputs = at::empty({rows, 1}, at::kFloat);
  with_type(inputs, [&](auto number) {
    single_output_of(read<decltype(number)>(inputs), read<float>(weights), rows, columns,
                     written<float>(outputs));
  });
  return outputs;
}

// If the inputs are `scale * relu(z)`: the gradient of z, its sum over the rows, and the gradient of
// the weights. `into_inputs`: the first overwrites the inputs.
std::tuple<Tensor, Tensor, Tensor> single_output_backward(const Tensor& grad, const Tensor& inputs,
                                                          const Tensor& weights,
                                                          bool into_inputs, double scale) {
  const int64_t rows = inputs.size(0), columns = inputs.size(1);
  Tensor masked = into_inputs ? inputs : at::empty_like(inputs);
  Tensor sums = at::empty({(rows + ROWS - 1) / ROWS, 2, columns}, at::kFloat);
  with_type(inputs, [&](auto number) {
    using Value = decltype(number);
    single_output_backward_of(read<float>(grad), read<Value>(inputs), read<float>(weights), rows,
                              columns, scale, written<Value>(masked), written<float>(sums));
  });
  const Tensor total = sums.sum(0);
  return {masked, total[0].clone(), total[1].clone().unsqueeze(0)};
}

// The outputs of layers `relu(x @ weight^T + bias)`, by torch's products, each with dropout if there
// are keys.
std::vector<Tensor> plain_layers(const Tensor& inputs, const std::vector<Tensor>& weights,
                                 const std::vector<Tensor>& biases,
                                 const std::optional<Tensor>& keys, at::IntArrayRef masks,
                                 at::IntArrayRef thresholds, at::ArrayRef<double> kept) {
  std::vector<Tensor> outputs;
  const auto type = inputs.scalar_type();
  for (size_t k = 0; k < weights.size(); ++k) {
    const Tensor& below = k ? outputs[k - 1] : inputs;
    Tensor output = at::linear(below, weights[k].to(type), biases[k].to(type));
    // oneDNN's fused ReLU would silently turn NaN into 0.
    type == at::kFloat ? void(output.relu_()) : relu_(output);
    if (keys) dropout_(output, *keys, masks[k], thresholds[k], kept[k]);
    outputs.push_back(output);
  }
  return outputs;
}

// The backward pass of `plain_layers`: the gradient of the inputs' ReLU, if they have one, else of
// the inputs; then of each layer the gradients of weight and bias.
//
// `grad` and `of_bias` are the gradients of the last layer's product and bias. `activations` are the
// inputs, and the outputs of all layers but the last; `scales` what dropout multiplied them by.
std::vector<Tensor> plain_layers_backward(Tensor grad, Tensor of_bias,
                                          const std::vector<Tensor>& weights,
                                          const std::vector<Tensor>& activations,
                                          at::ArrayRef<double> scales, bool into_activations,
                                          bool of_inputs) {
  const size_t layers = weights.size();
  std::vector<Tensor> found(1 + 2 * layers);
  for (size_t k = layers; k-- > 0;) {
    found[1 + 2 * k] = at::matmul(grad.t(), activations[k]);
    found[2 + 2 * k] = of_bias;
    if (k || of_inputs) grad = at::matmul(grad, weights[k].to(grad.scalar_type()));
    if (k) std::tie(grad, of_bias) = relu_backward(grad, activations[k], into_activations, scales[k]);
  }
  found[0] = grad;
  return found;
}

}  // namespace

TORCH_LIBRARY(stampede_dense, library) {
  library.def("relu_", &relu_);
  library.def("sample_keys", &sample_keys);
  library.def("dropout_", &dropout_);
  library.def("plain_layers", &plain_layers);
  library.def("plain_layers_backward", &plain_layers_backward);
  library.def("relu_backward", &relu_backward);
  library.def("single_output", &single_output);
  library.def("single_output_backward", &single_output_backward);
}
