// The products of ReLU layers on a CPU with AMX, of float32 or bfloat16 activations with float32
// weights: see tiles.h.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstdint>
#include <tuple>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__) && defined(__linux__)
#include "tiles.h"
#define STAMPEDE_AMX 1
#endif

namespace {

using at::Tensor;

#ifdef STAMPEDE_AMX

using namespace tiles;

void check_matrix(const Tensor& matrix, const char* name) {
  TORCH_CHECK(matrix.dim() == 2 && matrix.is_contiguous(), name,
              " must be contiguous [rows, columns]");
  TORCH_CHECK(
      matrix.scalar_type() == at::kFloat || matrix.scalar_type() == at::kBFloat16, name,
      " must be float32 or bfloat16, not ", matrix.scalar_type());
}

template <typename Value>
Matrix<Value> as_matrix(const Tensor& matrix) {
  return {static_cast<const Value*>(matrix.const_data_ptr()), matrix.size(0), matrix.size(1)};
}

// What becomes of a product's numbers before they are written.
enum class Last {
  PLAIN,   // Nothing.
  RELU,    // `bias` is added, and what is then at most 0 becomes 0; NaN stays.
  MASKED,  // Becomes 0 where `mask` is at most 0; each column is added to `sums`.
};

// Where to, and with what; pointers to columns of the result.
template <typename Value>
struct Target {
  Value* to;
  int64_t stride;  // Of the rows of `to` and `mask`.
  const float* bias;
  const Value* mask;
  float* sums;
};

// A square of a product that is written, some rows at a time, while the next one is multiplied.
template <Last LAST, typename Value>
class Writing {
 public:
  // Nothing.
  Writing() : stop_(0) {}

  Writing(const float* square, const Target<Value>& target, int64_t row, int64_t rows,
          int64_t column, int64_t columns)
      : square_(square),
        target_(target),
        stop_(std::min(rows - row, PANEL)),
        here_{first_lanes(columns - column), first_lanes(columns - column - SIDE)} {
    const int64_t first = row * target.stride + column;
    target_.to += first;
    if constexpr (LAST == Last::MASKED) target_.mask += first, target_.sums += column;
    for (int half = 0; half < 2; ++half) {
      const bool is_relu = LAST == Last::RELU;
      more_[half] = is_relu ? load(target.bias + column + half * SIDE, here_[half]) : zero();
    }
  }

  void rows(int64_t count) {
    // The compiler cannot know that what is written is not this object.
    const auto [to, stride, bias, mask, sums] = target_;
    const __m512 more[2] = {more_[0], more_[1]};
    const __mmask16 here[2] = {here_[0], here_[1]};
    __m512 added[2] = {sums_[0], sums_[1]};
    const float* square = square_;
    const int64_t stop = std::min(row_ + count, stop_);
    for (int64_t row = row_; row < stop; ++row)
      for (int half = 0; half < 2; ++half) {
        const int64_t at = row * stride + half * SIDE;
        __m512 values = _mm512_load_ps(square + row * PANEL + half * SIDE);
        if constexpr (LAST == Last::RELU) {
          values = _mm512_add_ps(values, more[half]);
          values = kept(values, values);
        }
        if constexpr (LAST == Last::MASKED) {
          values = kept(load(mask + at, here[half]), values);
          added[half] = _mm512_add_ps(added[half], values);
        }
        store(to + at, here[half], values);
      }
    row_ = std::max(row_, stop);
    sums_[0] = added[0], sums_[1] = added[1];
  }

  void all() {
    rows(PANEL);
    if (LAST == Last::MASKED && stop_)
      for (int half = 0; half < 2; ++half) {
        float* sums = target_.sums + half * SIDE;
        store(sums, here_[half], _mm512_add_ps(load(sums, here_[half]), sums_[half]));
      }
  }

 private:
  static __m512 zero() { return _mm512_setzero_ps(); }
  // A NaN is not at most 0.
  static __m512 kept(__m512 where, __m512 values) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(where, zero(), _CMP_NLE_UQ), values);
  }

  const float* square_ = nullptr;
  Target<Value> target_{};
  int64_t row_ = 0, stop_;
  __mmask16 here_[2] = {};
  __m512 more_[2] = {}, sums_[2] = {};
};

