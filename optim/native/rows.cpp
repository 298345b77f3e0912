// Rows of embedding tables on a CPU: pooling them, and summing a batch's gradients by row.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <tuple>
#include <type_traits>

#include "lookup.h"

namespace {

// Which rows occur, as bits, with a bit for every 64 words that hold any: the distinct rows come
// out in order without a sort, at a cost that grows with the batch and hardly with the table.
struct Marks {
  uint64_t *summary, *words;
  int64_t summaries;

  // `workspace` is zero, and is again after `clear`.
  Marks(const Tensor& workspace, int64_t rows)
      : summary(reinterpret_cast<uint64_t*>(workspace.data_ptr<int64_t>())),
        summaries((rows + 4095) / 4096) {
    words = summary + summaries;
    TORCH_CHECK(workspace.numel() >= summaries * 65, "the workspace is too small");
  }

  static void set(uint64_t& word, int64_t bit) {
    const uint64_t mask = uint64_t{1} << bit;
    if (!(__atomic_load_n(&word, __ATOMIC_RELAXED) & mask))
      __atomic_fetch_or(&word, mask, __ATOMIC_RELAXED);
  }
  void mark(int64_t row) {
    set(words[row >> 6], row & 63);
    set(summary[row >> 12], (row >> 6) & 63);
  }
  template <typename Do>
  void each_word(const Do& visit) const {
    for (int64_t s = 0; s < summaries; ++s)
      for (uint64_t left = summary[s]; left; left &= left - 1)
        visit(s * 64 + __builtin_ctzll(left));
  }
  void clear() {
    each_word([&](int64_t word) { words[word] = 0; });
    std::fill(summary, summary + summaries, 0);
  }
};

// Calls with the columns of a row as a constant where they are usual ones, and else with 0.
template <typename Call>
auto with_width(int64_t dim, const Call& call) {
  switch (dim) {
    case 4: return call(std::integral_constant<int, 4>());
    case 8: return call(std::integral_constant<int, 8>());
    case 12: return call(std::integral_constant<int, 12>());
    case 16: return call(std::integral_constant<int, 16>());
    case 20: return call(std::integral_constant<int, 20>());
    case 32: return call(std::integral_constant<int, 32>());
    case 64: return call(std::integral_constant<int, 64>());
    default: return call(std::integral_constant<int, 0>());
  }
}

// Samples whose bags are pooled one feature after the other, so that their output stays in cache.
constexpr int64_t SAMPLES = 128;

template <int WIDTH>
inline void add_row(float* to, const float* from, float factor, bool scaled, int64_t dim) {
  const int64_t width = WIDTH ? WIDTH : dim;
  if (scaled)
    for (int64_t d = 0; d < width; ++d) to[d] = fma(factor, from[d], to[d]);
  else
    for (int64_t d = 0; d < width; ++d) to[d] += from[d];
}

struct Source {
  const float* grad;
  int64_t stride, dim;
  bool pooled, mean;
  const float* weights;
};

template <int WIDTH>
void add_feature(const Lookup& lookup, const Source& source, int64_t f, int64_t part,
                 int64_t parts, const uint64_t* words, const int32_t* before, float* sums,
                 int64_t* counts) {
  const int64_t dim = source.dim, start = lookup.offset(0);
  struct {
    const float* from;
    int64_t at;
    float factor;
  } waiting[WAITING];
  int64_t count = 0;
  const auto add_waiting = [&] {
    for (int64_t k = 0; k < count; ++k) {
      const auto& one = waiting[k];
      ++counts[one.at];
      add_row<WIDTH>(sums + one.at * dim, one.from, one.factor, source.weights || source.mean, dim);
    }
    count = 0;
  };
  for (int64_t b = 0; b < lookup.bags; ++b) {
    const int64_t bag = f * lookup.bags + b;
    const int64_t first = lookup.offset(bag) - start, stop = lookup.offset(bag + 1) - start;
    for (int64_t i = first; i < stop; ++i) {
      const int64_t row = lookup.id(i) + lookup.first_rows[f];
      const uint64_t below = words[row >> 6] & ((uint64_t{1} << (row & 63)) - 1);
      const int64_t at = before[row >> 6] + __builtin_popcountll(below);
      if (parts > 1 && at % parts != part) continue;
      const float* from =
          source.grad + (source.pooled ? b * source.stride + f * dim : i * source.stride);
      float factor = source.weights ? source.weights[i] : 1.0f;
      if (source.mean) factor *= 1.0f / static_cast<float>(stop - first);
      for (const float* soon : {from, const_cast<const float*>(sums) + at * dim}) {
        __builtin_prefetch(soon);
        __builtin_prefetch(soon + dim - 1);
      }
      waiting[count++] = {from, at, factor};
      if (count == WAITING) add_waiting();
    }
  }
  add_waiting();
}

// Distinct rows in order, the sums of their gradients, and how often each occurs.
std::tuple<Tensor, Tensor, Tensor> sum_by_row(const Tensor& ids, const Tensor& offsets,
                                              const Tensor& first_rows, int64_t rows,
                                              const Tensor& grad, int64_t dim, bool pooled,
                                              bool mean, const std::optional<Tensor>& weights,
                                              const Tensor& workspace, Tensor before) {
  const Lookup lookup(ids, offsets, first_rows, rows);
  TORCH_CHECK(grad.scalar_type() == at::kFloat && grad.dim() == 2 && grad.stride(1) == 1,
              "gradients are float32 with contiguous rows");
  Marks marks(workspace, rows);
  int32_t* counted = before.data_ptr<int32_t>();
  bool outside = false;
  const auto chunks = lookup.chunks();
  in_parallel(chunks.size(), [&](int64_t c) {
    const int64_t f = chunks[c].feature, first_row = lookup.first_rows[f];
    const int64_t size = lookup.stop_row(f) - first_row;
    for (int64_t i = chunks[c].first; i < chunks[c].stop; ++i) {
      const int64_t id = lookup.id(i);
      if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(size))
        __atomic_store_n(&outside, true, __ATOMIC_RELAXED);
      else
        marks.mark(first_row + id);
    }
  });
  if (outside) {
    marks.clear();
    TORCH_CHECK_INDEX(false, "an id lies outside its table");
  }
  int64_t distinct = 0;
  marks.each_word([&](int64_t word) {
    counted[word] = distinct;
    distinct += __builtin_popcountll(marks.words[word]);
  });
  Tensor found = at::empty({distinct}, at::kLong), counts = at::zeros({distinct}, at::kLong);
  Tensor sums = at::zeros({distinct, dim}, at::kFloat);
  int64_t* next = found.data_ptr<int64_t>();
  marks.each_word([&](int64_t word) {
    for (uint64_t left = marks.words[word]; left; left &= left - 1)
      *next++ = word * 64 + __builtin_ctzll(left);
  });

