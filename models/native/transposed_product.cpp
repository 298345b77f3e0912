// `a^T b` of bfloat16 matrices that lie row by row, in float32, on a CPU with AMX: the gradient of a
// layer's weights. oneDNN's product of these layouts takes half as long again.
//
// Both are brought into the tiles' layout, some hundred rows at a time, so that they stay in cache.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define STAMPEDE_AMX 1
#endif

namespace {

using at::Tensor;

#ifdef STAMPEDE_AMX

// Rows and columns of the result in a tile, and rows of the factors that a tile multiplies.
constexpr int64_t SIDE = 16, DEPTH = 32;
constexpr int64_t TILE = SIDE * DEPTH;
// Rows of the factors that are packed at a time.
constexpr int64_t ROWS = 512;
constexpr int64_t DEPTHS = ROWS / DEPTH;
// The result is computed in squares of two tiles by two.
constexpr int64_t PANEL = 2 * SIDE;

// The system must be asked once a process.
bool may_use_tiles() {
  static const bool may = [] {
    constexpr long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
  }();
  return may;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int tile = 0; tile < 8; ++tile) bytes[tile] = 64, rows[tile] = SIDE;
  }
};

// The compiler need not know that the instructions for tiles read memory.
inline void written_to_memory() { asm volatile("" ::: "memory"); }

// Two rows of 16 numbers as 16 pairs; rows and columns that are not there are 0.
inline __m512i pairs(const uint16_t* from, int64_t stride, int64_t rows, __mmask16 columns) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i one = rows > 0 ? _mm256_maskz_loadu_epi16(columns, from) : zero;
  const __m256i two = rows > 1 ? _mm256_maskz_loadu_epi16(columns, from + stride) : zero;
  return _mm512_or_si512(_mm512_cvtepu16_epi32(one),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(two), 16));
}

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

// A factor `[rows, columns]`.
struct Factor {
  const uint16_t* values;
  int64_t rows, columns;
  explicit Factor(const Tensor& whole)
      : values(static_cast<const uint16_t*>(whole.const_data_ptr())),
        rows(whole.size(0)),
        columns(whole.size(1)) {}
  int64_t panels() const { return (columns + PANEL - 1) / PANEL; }

  // Tiles of DEPTH rows from `first` on, up to `stop`, `[panels][2][TILE]` with `DEPTHS` tiles between panels'
  // halves: as the left factor's, transposed, or as the right one's.
  void pack(int64_t first, int64_t stop, int64_t depth, bool is_left, uint16_t* to) const {
    for (int64_t c = 0; c < 2 * panels(); ++c) {
      const int64_t there = std::clamp<int64_t>(columns - c * SIDE, 0, SIDE);
      const auto mask = static_cast<__mmask16>((1u << there) - 1);
      const uint16_t* from = values + first * columns + c * SIDE;
      __m512i v[16];
      for (int64_t p = 0; p < 16; ++p)
        v[p] = pairs(from + 2 * p * columns, columns, stop - first - 2 * p, mask);
      if (is_left) transpose(v);
      uint16_t* tile = to + ((c / 2 * DEPTHS + depth) * 2 + c % 2) * TILE;
      for (int64_t p = 0; p < 16; ++p) _mm512_store_si512(tile + p * DEPTH, v[p]);
    }
  }
};

// Adds `depths` products of tiles to a square of the result, whose rows have `stride` numbers.
void add_square(const uint16_t* left, const uint16_t* right, int64_t depths, float* square,
                int64_t stride) {
  written_to_memory();
  const int64_t bytes = stride * sizeof(float);
  float* below = square + SIDE * stride;
  _tile_loadd(0, square, bytes);
  _tile_loadd(1, square + SIDE, bytes);
  _tile_loadd(2, below, bytes);
  _tile_loadd(3, below + SIDE, bytes);
  for (int64_t depth = 0; depth < depths; ++depth, left += 2 * TILE, right += 2 * TILE) {
    _tile_loadd(4, left, 64);
    _tile_loadd(5, left + TILE, 64);
    _tile_loadd(6, right, 64);
    _tile_loadd(7, right + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, square, bytes);
  _tile_stored(1, square + SIDE, bytes);
  _tile_stored(2, below, bytes);
  _tile_stored(3, below + SIDE, bytes);
}

uint16_t* aligned(std::vector<uint16_t>& memory) {
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<uint16_t*>((at + 63) / 64 * 64);
}

// Adds the product of some rows of the factors to a result whose rows have `stride` numbers.
void multiply(const Factor& a, const Factor& b, int64_t begin, int64_t end, float* result,
              int64_t stride) {
  const auto room = [](const Factor& factor) { return factor.panels() * DEPTHS * 2 * TILE + 32; };
  // Kept for the next call of this thread.
  thread_local std::vector<uint16_t> of_a, of_b;
  of_a.resize(std::max<size_t>(of_a.size(), room(a)));
  of_b.resize(std::max<size_t>(of_b.size(), room(b)));
  uint16_t *left = aligned(of_a), *right = aligned(of_b);
  const TileConfig config;
  written_to_memory();
  _tile_loadconfig(&config);
  for (int64_t first = begin; first < end; first += ROWS) {
    const int64_t depths = (std::min(ROWS, end - first) + DEPTH - 1) / DEPTH;
    for (int64_t depth = 0; depth < depths; ++depth) {
      a.pack(first + depth * DEPTH, end, depth, true, left);
      b.pack(first + depth * DEPTH, end, depth, false, right);
    }
    for (int64_t i = 0; i < a.panels(); ++i)
      for (int64_t j = 0; j < b.panels(); ++j)
        add_square(left + i * DEPTHS * 2 * TILE, right + j * DEPTHS * 2 * TILE, depths,
                   result + i * PANEL * stride + j * PANEL, stride);
  }
  _tile_release();
}

bool can_multiply_transposed() { return may_use_tiles(); }

// `[columns of a, columns of b]` float32, of `a` and `b` with as many rows, bfloat16, contiguous.
Tensor transposed_product(const Tensor& a, const Tensor& b) {
  for (const Tensor& factor : {a, b})
    TORCH_CHECK(factor.scalar_type() == at::kBFloat16 && factor.dim() == 2 &&
                    factor.is_contiguous() && factor.size(0) == a.size(0),
                "factors are contiguous bfloat16 [rows, columns] with the same rows");
  TORCH_CHECK(may_use_tiles(), "the system does not let this process use AMX");
  const Factor left(a), right(b);
  // Each thread has rows and a sum of its own, so that none waits for what another has packed.
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (left.rows + ROWS - 1) / ROWS);
  Tensor sums = at::zeros(
      {std::max<int64_t>(threads, 1), left.panels() * PANEL, right.panels() * PANEL}, at::kFloat);
  float* each = sums.data_ptr<float>();
  const int64_t share = threads ? (left.rows + threads - 1) / threads : 0;
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread)
      multiply(left, right, thread * share, std::min((thread + 1) * share, left.rows),
               each + thread * sums.stride(0), sums.stride(1));
  });
  return sums.narrow(1, 0, left.columns).narrow(2, 0, right.columns).sum(0);
}

#else

bool can_multiply_transposed() { return false; }

Tensor transposed_product(const Tensor&, const Tensor&) {
  TORCH_CHECK(false, "this CPU has no AMX");
}

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede_dense, library) {
  library.def("can_multiply_transposed", &can_multiply_transposed);
  library.def("transposed_product", &transposed_product);
}