// A left factor times a packed right one of so many columns; rows from `begin` to `end`.
template <int SPLITS, Last LAST, typename Value>
void multiply_rows(const Matrix<Value>& left, const uint16_t* right, int64_t columns,
                   int64_t begin, int64_t end, const Target<Value>& target) {
  const int64_t depths = parts_of(left.columns, DEPTH), size = panel_size<SPLITS>(depths);
  const InUse tiles;
  uint16_t* packed = scratch<0>(size);
  // So many in each depth that all are written when the next products are there.
  const int64_t rows_a_depth = parts_of(PANEL, depths);
  alignas(64) float squares[2][PANEL * PANEL];
  int now = 0;
  Writing<LAST, Value> before;
  for (; begin < end; begin += PANEL) {
    LeftPanel panel{packed};
    if constexpr (SPLITS == 1)
      if (begin + PANEL <= left.rows)
        panel = {packed, left.values + begin * left.columns, left.columns, left.columns / DEPTH};
    pack_rows<SPLITS>(left, begin, panel.depths, packed);
    for (int64_t j = 0; j < parts_of(columns, PANEL); ++j, now = 1 - now) {
      multiply<SPLITS>(panel, right + j * size, depths, true, squares[now], PANEL,
                       [&] { before.rows(rows_a_depth); });
      before.all();
      before = {squares[now], target, begin, end, j * PANEL, columns};
    }
  }
  before.all();
}

// Splits rows among threads: `task(thread, begin, end)`.
template <typename Do>
void share_rows(int64_t rows, int64_t threads, int64_t multiple, const Do& task) {
  const int64_t share = parts_of(parts_of(rows, multiple), threads) * multiple;
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t stop) {
    for (int64_t thread = first; thread < stop; ++thread)
      if (thread * share < rows)
        task(thread, thread * share, std::min((thread + 1) * share, rows));
  });
}

// A matrix times the weights, these transposed for `Last::RELU`; and the columns' sums. `other` is
// the bias, or the mask, which becomes the product where it may.
template <int SPLITS, Last LAST, typename Value>
std::tuple<Tensor, Tensor> product_of(const Tensor& given, const Tensor& weights,
                                      const Tensor& other, bool into_other) {
  constexpr bool transposed = LAST == Last::RELU;
  const Matrix<Value> left = as_matrix<Value>(given);
  const Matrix<float> right = as_matrix<float>(weights);
  const int64_t columns = transposed ? right.rows : right.columns;
  const int64_t depths = parts_of(left.columns, DEPTH), panels = parts_of(columns, PANEL);
  const int64_t size = panel_size<SPLITS>(depths);
  const Tensor packed = at::empty({panels * size}, at::kBFloat16);
  auto* to = static_cast<uint16_t*>(packed.data_ptr());
  at::parallel_for(0, transposed ? panels : depths, 1, [&](int64_t first, int64_t stop) {
    for (int64_t part = first; part < stop; ++part)
      if (transposed)
        pack_transposed<SPLITS>(right, part * PANEL, to + part * size);
      else
        pack_columns<SPLITS>(right, part * DEPTH, part, false, to, size);
  });
  const int64_t threads = at::get_num_threads();
  Tensor product = into_other ? other : at::empty({left.rows, columns}, given.options());
  Tensor sums = at::zeros({LAST == Last::MASKED ? threads : 0, columns}, at::kFloat);
  share_rows(left.rows, threads, PANEL, [&](int64_t thread, int64_t begin, int64_t end) {
    Target<Value> target{static_cast<Value*>(product.data_ptr()), columns};
    if constexpr (LAST == Last::RELU) target.bias = other.const_data_ptr<float>();
    if constexpr (LAST == Last::MASKED) {
      target.mask = static_cast<const Value*>(other.const_data_ptr());
      target.sums = sums.data_ptr<float>() + thread * columns;
    }
    multiply_rows<SPLITS, LAST>(left, to, columns, begin, end, target);
  });
  return {product, sums.sum(0)};
}

template <Last LAST>
std::tuple<Tensor, Tensor> product(const Tensor& left, const Tensor& weights, const Tensor& other,
                                   bool into_other = false) {
  check_matrix(left, "the left factor");
  check_matrix(weights, "weights");
  TORCH_CHECK(may_be_used(), "the system does not let this process use AMX");
  TORCH_CHECK(weights.scalar_type() == at::kFloat, "weights must be float32");
  TORCH_CHECK(left.size(1) == weights.size(LAST == Last::RELU ? 1 : 0),
              "the factors do not go together");
  if (left.scalar_type() == at::kFloat)
    return product_of<3, LAST, float>(left, weights, other, into_other);
  return product_of<1, LAST, uint16_t>(left, weights, other, into_other);
}

// `relu(inputs @ weights^T + bias)`, of the inputs' dtype.
Tensor relu_layer(const Tensor& inputs, const Tensor& weights, const Tensor& bias) {
  TORCH_CHECK(bias.scalar_type() == at::kFloat && bias.is_contiguous() && bias.dim() == 1 &&
                  bias.size(0) == weights.size(0),
              "the bias must be float32 and have a number for each output");
  return std::get<0>(product<Last::RELU>(inputs, weights, bias));
}

// `gradient @ weights`, of the gradient's dtype.
Tensor inputs_gradient(const Tensor& gradient, const Tensor& weights) {
  return std::get<0>(product<Last::PLAIN>(gradient, weights, {}));
}

