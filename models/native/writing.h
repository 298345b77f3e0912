// How a product that was computed in tiles comes to where it belongs.
#pragma once

#include "tiles.h"

namespace tiles {

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

}  // namespace tiles
