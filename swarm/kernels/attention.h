// Attention of single rows, each against what its own session holds.

#pragma once

#include "vectors.h"

namespace swarm {

// In place: scores [length] to weights that sum to the returned value; behind them up to a whole vector, zeros.
inline float soften(float* scores, long length) {
  float most = scores[0];
  for (long j = 1; j < length; j++) most = scores[j] > most ? scores[j] : most;
  long padded = (length + LANES - 1) / LANES * LANES;
  for (long j = length; j < padded; j++) scores[j] = -INFINITY;
  Floats sum = {};
  for (long j = 0; j < padded; j += LANES) {
    Floats weights = exponential(lanes_of(scores + j) - most);
    *reinterpret_cast<Floats*>(scores + j) = weights;
    sum += weights;
  }
  return total(sum);
}

// `HEADS` query heads [., width], scaled, against one head's keys and values [length, width]: out [HEADS, width].
// `scores` has room for HEADS times `room`.
template <typename T, int HEADS>
void attend_heads(const float* query, const T* keys, const T* values, long length, long width, float* scores, long room,
                  T* out) {
  for (long j = 0; j < length; j++) {
    Floats sums[HEADS] = {};
    for (long c = 0; c < width; c += LANES) {
      const T* data = keys + j * width + c;
      prefetch(data);
      Floats key = lanes_of(data);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; h++) sums[h] += key * lanes_of(query + h * width + c);
    }
    for (int h = 0; h < HEADS; h++) scores[h * room + j] = total(sums[h]);
  }
  float scale[HEADS];
  for (int h = 0; h < HEADS; h++) scale[h] = 1.0f / soften(scores + h * room, length);
  constexpr long CHUNK = 4;
  for (long c = 0; c < width; c += CHUNK * LANES) {
    long vectors = std::min(CHUNK, (width - c) / LANES);
    Floats sums[HEADS][CHUNK] = {};
    for (long j = 0; j < length; j++) {
      const T* data = values + j * width + c;
      auto step = [&](long v) {
        prefetch(data + v * LANES);
        Floats value = lanes_of(data + v * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) sums[h][v] += value * scores[h * room + j];
      };
      if (vectors == CHUNK) {
#pragma GCC unroll 4
        for (long v = 0; v < CHUNK; v++) step(v);
      } else {
        for (long v = 0; v < vectors; v++) step(v);
      }
    }
    for (int h = 0; h < HEADS; h++)
      for (long v = 0; v < vectors; v++) {
        Floats result = sums[h][v] * scale[h];
        store(out + h * width + c + v * LANES, result);
      }
  }
}

template <typename T>
struct Rows {  // of a [1, heads, rows, width] tensor, or of one that lies as [rows, heads, width]
  const T* data;
  long head_stride, row_stride;
  explicit Rows(const Tensor& tensor)
      : data(static_cast<const T*>(tensor.data_ptr())), head_stride(tensor.stride(1)), row_stride(tensor.stride(2)) {}
  Rows(const T* data, long heads, long width) : data(data), head_stride(width), row_stride(heads * width) {}
  const T* at(long head, long row) const { return data + head * head_stride + row * row_stride; }
};

