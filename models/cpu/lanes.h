// Shared by the kernels of the dense layers: types, blocks of samples, vectors of numbers. Callers
// pass contiguous tensors on the CPU, as autograd's functions in Python make them.
//
// Sums over samples do not depend on the number of threads: each block of rows has its own sum, and
// these are added in order.
#pragma once

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

// Calls with a number of the type that a float32 or bfloat16 tensor stores.
template <typename Call>
void with_type(const at::Tensor& tensor, const Call& call) {
  if (tensor.scalar_type() == at::kFloat)
    call(float());
  else
    call(uint16_t());
}
template <typename Value>
const Value* read(const at::Tensor& tensor) {
  return static_cast<const Value*>(tensor.const_data_ptr());
}
template <typename Value>
Value* written(const at::Tensor& tensor) {
  return static_cast<Value*>(tensor.data_ptr());
}

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
// To the nearest bfloat16, ties to even.
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
inline void add_up(const float* sums, int64_t blocks, int64_t columns, float* sum) {
  std::fill(sum, sum + columns, 0.0f);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t c = 0; c < columns; ++c) sum[c] += sums[block * columns + c];
}

// Width of a vector. `Lanes` is a vector of floats, `Part` masks the lanes that are in memory.
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
  Lanes plus_product(Lanes a, Lanes b) const {
    return Lanes(_mm512_fmadd_ps(a.values, b.values, values));
  }
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
// Vectors of the processor's width, by an extension of GCC and Clang.
struct Lanes {
#ifdef __AVX__
  static constexpr int BYTES = 32;
#else
  static constexpr int BYTES = 16;
#endif
  static constexpr int64_t COUNT = LANES * sizeof(float) / BYTES;
  typedef float Vector __attribute__((vector_size(BYTES)));
  typedef Vector Anywhere __attribute__((aligned(4), may_alias));
  Vector values[COUNT] = {};
  Lanes() = default;
  explicit Lanes(float value) {
    for (Vector& one : values) one = value - Vector{};
  }
  Lanes operator+(const Lanes& b) const { return each(b, [](auto x, auto y) { return x + y; }); }
  Lanes operator-(const Lanes& b) const { return each(b, [](auto x, auto y) { return x - y; }); }
  Lanes operator*(const Lanes& b) const { return each(b, [](auto x, auto y) { return x * y; }); }
  // Rounded once, where the processor can.
  Lanes plus_product(const Lanes& a, const Lanes& b) const {
#if defined(__AVX__) && defined(__FMA__)
    Lanes found;
    for (int64_t k = 0; k < COUNT; ++k)
      found.values[k] = _mm256_fmadd_ps(a.values[k], b.values[k], values[k]);
    return found;
#else
    return *this + a * b;
#endif
  }
  template <typename Do>
  Lanes each(const Lanes& b, const Do& compute) const {
    Lanes found;
    for (int64_t k = 0; k < COUNT; ++k) found.values[k] = compute(values[k], b.values[k]);
    return found;
  }
  Lanes where_above_0(const Lanes& b) const {
    return each(b, [](auto x, auto y) { return y <= 0.0f ? Vector{} : x; });
  }
  float added_up() const {
    float sum = 0.0f;
    for (int64_t k = 0; k < LANES; ++k) sum += values[k * COUNT / LANES][k % (LANES / COUNT)];
    return sum;
  }
};

struct Part {
  int64_t first = 0, stop;
  explicit Part(int64_t count) : stop(std::clamp<int64_t>(count, 0, LANES)) {}
  static Part only(int64_t lane) {
    Part part(0 <= lane && lane < LANES ? lane + 1 : 0);
    part.first = std::max<int64_t>(part.stop - 1, 0);
    return part;
  }
  // Known to a compiler, the number of lanes makes vectors of loops.
  bool is_whole() const { return first == 0 && stop == LANES; }
  // 0 in the other lanes.
  Lanes of(const Lanes& lanes) const {
    if (is_whole()) return lanes;
    float all[LANES];
    Part(LANES).store(all, lanes);
    return load(all);
  }
  Lanes load(const float* from) const {
    Lanes lanes;
    if (is_whole()) {
      const Lanes::Anywhere* vectors = reinterpret_cast<const Lanes::Anywhere*>(from);
      for (int64_t k = 0; k < Lanes::COUNT; ++k) lanes.values[k] = vectors[k];
      return lanes;
    }
    float found[LANES] = {};
    for (int64_t k = first; k < stop; ++k) found[k] = from[k];
    return Part(LANES).load(found);
  }
  Lanes load(const uint16_t* from) const {
    float found[LANES] = {};
    if (is_whole())
      for (int64_t k = 0; k < LANES; ++k) found[k] = as_float(from[k]);
    else
      for (int64_t k = first; k < stop; ++k) found[k] = as_float(from[k]);
    return Part(LANES).load(found);
  }
  void store(float* to, const Lanes& lanes) const {
    if (is_whole()) {
      Lanes::Anywhere* vectors = reinterpret_cast<Lanes::Anywhere*>(to);
      for (int64_t k = 0; k < Lanes::COUNT; ++k) vectors[k] = lanes.values[k];
      return;
    }
    float all[LANES];
    Part(LANES).store(all, lanes);
    for (int64_t k = first; k < stop; ++k) to[k] = all[k];
  }
  void store(uint16_t* to, const Lanes& lanes) const {
    float all[LANES];
    Part(LANES).store(all, lanes);
    if (is_whole())
      for (int64_t k = 0; k < LANES; ++k) rounded_to(to[k], all[k]);
    else
      for (int64_t k = first; k < stop; ++k) rounded_to(to[k], all[k]);
  }
};
#endif

}  // namespace
