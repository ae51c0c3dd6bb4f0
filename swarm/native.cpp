// Kernels for few rows, where reading the weights or the cache from memory is all the work there is.
//
// Registered as `torch.ops.swarm_native`; built by `native.py` with whatever C++ compiler the machine has, against
// torch's stable interface. Everything here exists in torch too: without a compiler nothing is lost but speed.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
constexpr int MOST_ROWS = 8;  // of one tile: its accumulators must fit the registers
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
constexpr int MOST_ROWS = 4;
#else
constexpr int VECTOR_BYTES = 16;
constexpr int MOST_ROWS = 4;
#endif
constexpr int LANES = VECTOR_BYTES / 4;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES), aligned(2)));

struct bf16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

template <typename T>
T narrow(float value);
template <>
inline float narrow<float>(float value) {
  return value;
}
template <>
inline bf16 narrow<bf16>(float value) {  // to nearest, ties to even, as torch does
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return {uint16_t(0x7fc0)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#if defined(__AVX512F__)
inline float total(Floats lanes) { return _mm512_reduce_add_ps((__m512)lanes); }
#else
inline float total(Floats lanes) {  // by halves: one long chain of additions would be waited for
  float values[LANES];
  std::memcpy(values, &lanes, sizeof values);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) values[i] += values[i + half];
  return values[0];
}
#endif

// Far enough ahead to hide memory, near enough to stay in the first cache. The hardware's own prefetcher stops at
// each page and is half as fast here.
constexpr int PREFETCH_BYTES = 8192;

inline void prefetch(const void* data) { __builtin_prefetch(static_cast<const char*>(data) + PREFETCH_BYTES, 0, 3); }

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
      TILES<T>[std::min<long>(MOST_ROWS, rows - row)](x + row * inputs, weight, bias, y + row * outputs, inputs, outputs,
                                                      begin, std::min(end, begin + strip));
}

template <typename T>
void linear_of(const Tensor& x, const Tensor& weight, const Tensor* bias, Tensor& y, long rows) {
  long inputs = weight.size(1), outputs = weight.size(0);
  auto x_data = static_cast<const T*>(x.data_ptr());
  auto weight_data = static_cast<const T*>(weight.data_ptr());
  auto bias_data = bias ? static_cast<const T*>(bias->data_ptr()) : nullptr;
  auto y_data = static_cast<T*>(y.data_ptr());
  int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max(1L, inputs));  // a quarter of a million weights a thread
  torch::stable::parallel_for(0, outputs, grain, [&](int64_t begin, int64_t end) {
    linear_part<T>(x_data, weight_data, bias_data, y_data, rows, inputs, outputs, begin, end);
  });
}

// x [..., inputs], weight [outputs, inputs], bias [outputs]: contiguous, one dtype (fp32 or bf16; sums in fp32).
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(x.dim() - 1) == weight.size(1), "shapes do not fit");
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && x.scalar_type() == weight.scalar_type(),
                  "contiguous tensors of one dtype expected");
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); i++) shape.push_back(x.size(i));
  shape.push_back(weight.size(0));
  Tensor y = torch::stable::new_empty(x, shape);
  long rows = x.numel() / std::max<int64_t>(1, weight.size(1));
  const Tensor* given = bias.has_value() ? &*bias : nullptr;
  if (x.scalar_type() == ScalarType::Float) {
    linear_of<float>(x, weight, given, y, rows);
  } else {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "fp32 or bf16 expected");
    linear_of<bf16>(x, weight, given, y, rows);
  }
  return y;
}

// -- attention of single rows ------------------------------------------------------------------------------------

typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2)));

inline Floats lanes_of(const float* data) { return *reinterpret_cast<const Floats*>(data); }
inline Floats lanes_of(const bf16* data) {
  return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(data), Words) << 16);
}

typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES), aligned(4)));

// e^x for x <= 0, relative error 2e-7 (Cephes' expf). Not a number stays one.
inline Floats exponential(Floats x) {
  constexpr float LEAST = -87.0f;  // below it, 0
  Ints power = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Ints);
  Floats whole = __builtin_convertvector(power, Floats);
  Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return x < LEAST ? Floats{} : sum * (Floats)((power + 127) << 23);
}

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
        for (int i = 0; i < LANES; i++) out[h * width + c + v * LANES + i] = narrow<T>(result[i]);
      }
  }
}

template <typename T>
struct Rows {  // of a [1, heads, rows, width] tensor
  const T* data;
  long head_stride, row_stride;
  explicit Rows(const Tensor& tensor)
      : data(static_cast<const T*>(tensor.data_ptr())), head_stride(tensor.stride(1)), row_stride(tensor.stride(2)) {}
  const T* at(long head, long row) const { return data + head * head_stride + row * row_stride; }
};

