// Products of matrices in the tiles of AMX, which multiply bfloat16 and add in float32.
//
// A float32 number is exactly the sum of three bfloat16 numbers: the rounded number, the rounded
// remainder, and what then remains. The six largest of the nine products of two such sums give the
// product of the float32 numbers with a relative error below 2^-23 (Henry, Tang, Heinecke:
// Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations, arXiv
// 1904.06376, section III). That holds from 1e-31 to 3.39e38: parts below 1.2e-38 count as 0, so
// smaller numbers lose digits and finally become 0; larger ones and infinity give NaN or infinity.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tiles {

// Rows and columns of a tile of the result, and the products summed in each of its numbers.
constexpr int64_t SIDE = 16, DEPTH = 32;
// Numbers of a tile of a factor.
constexpr int64_t TILE = SIDE * DEPTH;
// The result is computed in squares of two by two tiles; a panel is the rows or columns of one.
constexpr int64_t PANEL = 2 * SIDE;

constexpr int64_t parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Every process must ask the system once.
inline bool may_be_used() {
  static const bool may = [] {
    constexpr long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
  }();
  return may;
}

// The compiler may not know that tile instructions read memory.
inline void written_to_memory() { asm volatile("" ::: "memory"); }

// Tiles are configured during its lifetime.
class InUse {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };

 public:
  InUse() {
    Config config;
    for (int tile = 0; tile < 8; ++tile) config.bytes[tile] = 64, config.rows[tile] = SIDE;
    written_to_memory();
    _tile_loadconfig(&config);
  }
  ~InUse() { _tile_release(); }
  InUse(const InUse&) = delete;
};