template <typename T>
void attend_of(Rows<T> queries, Rows<T> new_keys, Rows<T> new_values, long heads, long kv_heads, long width,
               const std::vector<Tensor>& all_keys, const std::vector<Tensor>& all_values,
               const std::vector<int64_t>& pasts, long window, float scale, T* to) {
  long rows = long(pasts.size()), group = heads / kv_heads;
  struct Seat {
    T *keys, *values;
    long head_stride, past;
  };
  std::vector<Seat> seats;
  long longest = 0;
  for (long row = 0; row < rows; row++) {
    seats.push_back({static_cast<T*>(all_keys[row].data_ptr()), static_cast<T*>(all_values[row].data_ptr()),
                     all_keys[row].stride(1), pasts[row]});
    longest = std::max<long>(longest, pasts[row] + 1);
  }
  long room = (longest + LANES - 1) / LANES * LANES;
  int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max(1L, longest * width));
  torch::stable::parallel_for(0, rows * kv_heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(4 * room), scaled(4 * width);
    for (int64_t task = begin; task < end; task++) {
      long row = task / kv_heads, head = task % kv_heads;
      const Seat& seat = seats[row];
      T* keys = seat.keys + head * seat.head_stride;
      T* values = seat.values + head * seat.head_stride;
      std::memcpy(keys + seat.past * width, new_keys.at(head, row), width * sizeof(T));
      std::memcpy(values + seat.past * width, new_values.at(head, row), width * sizeof(T));
      long first = window > 0 ? std::max(0L, seat.past + 1 - window) : 0, length = seat.past + 1 - first;
      for (long g = 0; g < group; g += 4) {
        long some = std::min(4L, group - g);
        for (long h = 0; h < some; h++) {
          const T* from = queries.at(head * group + g + h, row);
          for (long c = 0; c < width; c++) scaled[h * width + c] = widen(from[c]) * scale;
        }
        T* result = to + (row * heads + head * group + g) * width;
        const T *some_keys = keys + first * width, *some_values = values + first * width;
        auto run = [&](auto count) {
          attend_heads<T, decltype(count)::value>(scaled.data(), some_keys, some_values, length, width, scores.data(),
                                                  room, result);
        };
        switch (some) {
          case 1: run(std::integral_constant<int, 1>{}); break;
          case 2: run(std::integral_constant<int, 2>{}); break;
          case 3: run(std::integral_constant<int, 3>{}); break;
          default: run(std::integral_constant<int, 4>{});
        }
      }
    }
  });
}

inline void check_held(const Tensor& like, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width,
                       const std::vector<Tensor>& all_keys, const std::vector<Tensor>& all_values,
                       const std::vector<int64_t>& pasts) {
  STD_TORCH_CHECK(like.scalar_type() == ScalarType::Float || like.scalar_type() == ScalarType::BFloat16,
                  "fp32 or bf16 expected");
  STD_TORCH_CHECK(width % LANES == 0, "heads of whole vectors expected");
  STD_TORCH_CHECK(int64_t(all_keys.size()) == rows && int64_t(all_values.size()) == rows &&
                      int64_t(pasts.size()) == rows && heads % kv_heads == 0,
                  "one session a row expected");
  for (int64_t row = 0; row < rows; row++)
    for (const Tensor* held : {&all_keys[row], &all_values[row]})
      STD_TORCH_CHECK(held->is_contiguous() && pasts[row] >= 0 && pasts[row] < held->size(2) &&
                          held->size(1) == kv_heads && held->size(3) == width &&
                          held->scalar_type() == like.scalar_type(),
                      "no room in what a session holds");
}

// Rows of different sessions, one each. query [1, heads, rows, width], key and value [1, kv_heads, rows, width]; of
// each row's session all_keys and all_values [1, kv_heads, capacity, width], of which `pasts` positions are held: the
// new ones are written behind them. A window of 0 is none. -> [1, rows, heads, width]; `width` must be whole vectors.
inline Tensor attend_rows(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::vector<Tensor>& all_keys, const std::vector<Tensor>& all_values,
                          const std::vector<int64_t>& pasts, int64_t window, double scale) {
  int64_t heads = query.size(1), rows = query.size(2), width = query.size(3), kv_heads = key.size(1);
  STD_TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1 && key.size(2) == rows,
                  "rows of whole heads expected");
  check_held(query, rows, heads, kv_heads, width, all_keys, all_values, pasts);
  Tensor out = torch::stable::new_empty(query, {1, rows, heads, width});
  by_dtype(query, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    attend_of<T>(Rows<T>(query), Rows<T>(key), Rows<T>(value), heads, kv_heads, width, all_keys, all_values, pasts,
                 window, scale, static_cast<T*>(out.data_ptr()));
  });
  return out;
}

}  // namespace swarm