  // A table's features in one task: they may share rows. Few tables are split by rows.
  std::vector<int64_t> firsts;
  for (int64_t f = 0; f < lookup.features; ++f)
    if (f == 0 || lookup.first_rows[f] != lookup.first_rows[f - 1]) firsts.push_back(f);
  const int64_t tables = firsts.size(), threads = at::get_num_threads();
  firsts.push_back(lookup.features);
  const int64_t parts = tables >= 2 * threads ? 1 : (2 * threads + tables - 1) / tables;
  const Source source{grad.const_data_ptr<float>(), grad.stride(0), dim, pooled, mean,
                      lookup.factors(weights)};
  const auto add = with_width(dim, [](auto width) { return &add_feature<width.value>; });
  in_parallel(tables * parts, [&](int64_t task) {
    for (int64_t f = firsts[task / parts]; f < firsts[task / parts + 1]; ++f)
      add(lookup, source, f, task % parts, parts, marks.words, counted, sums.data_ptr<float>(),
          counts.data_ptr<int64_t>());
  });
  marks.clear();
  return {found, sums, counts};
}

// Whether bags follow each other from the first id to the last, and each is inside its table.
bool is_sound(const Tensor& ids, const Tensor& offsets, const Tensor& first_rows, int64_t rows) {
  const Lookup lookup(ids, offsets, first_rows, rows);
  const int64_t bags = lookup.features * lookup.bags;
  bool sound = lookup.offset(0) == 0 && lookup.offset(bags) == lookup.occurrences;
  in_parallel((bags + CHUNK - 1) / CHUNK, [&](int64_t chunk) {
    bool ascending = true;
    for (int64_t bag = chunk * CHUNK; bag < std::min((chunk + 1) * CHUNK, bags); ++bag)
      ascending &= lookup.offset(bag) <= lookup.offset(bag + 1);
    if (!ascending) __atomic_store_n(&sound, false, __ATOMIC_RELAXED);
  });
  if (!sound) return false;
  const auto chunks = lookup.chunks();
  in_parallel(chunks.size(), [&](int64_t c) {
    const int64_t f = chunks[c].feature, size = lookup.stop_row(f) - lookup.first_rows[f];
    bool inside = true;
    for (int64_t i = chunks[c].first; i < chunks[c].stop; ++i)
      inside &= static_cast<uint64_t>(lookup.id(i)) < static_cast<uint64_t>(size);
    if (!inside) __atomic_store_n(&sound, false, __ATOMIC_RELAXED);
  });
  return sound;
}

