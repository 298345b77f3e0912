// Replays the steps of Adam that rows have missed, with L2 and decay, on a CPU.
#include <cfloat>
#include <cmath>

#include "adam.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// Elements of a vector register, and of a replay: six AVX-512 registers for each of weight and
// moments, so that the others hide the latency of one.
constexpr int64_t VECTOR = 16;
constexpr int64_t LANES = 6 * VECTOR;
// Rows whose steps are replayed together: their weights and moments stay in cache.
constexpr int64_t BLOCK_ROWS = 4096;

// A row and the step it is at.
struct Behind {
  int64_t row;
  int32_t at;
};

// Steps that rows have missed: `steps[s - first]` follows step s.
struct Missed {
  const Array array;
  const Betas betas;
  const float decay;
  const Step* steps;
  const int32_t first, now;

  Missed(const Array& array_, const Tensor& steps_, int64_t first_, int64_t now_, double b1,
         double b2, double l2)
      : array(array_), betas(b1, b2), decay(2.0 * l2), steps(steps_of(steps_)), first(first_),
        now(now_) {
    TORCH_CHECK(now - first <= steps_.size(0), "steps are missing");
  }

  // Whether `steps` reach back to the step a row is at.
  bool knows(int32_t at) const { return at >= first; }

  static void check(bool known) {
    TORCH_CHECK(known, "a row is at an earlier step than the steps given");
  }

  // Replays the steps after `from` up to `to` on whole vectors, at most LANES elements.
  void replay(float* w, float* m, float* v, int64_t elements, int32_t from, int32_t to) const {
    switch ((elements + VECTOR - 1) / VECTOR) {
      case 1: return replay_vectors<1>(w, m, v, from, to);
      case 2: return replay_vectors<2>(w, m, v, from, to);
      case 3: return replay_vectors<3>(w, m, v, from, to);
      case 4: return replay_vectors<4>(w, m, v, from, to);
      case 5: return replay_vectors<5>(w, m, v, from, to);
      default: return replay_vectors<6>(w, m, v, from, to);
    }
  }

#ifdef __AVX512F__
  // An exact square root and division would take most of a step's time. Here both are 14-bit
  // approximations with one Newton step, with an error of one or two units in the last place.
  template <int VECTORS>
  void replay_vectors(float* w_, float* m_, float* v_, int32_t from, int32_t to) const {
    const auto all = [](float value) { return _mm512_set1_ps(value); };
    const __m512 one = all(betas.one), two = all(betas.two), to_first = all(betas.rest_one * decay),
                 to_second = all(betas.rest_two * decay * decay), unit = all(1.0f),
                 twice = all(2.0f), least = all(FLT_MIN);
    __m512 w[VECTORS], m[VECTORS], v[VECTORS];
    for (int k = 0; k < VECTORS; ++k) {
      w[k] = _mm512_loadu_ps(w_ + k * VECTOR);
      m[k] = _mm512_loadu_ps(m_ + k * VECTOR);
      v[k] = _mm512_loadu_ps(v_ + k * VECTOR);
    }
    for (int32_t s = from; s < to; ++s) {
      const Step& step = steps[s - first];
      const __m512 keep = all(step.keep), twice_alpha = all(2.0f * step.alpha),
                   twice_eps = all(2.0f * std::max(step.eps, FLT_MIN));
#pragma GCC unroll 6
      for (int k = 0; k < VECTORS; ++k) {
        m[k] = _mm512_fmadd_ps(one, m[k], _mm512_mul_ps(to_first, w[k]));
        v[k] = _mm512_fmadd_ps(_mm512_mul_ps(to_second, w[k]), w[k], _mm512_mul_ps(two, v[k]));
        // 0 has no reciprocal root; its root becomes 0 by the product.
        const __m512 inverse = _mm512_rsqrt14_ps(_mm512_max_ps(least, v[k]));
        const __m512 root = _mm512_mul_ps(v[k], inverse);
        // sqrt(v) = root * (1 + error / 2).
        const __m512 error = _mm512_fnmadd_ps(root, inverse, unit);
        const __m512 twice_divisor =
            _mm512_fmadd_ps(root, error, _mm512_fmadd_ps(twice, root, twice_eps));
        const __m512 quotient = _mm512_rcp14_ps(twice_divisor);
        const __m512 missing = _mm512_fnmadd_ps(twice_divisor, quotient, unit);
        const __m512 moved = _mm512_mul_ps(_mm512_mul_ps(twice_alpha, m[k]), quotient);
        w[k] = _mm512_fnmadd_ps(moved, missing, _mm512_fmsub_ps(keep, w[k], moved));
      }
    }
    for (int k = 0; k < VECTORS; ++k) {
      _mm512_storeu_ps(w_ + k * VECTOR, w[k]);
      _mm512_storeu_ps(m_ + k * VECTOR, m[k]);
      _mm512_storeu_ps(v_ + k * VECTOR, v[k]);
    }
  }
#else
  template <int VECTORS>
  void replay_vectors(float* __restrict w, float* __restrict m, float* __restrict v, int32_t from,
                      int32_t to) const {
    for (int32_t s = from; s < to; ++s) {
      const Step step = steps[s - first];
#pragma omp simd
      for (int64_t e = 0; e < VECTORS * VECTOR; ++e)
        adam(w[e], m[e], v[e], decay * w[e], betas, step);
    }
  }
#endif