// The same where the mask is above 0, else 0, and the float32 sums of the columns. It is written
// into the mask where that is asked for.
std::tuple<Tensor, Tensor> masked_inputs_gradient(const Tensor& gradient, const Tensor& weights,
                                                  const Tensor& mask, bool into_mask) {
  check_matrix(mask, "the mask");
  TORCH_CHECK(mask.scalar_type() == gradient.scalar_type() && mask.size(0) == gradient.size(0) &&
                  mask.size(1) == weights.size(1),
              "the mask must be like the product");
  return product<Last::MASKED>(gradient, weights, mask, into_mask);
}

// Rows of both factors that are packed at a time, so that they and the result stay in cache.
template <int SPLITS>
constexpr int64_t DEPTHS = SPLITS == 1 ? 8 : 3;

// Adds the product of some rows of the factors, the left one transposed, to a result whose rows
// have `stride` numbers.
template <int SPLITS, typename Value>
void add_product(Matrix<Value> left, Matrix<Value> right, int64_t begin, int64_t end,
                 float* result, int64_t stride) {
  constexpr int64_t size = panel_size<SPLITS>(DEPTHS<SPLITS>), ROWS = DEPTHS<SPLITS> * DEPTH;
  const int64_t of_left = parts_of(left.columns, PANEL), of_right = parts_of(right.columns, PANEL);
  const InUse tiles;
  uint16_t *a = scratch<0>(of_left * size), *b = scratch<1>(of_right * size);
  // Those of other threads are not theirs.
  left.rows = right.rows = end;
  for (; begin < end; begin += ROWS) {
    const int64_t depths = parts_of(std::min(ROWS, end - begin), DEPTH);
    for (int64_t depth = 0; depth < depths; ++depth) {
      pack_columns<SPLITS>(left, begin + depth * DEPTH, depth, true, a, size);
      pack_columns<SPLITS>(right, begin + depth * DEPTH, depth, false, b, size);
    }
    for (int64_t i = 0; i < of_left; ++i)
      for (int64_t j = 0; j < of_right; ++j)
        multiply<SPLITS>(LeftPanel{a + i * size}, b + j * size, depths, false,
                         result + i * PANEL * stride + j * PANEL, stride, [] {});
  }
}

template <int SPLITS, typename Value>
Tensor transposed_product_of(const Tensor& a, const Tensor& b) {
  const Matrix<Value> left = as_matrix<Value>(a), right = as_matrix<Value>(b);
  // Each thread has rows and a sum of its own, so that none waits for what another has packed.
  const int64_t threads = at::get_num_threads();
  Tensor sums = at::zeros({threads, parts_of(left.columns, PANEL) * PANEL,
                           parts_of(right.columns, PANEL) * PANEL},
                          at::kFloat);
  float* each = sums.data_ptr<float>();
  share_rows(left.rows, threads, DEPTH, [&](int64_t thread, int64_t begin, int64_t end) {
    add_product<SPLITS>(left, right, begin, end, each + thread * sums.stride(0), sums.stride(1));
  });
  return sums.narrow(1, 0, left.columns).narrow(2, 0, right.columns).sum(0);
}

bool has_tiles() { return may_be_used(); }

// `[columns of a, columns of b]` float32, of `a` and `b` with as many rows.
Tensor transposed_product(const Tensor& a, const Tensor& b) {
  check_matrix(a, "the left factor");
  check_matrix(b, "the right factor");
  TORCH_CHECK(a.size(0) == b.size(0) && a.scalar_type() == b.scalar_type(),
              "the factors do not go together");
  TORCH_CHECK(may_be_used(), "the system does not let this process use AMX");
  return a.scalar_type() == at::kFloat ? transposed_product_of<3, float>(a, b)
                                       : transposed_product_of<1, uint16_t>(a, b);
}

#else

template <typename... Given>
void refuse(const Given&...) {
  TORCH_CHECK(false, "this CPU has no AMX");
}

bool has_tiles() { return false; }

Tensor relu_layer(const Tensor& inputs, const Tensor&, const Tensor&) {
  refuse();
  return inputs;
}

Tensor inputs_gradient(const Tensor& gradient, const Tensor&) {
  refuse();
  return gradient;
}

std::tuple<Tensor, Tensor> masked_inputs_gradient(const Tensor& gradient, const Tensor&,
                                                  const Tensor& mask, bool) {
  refuse();
  return {gradient, mask};
}

Tensor transposed_product(const Tensor& a, const Tensor&) {
  refuse();
  return a;
}

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede_dense, library) {
  library.def("has_tiles", &has_tiles);
  library.def("relu_layer", &relu_layer);
  library.def("inputs_gradient", &inputs_gradient);
  library.def("masked_inputs_gradient", &masked_inputs_gradient);
  library.def("transposed_product", &transposed_product);
}
