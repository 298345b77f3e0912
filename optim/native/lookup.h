// A lookup's ids, and helpers of all row kernels.
//
// Every result is the same for any number of threads: one thread owns a row and adds its
// occurrences block by block of samples, in their order within a block. Multiplications and
// additions are fused only by `fma`; otherwise one formula could round differently in two places.
#pragma once

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

using at::Tensor;

// Occurrences that a thread takes at a time.
constexpr int64_t CHUNK = 8192;
// Rows to prefetch ahead where rows are only read or added.
constexpr int64_t WAITING = 64;

inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The ids of one lookup: feature f has [bound(f), bound(f+1)), bag after bag. Without offsets there
// is one feature, and each id is a bag.
struct Lookup {
  const void* ids;
  bool ids_are_long;
  const void* offsets;
  bool offsets_are_long;
  int64_t occurrences, features, bags;
  const int64_t* first_rows;
  int64_t rows;

  Lookup(const Tensor& ids_, const Tensor& offsets_, const Tensor& first_rows_, int64_t rows_)
      : ids(ids_.const_data_ptr()),
        ids_are_long(ids_.scalar_type() == at::kLong),
        offsets(offsets_.numel() ? offsets_.const_data_ptr() : nullptr),
        offsets_are_long(offsets_.scalar_type() == at::kLong),
        occurrences(ids_.numel()),
        features(first_rows_.numel()),
        bags(offsets_.numel() ? (offsets_.numel() - 1) / first_rows_.numel() : ids_.numel()),
        first_rows(first_rows_.const_data_ptr<int64_t>()),
        rows(rows_) {
    for (const Tensor& whole : {ids_, offsets_}) {
      TORCH_CHECK(whole.scalar_type() == at::kLong || whole.scalar_type() == at::kInt,
                  "ids and offsets are int32 or int64, not ", whole.scalar_type());
      TORCH_CHECK(whole.is_contiguous(), "ids and offsets must be contiguous");
    }
    TORCH_CHECK(offsets || features == 1, "without offsets there is one feature");
  }

  // The weight of each id; null without weights.
  const float* factors(const std::optional<Tensor>& weights) const {
    if (!weights) return nullptr;
    TORCH_CHECK(weights->scalar_type() == at::kFloat && weights->is_contiguous() &&
                    weights->numel() == occurrences,
                "weights are contiguous float32, one of each id");
    return weights->const_data_ptr<float>();
  }

  int64_t offset(int64_t bag) const {
    if (!offsets) return bag;
    return offsets_are_long ? static_cast<const int64_t*>(offsets)[bag]
                            : static_cast<const int32_t*>(offsets)[bag];
  }
  int64_t bound(int64_t feature) const { return offset(feature * bags) - offset(0); }

  // The rows of a feature's table; tables lie one behind the other.
  struct Table {
    int64_t first;
    uint64_t size;
    bool holds(int64_t id) const { return static_cast<uint64_t>(id) < size; }
    // An id outside the table means its first row, as in FBGEMM's lookup.
    int64_t row(int64_t id) const { return first + (holds(id) ? id : 0); }
  };
  Table table(int64_t feature) const {
    const int64_t first = first_rows[feature];
    for (int64_t f = feature + 1; f < features; ++f)
      if (first_rows[f] != first) return {first, static_cast<uint64_t>(first_rows[f] - first)};
    return {first, static_cast<uint64_t>(rows - first)};
  }

  struct Chunk {
    int64_t feature, first, stop;
  };
  std::vector<Chunk> chunks() const {
    std::vector<Chunk> found;
    for (int64_t f = 0; f < features; ++f)
      for (int64_t i = bound(f); i < bound(f + 1); i += CHUNK)
        found.push_back({f, i, std::min(i + CHUNK, bound(f + 1))});
    return found;
  }
};

// Offsets where each id is a bag.
struct EachIsABag {
  int64_t operator[](int64_t bag) const { return bag; }
};

// Calls with the typed arrays of a lookup's ids and offsets.
template <typename Call>
auto with_types(const Lookup& lookup, const Call& call) {
  const auto with_offsets = [&](auto ids) {
    if (!lookup.offsets) return call(ids, EachIsABag());
    if (lookup.offsets_are_long) return call(ids, static_cast<const int64_t*>(lookup.offsets));
    return call(ids, static_cast<const int32_t*>(lookup.offsets));
  };
  return lookup.ids_are_long ? with_offsets(static_cast<const int64_t*>(lookup.ids))
                             : with_offsets(static_cast<const int32_t*>(lookup.ids));
}

// Calls with a common width as a compile-time constant, with any other as 0.
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

// While it lives, this thread reads and writes denormal numbers (below 1.2e-38) as 0. Moments of
// rows outside the batches become denormal after some 800 steps, and weights after them; an x86
// processor takes a hundred times as long for each.
class DenormalsAreZero {
 public:
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;
#ifdef __SSE2__
  DenormalsAreZero() : before_(_mm_getcsr()) {
    // FTZ for results and DAZ for arguments.
    _mm_setcsr(before_ | 0x8000 | 0x0040);
  }
  ~DenormalsAreZero() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#else
  DenormalsAreZero() {}
#endif
};

template <typename Do>
void in_parallel(int64_t tasks, const Do& task) {
  const int threads = std::min<int64_t>(at::get_num_threads(), tasks);
  if (threads <= 1 || at::in_parallel_region()) {
    const DenormalsAreZero zero;
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const DenormalsAreZero zero;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) task(i);
  }
}

// `work(begin, end)` for each block of `size` of the first `count` numbers.
template <typename Work>
void in_blocks(int64_t count, int64_t size, const Work& work) {
  in_parallel((count + size - 1) / size, [&](int64_t block) {
    work(block * size, std::min((block + 1) * size, count));
  });
}

}  // namespace