  // Replays pieces of `width` elements from several places together.
  template <typename Where>
  void replay_pieces(int64_t pieces, int64_t width, const Where& where, int32_t from,
                     int32_t to) const {
    alignas(64) float w[LANES] = {}, m[LANES] = {}, v[LANES] = {};
    for (int64_t k = 0; k < pieces; ++k) {
      const int64_t at = where(k);
      std::copy_n(array.weights + at, width, w + k * width);
      std::copy_n(array.m + at, width, m + k * width);
      std::copy_n(array.v + at, width, v + k * width);
    }
    replay(w, m, v, pieces * width, from, to);
    for (int64_t k = 0; k < pieces; ++k) {
      const int64_t at = where(k);
      std::copy_n(w + k * width, width, array.weights + at);
      std::copy_n(m + k * width, width, array.m + at);
      std::copy_n(v + k * width, width, array.v + at);
    }
  }

  // Replays a few rows that are at one step; wide rows in several pieces.
  void replay_rows(const Behind* rows, int64_t count, int32_t from, int32_t to) const {
    for (int64_t column = 0; column < array.dim; column += LANES)
      replay_pieces(
          count, std::min(array.dim - column, LANES),
          [&](int64_t k) { return rows[k].row * array.dim + column; }, from, to);
  }

  // Replays neighbouring rows that are at one step, as one stretch of elements.
  void replay_stretch(int64_t first_row, int64_t stop_row, int32_t from) const {
    const int64_t stop = stop_row * array.dim;
    int64_t at = first_row * array.dim;
    for (; at + LANES <= stop; at += LANES)
      replay(array.weights + at, array.m + at, array.v + at, LANES, from, now);
    if (at < stop) replay_pieces(1, stop - at, [&](int64_t) { return at; }, from, now);
  }

  // Replays rows that are sorted by the step they are at.
  void catch_up(const Behind* rows, int64_t n) const {
    const int64_t together = std::max<int64_t>(LANES / array.dim, 1);
    for (int64_t k = 0; k < n; k += together) {
      for (int64_t j = k + together; j < std::min(k + 2 * together, n); ++j)
        array.prefetch(rows[j].row);
      const int64_t count = std::min(together, n - k);
      const int32_t latest = rows[k + count - 1].at;
      for (int64_t j = k; j < k + count && rows[j].at < latest; ++j)
        replay_rows(rows + j, 1, rows[j].at, latest);
      replay_rows(rows + k, count, latest, now);
    }
  }

  // Rows sorted by the step they are at, oldest first.
  std::vector<Behind> in_order(const std::vector<Behind>& rows) const {
    std::vector<int64_t> next(now - first + 1);
    for (const Behind& row : rows) ++next[row.at - first + 1];
    for (size_t s = 1; s < next.size(); ++s) next[s] += next[s - 1];
    std::vector<Behind> ordered(rows.size());
    for (const Behind& row : rows) ordered[next[row.at - first]++] = row;
    return ordered;
  }