template <typename T>
void attend_of(const Tensor& query, const Tensor& key, const Tensor& value, const std::vector<Tensor>& all_keys,
               const std::vector<Tensor>& all_values, const std::vector<int64_t>& pasts, long window, float scale,
               Tensor& out) {
  long heads = query.size(1), rows = query.size(2), width = query.size(3), kv_heads = key.size(1);
  long group = heads / kv_heads;
  Rows<T> queries(query), new_keys(key), new_values(value);
  T* to = static_cast<T*>(out.data_ptr());
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

// Rows of different sessions, one each. query [1, heads, rows, width], key and value [1, kv_heads, rows, width]; of
// each row's session all_keys and all_values [1, kv_heads, capacity, width], of which `pasts` positions are held: the
// new ones are written behind them. A window of 0 is none. -> [1, rows, heads, width]; `width` must be whole vectors.
Tensor attend_rows(const Tensor& query, const Tensor& key, const Tensor& value, const std::vector<Tensor>& all_keys,
                   const std::vector<Tensor>& all_values, const std::vector<int64_t>& pasts, int64_t window,
                   double scale) {
  int64_t heads = query.size(1), rows = query.size(2), width = query.size(3);
  STD_TORCH_CHECK(width % LANES == 0 && query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1,
                  "heads of whole vectors expected");
  STD_TORCH_CHECK(int64_t(all_keys.size()) == rows && int64_t(all_values.size()) == rows &&
                      int64_t(pasts.size()) == rows && key.size(2) == rows && heads % key.size(1) == 0,
                  "one session a row expected");
  for (int64_t row = 0; row < rows; row++)
    for (const Tensor* held : {&all_keys[row], &all_values[row]})
      STD_TORCH_CHECK(held->is_contiguous() && pasts[row] >= 0 && pasts[row] < held->size(2) &&
                          held->size(1) == key.size(1) && held->size(3) == width &&
                          held->scalar_type() == query.scalar_type(),
                      "no room in what a session holds");
  Tensor out = torch::stable::new_empty(query, {1, rows, heads, width});
  if (query.scalar_type() == ScalarType::Float) {
    attend_of<float>(query, key, value, all_keys, all_values, pasts, window, scale, out);
  } else {
    STD_TORCH_CHECK(query.scalar_type() == ScalarType::BFloat16, "fp32 or bf16 expected");
    attend_of<bf16>(query, key, value, all_keys, all_values, pasts, window, scale, out);
  }
  return out;
}

// -- normalization ----------------------------------------------------------------------------------------------

template <typename T>
void rms_norm_of(const T* x, const T* weight, T* y, long rows, long width, float epsilon) {
  for (long row = 0; row < rows; row++, x += width, y += width) {
    Floats sums = {};
    long at = 0;
    for (; at + LANES <= width; at += LANES) {
      Floats values = lanes_of(x + at);
      sums += values * values;
    }
    float sum = total(sums);
    for (long rest = at; rest < width; rest++) sum += widen(x[rest]) * widen(x[rest]);
    float scale = 1.0f / std::sqrt(sum / width + epsilon);
    // The library rounds before the weight is applied, and again after.
    for (long i = 0; i < width; i++) y[i] = narrow<T>(widen(weight[i]) * widen(narrow<T>(widen(x[i]) * scale)));
  }
}

// x [..., width], weight [width]: contiguous, one dtype. As llama's: x / sqrt(mean(x^2) + epsilon) * weight.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && x.size(x.dim() - 1) == weight.size(0), "shapes do not fit");
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && x.scalar_type() == weight.scalar_type(),
                  "contiguous tensors of one dtype expected");
  Tensor y = torch::stable::new_empty(x, x.sizes());
  long width = weight.size(0), rows = width ? x.numel() / width : 0;
  if (x.scalar_type() == ScalarType::Float) {
    rms_norm_of(static_cast<const float*>(x.data_ptr()), static_cast<const float*>(weight.data_ptr()),
                static_cast<float*>(y.data_ptr()), rows, width, float(epsilon));
  } else {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "fp32 or bf16 expected");
    rms_norm_of(static_cast<const bf16*>(x.data_ptr()), static_cast<const bf16*>(weight.data_ptr()),
                static_cast<bf16*>(y.data_ptr()), rows, width, float(epsilon));
  }
  return y;
}

int64_t lanes() { return LANES; }

}  // namespace

STABLE_TORCH_LIBRARY(swarm_native, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def(
      "attend_rows(Tensor query, Tensor key, Tensor value, Tensor[] all_keys, Tensor[] all_values, int[] pasts, "
      "int window, float scale) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  library.def("lanes() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_native, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("attend_rows", TORCH_BOX(&attend_rows));
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
}

STABLE_TORCH_LIBRARY_IMPL(swarm_native, CompositeExplicitAutograd, library) {
  library.impl("lanes", TORCH_BOX(&lanes));
}
