// Matrix products of ReLU layers on a CPU with AMX, of float32 or bfloat16 activations and float32
// weights; see tiles.h.
//
// Gradients of weights and biases are sums over rows, of which each thread adds its own part: their
// last digits depend on the number of threads. Nothing else does.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "lanes.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__) && defined(__linux__)
#include "tiles.h"
#define STAMPEDE_AMX 1
#endif

namespace {

using at::Tensor;

#ifdef STAMPEDE_AMX

using namespace tiles;

template <typename Value>
Matrix<Value> as_matrix(const Tensor& matrix) {
  return {static_cast<const Value*>(matrix.const_data_ptr()), matrix.size(0), matrix.size(1)};
}

// Weights as a packed right factor.
struct Packed {
  Tensor memory;
  int64_t columns, depths, size;
  const uint16_t* panel(int64_t number) const {
    return static_cast<const uint16_t*>(memory.const_data_ptr()) + number * size;
  }
};

// Packs weights, or their transpose.
template <int SPLITS>
Packed pack(const Tensor& weights, bool transposed) {
  const Matrix<float> from = as_matrix<float>(weights);
  const int64_t columns = transposed ? from.rows : from.columns;
  const int64_t depths = parts_of(transposed ? from.columns : from.rows, DEPTH);
  const int64_t panels = parts_of(columns, PANEL), size = panel_size<SPLITS>(depths);
  const Packed packed{at::empty({panels * size}, at::kBFloat16), columns, depths, size};
  auto* to = static_cast<uint16_t*>(packed.memory.data_ptr());
  at::parallel_for(0, transposed ? panels : depths, 1, [&](int64_t first, int64_t stop) {
    for (int64_t part = first; part < stop; ++part)
      if (transposed)
        pack_transposed<SPLITS>(from, part * PANEL, to + part * size);
      else
        pack_columns<SPLITS>(from, part * DEPTH, part, false, to, size);
  });
  return packed;
}

// Multiplies a panel of rows, which ends at row `end` at the latest, by weights.
template <int SPLITS, Last LAST, typename Value>
void multiply_panel(const Matrix<Value>& left, int64_t row, int64_t end, const Packed& right,
                    const Target<Value>& target) {
  uint16_t* packed = scratch<0>(right.size);
  LeftPanel panel{packed};
  if constexpr (SPLITS == 1)
    if (row + PANEL <= left.rows)
      panel = {packed, left.values + row * left.columns, left.columns, left.columns / DEPTH};
  pack_rows<SPLITS>(left, row, panel.depths, packed);
  // Rows of the last square to write per depth, so that all are written when the next one is done.
  const int64_t rows_a_depth = parts_of(PANEL, std::max<int64_t>(right.depths, 1));
  alignas(64) float squares[2][PANEL * PANEL];
  Writing<LAST, Value> before;
  // Prefetches the next panel of rows, and where its product goes.
  const int64_t next = row + PANEL, count = std::clamp<int64_t>(end - next, 0, PANEL);
  const int64_t times = right.depths * parts_of(right.columns, PANEL);
  Ahead rows_ahead(left.values + next * left.columns, count * left.columns, times);
  Ahead product_ahead(target.to + next * target.stride, count * target.stride, times);
  for (int64_t j = 0; j < parts_of(right.columns, PANEL); ++j) {
    float* square = squares[j % 2];
    multiply<SPLITS, Right::PASSES>(panel, right.panel(j), right.depths, true, square, [&] {
      before.rows(rows_a_depth);
      rows_ahead.fetch();
      product_ahead.fetch();
    });
    before.all();
    before = {square, target, row, end, j * PANEL, right.columns};
  }
  before.all();
}

// Rows divided among threads; every share but the last is a multiple of some number.
struct Shares {
  int64_t rows, each, count;

  Shares(int64_t rows_, int64_t multiple) : rows(rows_) {
    const int64_t parts = parts_of(parts_of(rows, multiple), at::get_num_threads());
    each = std::max<int64_t>(parts, 1) * multiple;
    count = parts_of(rows, each);
  }