  // Replays a block of neighbouring rows. If most are at one step, the block is replayed as one
  // stretch; the others are caught up and saved before, and copied back after. Returns false, with
  // nothing changed, if a row is too far behind.
  bool catch_up_block(const int32_t* at, int64_t begin, int64_t end) const {
    const int32_t low = *std::min_element(at + begin, at + end);
    if (low >= now) return true;
    if (!knows(low)) return false;
    std::vector<Behind> others;
    for (int64_t row = begin; row < end; ++row)
      if (at[row] > low) others.push_back({row, at[row]});
    if (2 * static_cast<int64_t>(others.size()) > end - begin) {
      std::vector<Behind> behind;
      for (int64_t row = begin; row < end; ++row)
        if (at[row] < now) behind.push_back({row, at[row]});
      catch_up(in_order(behind).data(), behind.size());
      return true;
    }
    const int64_t dim = array.dim;
    std::vector<Behind> late;
    for (const Behind& row : others)
      if (row.at < now) late.push_back(row);
    catch_up(in_order(late).data(), late.size());
    std::vector<float> kept(others.size() * dim * 3);
    float* to = kept.data();
    for (const Behind& row : others)
      for (const float* from : {array.weights, array.m, array.v})
        to = std::copy_n(from + row.row * dim, dim, to);
    replay_stretch(begin, end, low);
    const float* from = kept.data();
    for (const Behind& row : others)
      for (float* whole : {array.weights, array.m, array.v})
        std::copy_n(from, dim, whole + row.row * dim), from += dim;
    return true;
  }
};

// Brings rows [first_row, stop_row) to step `now`; `steps` follow step `first`; `last` are the
// steps that rows are at.
void catch_up_range_(Tensor weights, Tensor m, Tensor v, Tensor last, int64_t first_row,
                     int64_t stop_row, const Tensor& steps, int64_t first, int64_t now, double b1,
                     double b2, double l2) {
  const Missed missed(Array(weights, m, v), steps, first, now, b1, b2, l2);
  int32_t* at = last.data_ptr<int32_t>();
  bool known = true;
  in_blocks(stop_row - first_row, BLOCK_ROWS, [&](int64_t begin, int64_t end) {
    begin += first_row, end += first_row;
    if (missed.catch_up_block(at, begin, end))
      std::fill(at + begin, at + end, missed.now);
    else
      __atomic_store_n(&known, false, __ATOMIC_RELAXED);
  });
  Missed::check(known);
}

// Brings the rows of a lookup to step `now`.
void catch_up_lookup_(Tensor weights, Tensor m, Tensor v, Tensor last, const Tensor& ids,
                      const Tensor& offsets, const Tensor& first_rows, const Tensor& steps,
                      int64_t first, int64_t now, double b1, double b2, double l2) {
  const Missed missed(Array(weights, m, v), steps, first, now, b1, b2, l2);
  const Lookup lookup(ids, offsets, first_rows, missed.array.rows);
  int32_t* at = last.data_ptr<int32_t>();
  const auto chunks = lookup.chunks();
  std::vector<Behind> behind;
  with_types(lookup, [&](auto ids, auto) {
    in_parallel(chunks.size(), [&](int64_t c) {
      const Lookup::Table table = lookup.table(chunks[c].feature);
      std::vector<Behind> mine;
      for (int64_t i = chunks[c].first; i < chunks[c].stop; ++i) {
        if (i + WAITING < chunks[c].stop) __builtin_prefetch(at + table.row(ids[i + WAITING]));
        const int64_t row = table.row(ids[i]);
        if (__atomic_load_n(at + row, __ATOMIC_RELAXED) >= missed.now) continue;
        // The thread whose exchange changes the step takes the row.
        const int32_t from = __atomic_exchange_n(at + row, missed.now, __ATOMIC_RELAXED);
        if (from < missed.now) mine.push_back({row, from});
      }
#pragma omp critical(stampede_behind)
      behind.insert(behind.end(), mine.begin(), mine.end());
    });
  });
  for (const Behind& row : behind) Missed::check(missed.knows(row.at));
  const std::vector<Behind> ordered = missed.in_order(behind);
  in_blocks(ordered.size(), ROWS, [&](int64_t begin, int64_t end) {
    missed.catch_up(ordered.data() + begin, end - begin);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede, library) {
  library.def("catch_up_lookup_", &catch_up_lookup_);
  library.def("catch_up_range_", &catch_up_range_);
}