inline __m512 as_floats(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// What rounding leaves of numbers.
inline __m512 rest(__m512 values, __m256i rounded) {
  return _mm512_sub_ps(values, as_floats(rounded));
}

// Splits 32 numbers into sums of bfloat16 numbers.
template <int SPLITS>
inline void split(__m512 a, __m512 b, __m512i (&to)[SPLITS]) {
  for (int s = 0; s < SPLITS; ++s) {
    to[s] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
    if (s + 1 == SPLITS) break;
    a = rest(a, _mm512_castsi512_si256(to[s]));
    b = rest(b, _mm512_extracti64x4_epi64(to[s], 1));
  }
}

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
}

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline __m512 load(const uint16_t* from, __mmask16 mask) {
  return as_floats(_mm256_maskz_loadu_epi16(mask, from));
}
inline void store(float* to, __mmask16 mask, __m512 values) {
  _mm512_mask_storeu_ps(to, mask, values);
}
inline void store(uint16_t* to, __mmask16 mask, __m512 values) {
  _mm256_mask_storeu_epi16(to, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}

// Transposes 16 vectors of 16 pairs.
inline void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// A row-major matrix of float32 or bfloat16; reads beyond its edges give zeros.
template <typename Value>
struct Matrix {
  const Value* values;
  int64_t rows, columns;

  // 32 neighbours in a row.
  template <int SPLITS>
  void neighbours(int64_t row, int64_t column, __m512i (&to)[SPLITS]) const {
    const int64_t there = row < rows ? columns - column : 0;
    const Value* from = values + row * columns + column;
    if constexpr (sizeof(Value) == 2) {
      const __mmask32 mask = there >= 32 ? ~0u : (1u << there) - 1;
      to[0] = _mm512_maskz_loadu_epi16(mask, from);
    } else {
      split<SPLITS>(load(from, first_lanes(there)), load(from + 16, first_lanes(there - 16)), to);
    }
  }

  // 16 pairs of rows, in 16 columns each.
  template <int SPLITS>
  void pairs(int64_t row, int64_t column, __m512i (&to)[SPLITS][16]) const {
    const __mmask16 mask = first_lanes(columns - column);
    const __m512i alternating = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
        3, 18, 2, 17, 1, 16, 0);
    for (int64_t p = 0; p < SIDE; ++p, row += 2) {
      const Value* from = values + row * columns + column;
      const __mmask16 one = row < rows ? mask : 0, two = row + 1 < rows ? mask : 0;
      if constexpr (sizeof(Value) == 2) {
        const __m256i a = _mm256_maskz_loadu_epi16(one, from);
        const __m256i b = _mm256_maskz_loadu_epi16(two, from + columns);
        to[0][p] = _mm512_permutexvar_epi16(
            alternating, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
      } else {
        __m512i parts[SPLITS];
        split<SPLITS>(load(from, one), load(from + columns, two), parts);
        for (int s = 0; s < SPLITS; ++s)
          to[s][p] = _mm512_permutexvar_epi16(alternating, parts[s]);
      }
    }
  }
};

// Prefetches numbers into a core's cache, an equal part at each of `times` calls.
class Ahead {
 public:
  template <typename Value>
  Ahead(const Value* first, int64_t numbers, int64_t times)
      : at_(reinterpret_cast<const char*>(first)),
        stop_(at_ + numbers * sizeof(Value)),
        lines_(parts_of(parts_of(stop_ - at_, LINE), std::max<int64_t>(times, 1))) {}

  void fetch() {
    for (int64_t k = 0; k < lines_ && at_ < stop_; ++k, at_ += LINE) _mm_prefetch(at_, _MM_HINT_T1);
  }

 private:
  static constexpr int64_t LINE = 64;
  const char *at_, *stop_;
  int64_t lines_;
};

// A panel of a factor: `[depths][SPLITS][2][TILE]`.
template <int SPLITS>
constexpr int64_t panel_size(int64_t depths) {
  return depths * SPLITS * 2 * TILE;
}

// Index of a tile's row in a panel.
template <int SPLITS>
constexpr int64_t place(int64_t depth, int64_t split, int64_t half, int64_t row) {
  return ((depth * SPLITS + split) * 2 + half) * TILE + row * DEPTH;
}

template <int SPLITS>
inline void transpose_and_keep(__m512i (&tile)[SPLITS][16], bool transposes, int64_t depth,
                               int64_t half, uint16_t* panel) {
  for (int split = 0; split < SPLITS; ++split) {
    if (transposes) transpose(tile[split]);
    for (int64_t row = 0; row < SIDE; ++row)
      _mm512_store_si512(panel + place<SPLITS>(depth, split, half, row), tile[split][row]);
  }
}

// Packs a panel of rows of a left factor, from some depth on.
template <int SPLITS, typename Value>
void pack_rows(const Matrix<Value>& from, int64_t first, int64_t depth, uint16_t* panel) {
  for (; depth < parts_of(from.columns, DEPTH); ++depth)
    for (int64_t row = 0; row < PANEL; ++row) {
      __m512i parts[SPLITS];
      from.template neighbours<SPLITS>(first + row, depth * DEPTH, parts);
      for (int split = 0; split < SPLITS; ++split)
        _mm512_store_si512(panel + place<SPLITS>(depth, split, row / SIDE, row % SIDE),
                           parts[split]);
    }
}

// Packs a panel of rows of a transposed right factor.
template <int SPLITS, typename Value>
void pack_transposed(const Matrix<Value>& from, int64_t row, uint16_t* panel) {
  __m512i tile[SPLITS][16];
  for (int64_t depth = 0; depth < parts_of(from.columns, DEPTH); ++depth)
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t r = 0; r < SIDE; ++r) {
        __m512i parts[SPLITS];
        from.template neighbours<SPLITS>(row + half * SIDE + r, depth * DEPTH, parts);
        for (int split = 0; split < SPLITS; ++split) tile[split][r] = parts[split];
      }
      transpose_and_keep<SPLITS>(tile, true, depth, half, panel);
    }
}

// Packs one depth, 32 rows, of all panels of columns: of a right factor, or of a transposed left
// one. Panels are `size` numbers apart.
template <int SPLITS, typename Value>
void pack_columns(const Matrix<Value>& from, int64_t row, int64_t depth, bool is_left,
                  uint16_t* panels, int64_t size) {
  __m512i tile[SPLITS][16];
  for (int64_t half = 0; half < 2 * parts_of(from.columns, PANEL); ++half) {
    from.template pairs<SPLITS>(row, half * SIDE, tile);
    transpose_and_keep<SPLITS>(tile, is_left, depth, half % 2, panels + half / 2 * size);
  }
}