// The pooled rows of a lookup, written to `output` `[bags, features * dim]`.
template <int WIDTH>
void pool(const Lookup& lookup, const float* rows, int64_t dim, bool mean, const float* weights,
          float* output, int64_t stride) {
  const int64_t start = lookup.offset(0);
  in_parallel((lookup.bags + SAMPLES - 1) / SAMPLES, [&](int64_t block) {
    const int64_t begin = block * SAMPLES, end = std::min(begin + SAMPLES, lookup.bags);
    for (int64_t f = 0; f < lookup.features; ++f) {
      const int64_t first_row = lookup.first_rows[f], size = lookup.stop_row(f) - first_row;
      const auto row_of = [&](int64_t i) { return rows + lookup.row(i, first_row, size) * dim; };
      const int64_t last = lookup.offset(f * lookup.bags + end) - start;
      int64_t fetched = lookup.offset(f * lookup.bags + begin) - start;
      for (int64_t b = begin; b < end; ++b) {
        const int64_t bag = f * lookup.bags + b;
        const int64_t first = lookup.offset(bag) - start, stop = lookup.offset(bag + 1) - start;
        float* to = output + b * stride + f * dim;
        std::fill_n(to, WIDTH ? WIDTH : dim, 0.0f);
        for (int64_t i = first; i < stop; ++i) {
          for (; fetched < std::min(i + WAITING, last); ++fetched) {
            const float* soon = row_of(fetched);
            __builtin_prefetch(soon);
            __builtin_prefetch(soon + dim - 1);
          }
          float factor = weights ? weights[i] : 1.0f;
          if (mean) factor *= 1.0f / static_cast<float>(stop - first);
          add_row<WIDTH>(to, row_of(i), factor, weights || mean, dim);
        }
      }
    }
  });
}

void pool_rows_(const Tensor& rows, const Tensor& ids, const Tensor& offsets,
                const Tensor& first_rows, bool mean, const std::optional<Tensor>& weights,
                Tensor output) {
  const Lookup lookup(ids, offsets, first_rows, rows.size(0));
  const int64_t dim = rows.size(1);
  TORCH_CHECK(rows.is_contiguous() && rows.scalar_type() == at::kFloat, "rows are float32");
  TORCH_CHECK(output.scalar_type() == at::kFloat && output.stride(1) == 1 &&
                  output.size(0) == lookup.bags && output.size(1) == lookup.features * dim,
              "the output is float32 [bags, features * dim] with contiguous rows");
  with_width(dim, [&](auto width) {
    pool<width.value>(lookup, rows.const_data_ptr<float>(), dim, mean, lookup.factors(weights),
                      output.data_ptr<float>(), output.stride(0));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede, library) {
  library.def("is_sound", &is_sound);
  library.def("pool_rows_", &pool_rows_);
  library.def("sum_by_row", &sum_by_row);
}