  // Runs `task(share, begin, end)` for every share.
  template <typename Do>
  void in_parallel(const Do& task) const {
    at::parallel_for(0, count, 1, [&](int64_t first, int64_t stop) {
      for (int64_t share = first; share < stop; ++share)
        task(share, share * each, std::min((share + 1) * each, rows));
    });
  }
};

// Bytes that stay in a core's cache beside other data.
constexpr int64_t CACHE = 1 << 20;

template <int SPLITS, typename Value>
std::vector<Tensor> relu_layers_of(const Tensor& inputs, const std::vector<Tensor>& weights,
                                   const std::vector<Tensor>& biases) {
  std::vector<Packed> packed;
  std::vector<Matrix<Value>> lefts{as_matrix<Value>(inputs)};
  std::vector<Target<Value>> targets;
  std::vector<Tensor> outputs;
  const int64_t rows = inputs.size(0);
  for (size_t k = 0; k < weights.size(); ++k) {
    packed.push_back(pack<SPLITS>(weights[k], true));
    outputs.push_back(at::empty({rows, packed[k].columns}, inputs.options()));
    targets.push_back({static_cast<Value*>(outputs[k].data_ptr()), packed[k].columns,
                       biases[k].const_data_ptr<float>()});
    lefts.push_back(as_matrix<Value>(outputs[k]));
  }
  // Taking a panel through all layers keeps it in cache, unless the weights are too large for that.
  int64_t bytes = 0;
  for (const Packed& one : packed) bytes += one.memory.nbytes();
  const int64_t together = bytes <= CACHE ? PANEL : std::max(rows, PANEL);
  Shares(rows, PANEL).in_parallel([&](int64_t, int64_t begin, int64_t end) {
    const InUse tiles;
    for (int64_t first = begin; first < end; first += together)
      for (size_t k = 0; k < packed.size(); ++k)
        for (int64_t row = first; row < std::min(first + together, end); row += PANEL)
          multiply_panel<SPLITS, Last::RELU>(lefts[k], row, end, packed[k], targets[k]);
  });
  return outputs;
}

// The outputs of all layers, each `relu(x @ weights^T + bias)` of the one before, in its dtype.
std::vector<Tensor> relu_layers(const Tensor& inputs, const std::vector<Tensor>& weights,
                                const std::vector<Tensor>& biases) {
  for (size_t k = 0; k < weights.size(); ++k)
    TORCH_CHECK(weights[k].size(1) == (k ? weights[k - 1].size(0) : inputs.size(1)),
                "the shapes of the factors do not match");
  if (inputs.scalar_type() == at::kFloat) return relu_layers_of<3, float>(inputs, weights, biases);
  return relu_layers_of<1, uint16_t>(inputs, weights, biases);
}

// The gradient times the weights; with a mask, also the sums of the masked product's columns.
template <int SPLITS, Last LAST, typename Value>
std::tuple<Tensor, Tensor> inputs_gradient_of(const Tensor& gradient, const Tensor& weights,
                                              const Tensor& mask, bool into_mask,
                                              double scale) {
  const Matrix<Value> left = as_matrix<Value>(gradient);
  const Packed right = pack<SPLITS>(weights, false);
  const Shares shares(left.rows, PANEL);
  const Tensor product =
      into_mask ? mask : at::empty({left.rows, right.columns}, gradient.options());
  constexpr bool has_sums = LAST == Last::MASKED;
  const Tensor sums = at::zeros({has_sums ? shares.count : 0, right.columns}, at::kFloat);
  shares.in_parallel([&](int64_t share, int64_t begin, int64_t end) {
    const InUse tiles;
    Target<Value> target{static_cast<Value*>(product.data_ptr()), right.columns};
    if constexpr (has_sums) {
      target.mask = static_cast<const Value*>(mask.const_data_ptr());
      target.sums = sums.data_ptr<float>() + share * right.columns;
      target.scale = scale;
    }
    for (int64_t row = begin; row < end; row += PANEL)
      multiply_panel<SPLITS, LAST>(left, row, end, right, target);
  });
  return {product, has_sums ? sums.sum(0) : sums};
}

template <Last LAST>
std::tuple<Tensor, Tensor> inputs_gradient_as(const Tensor& gradient, const Tensor& weights,
                                              const Tensor& mask, bool into_mask,
                                              double scale) {
  if (gradient.scalar_type() == at::kFloat)
    return inputs_gradient_of<3, LAST, float>(gradient, weights, mask, into_mask, scale);
  return inputs_gradient_of<1, LAST, uint16_t>(gradient, weights, mask, into_mask, scale);
}

// `gradient @ weights`, of the gradient's dtype.
Tensor inputs_gradient(const Tensor& gradient, const Tensor& weights) {
  return std::get<0>(inputs_gradient_as<Last::PLAIN>(gradient, weights, {}, false, 1.0));
}

// The same times `scale` where the mask is above 0, else 0, and the float32 sums of the columns.
// `into_mask`: the result overwrites the mask.
std::tuple<Tensor, Tensor> masked_inputs_gradient(const Tensor& gradient, const Tensor& weights,
                                                  const Tensor& mask, bool into_mask,
                                                  double scale) {
  return inputs_gradient_as<Last::MASKED>(gradient, weights, mask, into_mask, scale);
}

// Depths of both factors that are packed at a time, few enough to stay in cache with the result.
template <int SPLITS>
constexpr int64_t DEPTHS = SPLITS == 1 ? 8 : 3;

// The product of some rows of the factors, the left one transposed, as consecutive squares.
template <int SPLITS, typename Value>
void multiply_transposed(const Matrix<Value>& left, const Matrix<Value>& right, int64_t begin,
                         int64_t end, float* squares) {
  constexpr int64_t size = panel_size<SPLITS>(DEPTHS<SPLITS>), ROWS = DEPTHS<SPLITS> * DEPTH;
  const int64_t of_left = parts_of(left.columns, PANEL), of_right = parts_of(right.columns, PANEL);
  const InUse tiles;
  uint16_t *a = scratch<0>(of_left * size), *b = scratch<1>(of_right * size);
  for (bool is_first = true; begin < end; begin += ROWS, is_first = false) {
    const int64_t depths = parts_of(std::min(ROWS, end - begin), DEPTH);
    for (int64_t depth = 0; depth < depths; ++depth) {
      pack_columns<SPLITS>(left, begin + depth * DEPTH, depth, true, a, size);
      pack_columns<SPLITS>(right, begin + depth * DEPTH, depth, false, b, size);
    }
    // Prefetches the next rows.
    const int64_t next = begin + ROWS, count = std::clamp<int64_t>(end - next, 0, ROWS);
    const int64_t times = of_left * of_right * depths;
    Ahead a_ahead(left.values + next * left.columns, count * left.columns, times);
    Ahead b_ahead(right.values + next * right.columns, count * right.columns, times);
    float* square = squares;
    for (int64_t i = 0; i < of_left; ++i)
      for (int64_t j = 0; j < of_right; ++j, square += PANEL * PANEL)
        multiply<SPLITS, Right::STAYS>(LeftPanel{a + i * size}, b + j * size, depths, is_first,
                                       square, [&] {
                                         a_ahead.fetch();
                                         b_ahead.fetch();
                                       });
  }
}

// A row of the sum over shares; each share's matrix lies in squares.
void add_up_row(const Tensor& each, int64_t row, int64_t columns, float* sum) {
  for (int64_t first = 0; first < columns; first += PANEL) {
    const int64_t square = row / PANEL * parts_of(columns, PANEL) + first / PANEL;
    const float* from = each.const_data_ptr<float>() + (square * PANEL + row % PANEL) * PANEL;
    const int64_t count = std::min(PANEL, columns - first);
    std::copy_n(from, count, sum + first);
    for (int64_t share = 1; share < each.size(0); ++share) {
      from += each.stride(0);
      for (int64_t k = 0; k < count; ++k) sum[first + k] += from[k];
    }
  }
}

template <int SPLITS, typename Value>
Tensor transposed_product_of(const Tensor& a, const Tensor& b) {
  const Matrix<Value> left = as_matrix<Value>(a), right = as_matrix<Value>(b);
  // Each thread has its own rows and its own sum, so that none waits for another.
  const Shares shares(left.rows, DEPTH);
  const int64_t squares = parts_of(left.columns, PANEL) * parts_of(right.columns, PANEL);
  Tensor each = at::empty({shares.count, squares * PANEL * PANEL}, at::kFloat);
  shares.in_parallel([&](int64_t share, int64_t begin, int64_t end) {
    multiply_transposed<SPLITS>(left, right, begin, end,
                                each.data_ptr<float>() + share * each.stride(0));
  });
  if (!shares.count) return at::zeros({left.columns, right.columns}, at::kFloat);
  Tensor product = at::empty({left.columns, right.columns}, at::kFloat);
  at::parallel_for(0, left.columns, PANEL, [&](int64_t first, int64_t stop) {
    for (int64_t row = first; row < stop; ++row)
      add_up_row(each, row, right.columns, product.data_ptr<float>() + row * right.columns);
  });
  return product;
}

// `a^T @ b` in float32, `[columns of a, columns of b]`.
Tensor transposed_product(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == at::kFloat ? transposed_product_of<3, float>(a, b)
                                       : transposed_product_of<1, uint16_t>(a, b);
}

#else

bool may_be_used() { return false; }

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede_dense, library) {
  library.def("has_tiles", &may_be_used);
#ifdef STAMPEDE_AMX
  library.def("relu_layers", &relu_layers);
  library.def("inputs_gradient", &inputs_gradient);
  library.def("masked_inputs_gradient", &masked_inputs_gradient);
  library.def("transposed_product", &transposed_product);
#endif
}