// A panel of a left factor: packed, or bfloat16 read in place.
struct LeftPanel {
  const uint16_t* packed;
  // The first `depths` are read from the matrix itself, whose rows are `stride` numbers apart.
  const uint16_t* rows = nullptr;
  int64_t stride = 0, depths = 0;
};

inline void take_left(const uint16_t* tile, const uint16_t* other, int64_t bytes) {
  _tile_loadd(4, tile, bytes);
  _tile_loadd(5, other, bytes);
}
inline void take_left(const uint16_t* tile) { take_left(tile, tile + TILE, 64); }
// Whether right panels stay in the L1 cache, or pass through it while a left one stays.
enum class Right { STAYS, PASSES };
template <Right RIGHT>
inline void take_right(const uint16_t* tile) {
  if constexpr (RIGHT == Right::STAYS) {
    _tile_loadd(6, tile, 64);
    _tile_loadd(7, tile + TILE, 64);
  } else {
    _tile_stream_loadd(6, tile, 64);
    _tile_stream_loadd(7, tile + TILE, 64);
  }
}
inline void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Adds the product of two panels to a square of the result, `[PANEL][PANEL]`. Calls `between` at
// each depth: the processor does that work while it multiplies tiles.
template <int SPLITS, Right RIGHT, typename Between>
inline void multiply(const LeftPanel& left, const uint16_t* right, int64_t depths, bool from_zero,
                     float* square, const Between& between) {
  written_to_memory();
  constexpr int64_t bytes = PANEL * sizeof(float);
  float* below = square + SIDE * PANEL;
  if (from_zero) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, square, bytes);
    _tile_loadd(1, square + SIDE, bytes);
    _tile_loadd(2, below, bytes);
    _tile_loadd(3, below + SIDE, bytes);
  }
  constexpr int64_t STEP = SPLITS * 2 * TILE, NEXT = 2 * TILE;
  const uint16_t *packed = left.packed, *rows = left.rows;
  for (int64_t depth = 0; depth < depths; ++depth, packed += STEP, right += STEP) {
    if constexpr (SPLITS == 1) {
      if (depth < left.depths) {
        take_left(rows + depth * DEPTH, rows + depth * DEPTH + SIDE * left.stride,
                  left.stride * sizeof(uint16_t));
      } else {
        take_left(packed);
      }
      take_right<RIGHT>(right);
      add_products();
    } else {
      // Smallest products first; each step changes only one factor.
      take_left(packed + 2 * NEXT);
      take_right<RIGHT>(right);
      add_products();
      take_left(packed + NEXT);
      add_products();
      take_right<RIGHT>(right + NEXT);
      add_products();
      take_left(packed);
      add_products();
      take_right<RIGHT>(right + 2 * NEXT);
      add_products();
      take_right<RIGHT>(right);
      add_products();
    }
    between();
  }
  _tile_stored(0, square, bytes);
  _tile_stored(1, square + SIDE, bytes);
  _tile_stored(2, below, bytes);
  _tile_stored(3, below + SIDE, bytes);
  written_to_memory();
}

// A thread's buffer, kept for its next call.
template <int KEY>
inline uint16_t* scratch(int64_t numbers) {
  thread_local std::vector<uint16_t> memory;
  if (static_cast<int64_t>(memory.size()) < numbers + 32) memory.resize(numbers + 32);
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<uint16_t*>((at + 63) / 64 * 64);
}

// What is done to a product before it is written.
enum class Last {
  PLAIN,   // Nothing.
  RELU,    // Adds `bias`, then ReLU; NaN stays NaN.
  MASKED,  // 0 where `mask` is at most 0, else times `scale`; adds each column to `sums`.
};

// Where the result goes, and what is done to it; pointers to columns of the result.
template <typename Value>
struct Target {
  Value* to;
  int64_t stride;  // Of the rows of `to` and `mask`.
  const float* bias;
  const Value* mask;
  float* sums;
  float scale;
};

// Writes a square of the product, some rows at a time, while the next square is multiplied.
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
    // Local copies: the compiler cannot know that `to` does not alias this object.
    const auto [to, stride, bias, mask, sums, scale] = target_;
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
          values = kept(load(mask + at, here[half]), _mm512_mul_ps(values, _mm512_set1_ps(scale)));
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
