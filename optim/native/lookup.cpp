// Rows of embedding tables on a CPU: pooling them, and summing a batch's gradients by row.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "lookup.h"

namespace {

// A bit for each row that occurs, and a summary bit for each word of 64 rows. The distinct rows
// come out in order without a sort, at a cost that grows with the batch and hardly with the table.
struct Marks {
  uint64_t *summary, *words;
  int64_t summaries;

  // `workspace` must be zero; `clear` makes it zero again.
  Marks(const Tensor& workspace, int64_t rows)
      : summary(reinterpret_cast<uint64_t*>(workspace.data_ptr<int64_t>())),
        summaries((rows + 4095) / 4096) {
    words = summary + summaries;
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

// Samples handled one feature after the other, so that output and gradient stay in cache. The last
// digits of sums depend on this number.
constexpr int64_t SAMPLES = 128;
// Tasks for each thread, to balance tasks of unequal length.
constexpr int64_t TASKS = 2;

template <int WIDTH>
inline void add_row(float* __restrict to, const float* __restrict from, float factor, bool scaled, int64_t dim) {
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

// Adds gradients to the sums of their rows, which it prefetches.
template <int WIDTH>
class RowAdder {
 public:
  RowAdder(const Lookup& lookup, const Source& source, const uint64_t* words, const int32_t* before,
         float* sums, int64_t* counts)
      : lookup_(lookup),
        source_(source),
        words_(words),
        before_(before),
        sums_(sums),
        counts_(counts) {}

  // Adds some bags of a feature, only for rows whose place modulo `parts` is `part`.
  template <typename Ids, typename Offsets>
  void bags(const Ids& ids, const Offsets& offsets, int64_t f, int64_t begin, int64_t end,
            int64_t part, int64_t parts) {
    const int64_t dim = source_.dim, start = offsets[0], first_row = lookup_.first_rows[f];
    const bool pooled = source_.pooled;
    const float* grad = source_.grad + (pooled ? f * dim : 0);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t bag = f * lookup_.bags + b;
      const int64_t first = offsets[bag] - start, stop = offsets[bag + 1] - start;
      for (int64_t i = first; i < stop; ++i) {
        const int64_t row = ids[i] + first_row;
        const uint64_t below = words_[row >> 6] & ((uint64_t{1} << (row & 63)) - 1);
        const int64_t at = before_[row >> 6] + __builtin_popcountll(below);
        if (parts > 1 && at % parts != part) continue;
        const float* from = grad + (pooled ? b : i) * source_.stride;
        float factor = source_.weights ? source_.weights[i] : 1.0f;
        if (source_.mean) factor *= 1.0f / static_cast<float>(stop - first);
        for (const float* soon : {from, const_cast<const float*>(sums_) + at * dim}) {
          __builtin_prefetch(soon);
          __builtin_prefetch(soon + dim - 1);
        }
        waiting_[count_++] = {from, at, factor};
        if (count_ == WAITING) add();
      }
    }
  }

  // Adds the gradients whose rows were prefetched.
  void add() {
    const int64_t dim = source_.dim;
    const bool scaled = source_.weights || source_.mean;
    for (int64_t k = 0; k < count_; ++k) {
      const auto& one = waiting_[k];
      ++counts_[one.at];
      add_row<WIDTH>(sums_ + one.at * dim, one.from, one.factor, scaled, dim);
    }
    count_ = 0;
  }

 private:
  struct One {
    const float* from;
    int64_t at;
    float factor;
  };
  const Lookup& lookup_;
  const Source& source_;
  const uint64_t* words_;
  const int32_t* before_;
  float* sums_;
  int64_t* counts_;
  One waiting_[WAITING];
  int64_t count_ = 0;
};

// Distinct rows in order, the sums of their gradients, and how often each occurs.
std::tuple<Tensor, Tensor, Tensor> sum_by_row(const Tensor& ids, const Tensor& offsets,
                                              const Tensor& first_rows, int64_t rows,
                                              const Tensor& grad, int64_t dim, bool pooled,
                                              bool mean, const std::optional<Tensor>& weights,
                                              const Tensor& workspace, Tensor before) {
  const Lookup lookup(ids, offsets, first_rows, rows);
  Marks marks(workspace, rows);
  int32_t* counted = before.data_ptr<int32_t>();
  bool outside = false;
  const auto chunks = lookup.chunks();
  with_types(lookup, [&](auto ids, auto) {
    in_parallel(chunks.size(), [&](int64_t c) {
      const Lookup::Table table = lookup.table(chunks[c].feature);
      bool all_inside = true;
      for (int64_t i = chunks[c].first; i < chunks[c].stop; ++i) {
        if (table.holds(ids[i]))
          marks.mark(table.first + ids[i]);
        else
          all_inside = false;
      }
      if (!all_inside) __atomic_store_n(&outside, true, __ATOMIC_RELAXED);
    });
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

  // A task takes neighbouring tables, a block of samples at a time, so that neighbouring gradients
  // are added while in cache. A table's features stay in one task, as they may share rows. If there
  // are fewer tables than tasks, rows are split among tasks.
  std::vector<int64_t> firsts;
  for (int64_t f = 0; f < lookup.features; ++f)
    if (f == 0 || lookup.first_rows[f] != lookup.first_rows[f - 1]) firsts.push_back(f);
  const int64_t tables = firsts.size(), wanted = TASKS * at::get_num_threads();
  firsts.push_back(lookup.features);
  const int64_t groups = std::min(tables, wanted), parts = (wanted + groups - 1) / groups;
  const Source source{grad.const_data_ptr<float>(), grad.stride(0), dim, pooled, mean,
                      lookup.factors(weights)};
  with_width(dim, [&](auto width) {
    with_types(lookup, [&](auto ids, auto offsets) {
      in_parallel(groups * parts, [&](int64_t task) {
        RowAdder<width.value> adder(lookup, source, marks.words, counted, sums.data_ptr<float>(),
                                   counts.data_ptr<int64_t>());
        const int64_t group = task / parts, first = firsts[group * tables / groups],
                      stop = firsts[(group + 1) * tables / groups];
        for (int64_t begin = 0; begin < lookup.bags; begin += SAMPLES) {
          const int64_t end = std::min(begin + SAMPLES, lookup.bags);
          for (int64_t f = first; f < stop; ++f)
            adder.bags(ids, offsets, f, begin, end, task % parts, parts);
        }
        adder.add();
      });
    });
  });
  marks.clear();
  return {found, sums, counts};
}

// Whether offsets ascend from 0 to the number of ids, and each id is inside its table.
bool is_sound(const Tensor& ids, const Tensor& offsets, const Tensor& first_rows, int64_t rows) {
  const Lookup lookup(ids, offsets, first_rows, rows);
  return with_types(lookup, [&](auto ids, auto offsets) {
    const int64_t bags = lookup.features * lookup.bags;
    bool sound = offsets[0] == 0 && offsets[bags] == lookup.occurrences;
    in_blocks(bags, CHUNK, [&](int64_t begin, int64_t end) {
      bool ascending = true;
      for (int64_t bag = begin; bag < end; ++bag) ascending &= offsets[bag] <= offsets[bag + 1];
      if (!ascending) __atomic_store_n(&sound, false, __ATOMIC_RELAXED);
    });
    if (!sound) return false;
    const auto chunks = lookup.chunks();
    in_parallel(chunks.size(), [&](int64_t c) {
      const Lookup::Table table = lookup.table(chunks[c].feature);
      bool all_inside = true;
      for (int64_t i = chunks[c].first; i < chunks[c].stop; ++i) all_inside &= table.holds(ids[i]);
      if (!all_inside) __atomic_store_n(&sound, false, __ATOMIC_RELAXED);
    });
    return sound;
  });
}

// The pooled rows of a lookup, written to `output` `[bags, features * dim]`.
template <int WIDTH, typename Ids, typename Offsets>
void pool(const Lookup& lookup, const Ids& ids, const Offsets& offsets, const float* rows,
          int64_t columns, bool mean, const float* weights, float* output, int64_t stride) {
  const int64_t start = offsets[0], dim = WIDTH ? WIDTH : columns;
  in_blocks(lookup.bags, SAMPLES, [&](int64_t begin, int64_t end) {
    for (int64_t f = 0; f < lookup.features; ++f) {
      const Lookup::Table table = lookup.table(f);
      const auto row_of = [&](int64_t i) { return rows + table.row(ids[i]) * dim; };
      const int64_t last = offsets[f * lookup.bags + end] - start;
      int64_t fetched = offsets[f * lookup.bags + begin] - start;
      const auto fetch_after = [&](int64_t i) {
        for (; fetched < std::min(i + WAITING, last); ++fetched) {
          const float* soon = row_of(fetched);
          __builtin_prefetch(soon);
          __builtin_prefetch(soon + dim - 1);
        }
      };
      for (int64_t b = begin; b < end; ++b) {
        const int64_t bag = f * lookup.bags + b;
        const int64_t first = offsets[bag] - start, stop = offsets[bag + 1] - start;
        float* to = output + b * stride + f * dim;
        if (stop - first == 1 && !weights) {
          fetch_after(first);
          std::copy_n(row_of(first), dim, to);
          continue;
        }
        std::fill_n(to, dim, 0.0f);
        for (int64_t i = first; i < stop; ++i) {
          fetch_after(i);
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
  with_width(dim, [&](auto width) {
    with_types(lookup, [&](auto ids, auto offsets) {
      pool<width.value>(lookup, ids, offsets, rows.const_data_ptr<float>(), dim, mean,
                        lookup.factors(weights), output.data_ptr<float>(), output.stride(0));
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(stampede, library) {
  library.def("is_sound", &is_sound);
  library.def("pool_rows_", &pool_rows_);
  library.def("sum_by_row", &sum_by_row);
}
