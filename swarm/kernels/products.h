// Products of few rows: x [rows, inputs] against weight [outputs, inputs], where reading the weight is all the work.

#pragma once

#include "amx.h"
#include "vectors.h"

namespace swarm {

// One step of a dot product: VECTOR_BYTES of weights against as many of each row. For bf16 the rows come as `Row`.
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr long COUNT = LANES;
  static Floats load(const float* data) { return *reinterpret_cast<const Floats*>(data); }
  static void add(Floats& sum, Floats weight, const float* row) { sum += weight * load(row); }
};

#if defined(__AVX512BF16__)
template <>
struct Step<bf16> {
  static constexpr long COUNT = 2 * LANES;
  static __m512bh load(const bf16* data) { return (__m512bh)_mm512_loadu_si512(data); }
  static void add(Floats& sum, __m512bh weight, const bf16* row) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, weight, load(row));
  }
};
#else
template <>
struct Step<bf16> {
  static constexpr long COUNT = 2 * LANES;
  struct Pair {
    Floats even, odd;
  };
  static Pair load(const bf16* data) {
    Words both = *reinterpret_cast<const Words*>(data);
    return {(Floats)(both << 16), (Floats)(both & 0xffff0000u)};
  }
  static void add(Floats& sum, const Pair& weight, const bf16* row) {
    Pair values = load(row);
    sum += weight.even * values.even;
    sum += weight.odd * values.odd;
  }
};
#endif

// `ROWS` rows of x [., inputs] against rows `[begin, end)` of weight [., inputs], into y [., outputs], `OUTS` at once.
template <typename T, int ROWS, int OUTS>
void tile(const T* x, const T* weights, const T* bias, T* y, long inputs, long outputs, long begin, long end) {
  using S = Step<T>;
  constexpr int CHAINS = ROWS * OUTS == 1 ? 2 : 1;  // independent sums, or their latency is waited for
  long out = begin;
  for (; out + OUTS <= end; out += OUTS) {
    const T* weight = weights + out * inputs;
    Floats sums[CHAINS][ROWS][OUTS] = {};
    auto step = [&](int chain, long at) {
#pragma GCC unroll 8
      for (int o = 0; o < OUTS; o++) {
        const T* data = weight + o * inputs + at;
        prefetch(data);
        auto loaded = S::load(data);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) S::add(sums[chain][r][o], loaded, x + r * inputs + at);
      }
    };
    long at = 0;
    for (; at + CHAINS * S::COUNT <= inputs; at += CHAINS * S::COUNT)
#pragma GCC unroll 8
      for (int c = 0; c < CHAINS; c++) step(c, at + c * S::COUNT);
    for (; at + S::COUNT <= inputs; at += S::COUNT) step(0, at);
    for (int r = 0; r < ROWS; r++)
      for (int o = 0; o < OUTS; o++) {
        Floats lanes = sums[0][r][o];
        for (int c = 1; c < CHAINS; c++) lanes += sums[c][r][o];
        float sum = total(lanes) + (bias ? widen(bias[out + o]) : 0.0f);
        for (long rest = at; rest < inputs; rest++)
          sum += widen(weight[o * inputs + rest]) * widen(x[r * inputs + rest]);
        y[r * outputs + out + o] = narrow<T>(sum);
      }
  }
  if constexpr (OUTS > 1)
    if (out < end) tile<T, ROWS, 1>(x, weights, bias, y, inputs, outputs, out, end);
}

template <typename T>
using Tile = void (*)(const T*, const T*, const T*, T*, long, long, long, long);

template <typename T>
constexpr Tile<T> TILES[] = {nullptr,       tile<T, 1, 1>, tile<T, 2, 2>, tile<T, 3, 2>, tile<T, 4, 2>,
#if defined(__AVX512F__)
                             tile<T, 5, 2>, tile<T, 6, 2>, tile<T, 7, 2>, tile<T, 8, 2>
#endif
};

constexpr long STRIP = 8;  // rows of weight that stay in the cache while all rows of x pass over them

template <typename T>
void linear_part(const T* x, const T* weight, const T* bias, T* y, long rows, long inputs, long outputs, long begin,
                 long end) {
  long strip = rows <= MOST_ROWS ? end - begin : STRIP;
  for (; begin < end; begin += strip)
    for (long row = 0; row < rows; row += MOST_ROWS)
      TILES<T>[std::min<long>(MOST_ROWS, rows - row)](x + row * inputs, weight, bias, y + row * outputs, inputs,
                                                      outputs, begin, std::min(end, begin + strip));
}

constexpr long LEAST_AMX_ROWS = 4;  // fewer are not worth rearranging

template <typename T>
void dense_of(const T* x_data, const Tensor& weight, const Tensor* bias, T* y_data, long rows, long inputs) {
  long outputs = weight.size(0);
  auto weight_data = static_cast<const T*>(weight.data_ptr());
  auto bias_data = bias ? static_cast<const T*>(bias->data_ptr()) : nullptr;
  int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max(1L, inputs));  // a quarter of a million weights a thread
  if constexpr (std::is_same_v<T, bf16>)
    if (rows >= LEAST_AMX_ROWS && amx_takes(inputs, outputs)) {
      auto tiles = amx_tiles_of(x_data, rows, inputs);
      grain = std::max<int64_t>(1, grain / (rows / AMX_ROWS + 1) / AMX_ROWS);
      torch::stable::parallel_for(0, outputs / AMX_ROWS, grain, [&](int64_t begin, int64_t end) {
        amx_part(tiles.data(), weight_data, bias_data, y_data, rows, inputs, outputs, begin, end);
      });
      return;
    }
  torch::stable::parallel_for(0, outputs, grain, [&](int64_t begin, int64_t end) {
    linear_part<T>(x_data, weight_data, bias_data, y_data, rows, inputs, outputs, begin, end);
  });
}

}  // namespace swarm
