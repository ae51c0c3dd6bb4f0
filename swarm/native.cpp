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
#include <type_traits>
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

// Calls `run` with a null pointer to the type of the elements of `like`.
template <typename Run>
void by_dtype(const Tensor& like, Run run) {
  if (like.scalar_type() == ScalarType::Float) return run(static_cast<float*>(nullptr));
  STD_TORCH_CHECK(like.scalar_type() == ScalarType::BFloat16, "fp32 or bf16 expected");
  run(static_cast<bf16*>(nullptr));
}

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
void linear_of(const T* x_data, const Tensor& weight, const Tensor* bias, T* y_data, long rows) {
  long inputs = weight.size(1), outputs = weight.size(0);
  auto weight_data = static_cast<const T*>(weight.data_ptr());
  auto bias_data = bias ? static_cast<const T*>(bias->data_ptr()) : nullptr;
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
  by_dtype(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    linear_of(static_cast<const T*>(x.data_ptr()), weight, given, static_cast<T*>(y.data_ptr()), rows);
  });
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

void check_held(const Tensor& like, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width,
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
Tensor attend_rows(const Tensor& query, const Tensor& key, const Tensor& value, const std::vector<Tensor>& all_keys,
                   const std::vector<Tensor>& all_values, const std::vector<int64_t>& pasts, int64_t window,
                   double scale) {
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
  by_dtype(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    rms_norm_of(static_cast<const T*>(x.data_ptr()), static_cast<const T*>(weight.data_ptr()),
                static_cast<T*>(y.data_ptr()), rows, width, float(epsilon));
  });
  return y;
}

// -- whole blocks -----------------------------------------------------------------------------------------------

inline void store(float* data, Floats values) { *reinterpret_cast<Floats*>(data) = values; }
inline void store(bf16* data, Floats values) {
  for (int i = 0; i < LANES; i++) data[i] = narrow<bf16>(values[i]);
}

// gate * sigmoid(gate) * up, into gate.
template <typename T>
void gated(T* gate, const T* up, long size) {
  long at = 0;
  for (; at + LANES <= size; at += LANES) {
    Floats x = lanes_of(gate + at), other = lanes_of(up + at);
    Floats power = exponential(x > 0.0f ? -x : x);
    Floats sigmoid = (x > 0.0f ? Floats{} + 1.0f : power) / (power + 1.0f);
    Floats activated = x * sigmoid;
    if constexpr (std::is_same_v<T, bf16>)  // the library rounds in between
      for (int i = 0; i < LANES; i++) activated[i] = widen(narrow<bf16>(activated[i]));
    store(gate + at, activated * other);
  }
  for (; at < size; at++) {
    float x = widen(gate[at]), activated = x / (1.0f + std::exp(-x));
    gate[at] = narrow<T>(widen(narrow<T>(activated)) * widen(up[at]));
  }
}

template <typename T>
void add_to(T* sum, const T* more, long size) {
  for (long i = 0; i < size; i++) sum[i] = narrow<T>(widen(sum[i]) + widen(more[i]));
}

// In place, as the library's rotate_half: data [rows, heads, width], cos and sin [rows, width].
template <typename T>
void rotate(T* data, const T* cos, const T* sin, long rows, long heads, long width) {
  long half = width / 2;
  for (long row = 0; row < rows; row++, cos += width, sin += width)
    for (long head = 0; head < heads; head++, data += width)
      for (long i = 0; i < half; i++) {
        float low = widen(data[i]), high = widen(data[i + half]);
        data[i] = narrow<T>(widen(narrow<T>(low * widen(cos[i]))) - widen(narrow<T>(high * widen(sin[i]))));
        data[i + half] =
            narrow<T>(widen(narrow<T>(high * widen(cos[i + half]))) + widen(narrow<T>(low * widen(sin[i + half]))));
      }
}

// Where a block's tensors are in the list of its weights; an absent one has no elements.
enum Part { NORM_1, Q, K, V, O, NORM_2, GATE, UP, DOWN, Q_BIAS, K_BIAS, V_BIAS, O_BIAS, Q_NORM, K_NORM, PARTS };

template <typename T>
void block_of(const Tensor& hidden, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& parts,
              const std::vector<Tensor>& all_keys, const std::vector<Tensor>& all_values,
              const std::vector<int64_t>& pasts, long window, float epsilon, float scale, long width, T* out) {
  long rows = long(pasts.size()), size = parts[NORM_1].size(0), inner = parts[GATE].size(0);
  long q_size = parts[Q].size(0), kv_size = parts[K].size(0), heads = q_size / width, kv_heads = kv_size / width;
  auto data = [](const Tensor& tensor) { return static_cast<const T*>(tensor.data_ptr()); };
  auto bias = [&](Part part) { return parts[part].numel() ? &parts[part] : nullptr; };
  std::vector<T> normed(rows * size), q(rows * q_size), k(rows * kv_size), v(rows * kv_size), attended(rows * q_size);
  std::vector<T> more(rows * size), gate(rows * inner), up(rows * inner);

  rms_norm_of(data(hidden), data(parts[NORM_1]), normed.data(), rows, size, epsilon);
  linear_of(normed.data(), parts[Q], bias(Q_BIAS), q.data(), rows);
  linear_of(normed.data(), parts[K], bias(K_BIAS), k.data(), rows);
  linear_of(normed.data(), parts[V], bias(V_BIAS), v.data(), rows);
  if (bias(Q_NORM)) rms_norm_of(q.data(), data(parts[Q_NORM]), q.data(), rows * heads, width, epsilon);
  if (bias(K_NORM)) rms_norm_of(k.data(), data(parts[K_NORM]), k.data(), rows * kv_heads, width, epsilon);
  rotate(q.data(), data(cos), data(sin), rows, heads, width);
  rotate(k.data(), data(cos), data(sin), rows, kv_heads, width);
  attend_of<T>(Rows<T>(q.data(), heads, width), Rows<T>(k.data(), kv_heads, width), Rows<T>(v.data(), kv_heads, width),
               heads, kv_heads, width, all_keys, all_values, pasts, window, scale, attended.data());
  linear_of(attended.data(), parts[O], bias(O_BIAS), more.data(), rows);
  std::memcpy(out, data(hidden), rows * size * sizeof(T));
  add_to(out, more.data(), rows * size);

  rms_norm_of<T>(out, data(parts[NORM_2]), normed.data(), rows, size, epsilon);
  linear_of<T>(normed.data(), parts[GATE], nullptr, gate.data(), rows);
  linear_of<T>(normed.data(), parts[UP], nullptr, up.data(), rows);
  gated(gate.data(), up.data(), rows * inner);
  linear_of<T>(gate.data(), parts[DOWN], nullptr, more.data(), rows);
  add_to(out, more.data(), rows * size);
}

// A block as llama's, for rows of different sessions, one each: hidden [1, rows, size], cos and sin [1, rows, width];
// the rest as for `attend_rows`. -> [1, rows, size]. Whoever calls it has compared it with the library's block.
Tensor block(const Tensor& hidden, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& parts,
             const std::vector<Tensor>& all_keys, const std::vector<Tensor>& all_values,
             const std::vector<int64_t>& pasts, int64_t window, double epsilon, double scale) {
  STD_TORCH_CHECK(parts.size() == PARTS && hidden.dim() == 3 && hidden.is_contiguous(), "a block's tensors expected");
  int64_t rows = hidden.size(1), size = hidden.size(2), width = cos.size(2);
  int64_t heads = parts[Q].size(0) / width, kv_heads = parts[K].size(0) / width, inner = parts[GATE].size(0);
  for (const Tensor* table : {&cos, &sin})
    STD_TORCH_CHECK(table->is_contiguous() && table->size(1) == rows && table->size(2) == width &&
                        table->scalar_type() == hidden.scalar_type(),
                    "rotary tables of its rows expected");
  auto shape = [&](Part part, int64_t outputs, int64_t inputs) {
    const Tensor& weight = parts[part];
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == outputs && weight.size(1) == inputs &&
                        weight.is_contiguous() && weight.scalar_type() == hidden.scalar_type(),
                    "shapes do not fit");
  };
  shape(Q, heads * width, size), shape(K, kv_heads * width, size), shape(V, kv_heads * width, size);
  shape(O, size, heads * width), shape(GATE, inner, size), shape(UP, inner, size), shape(DOWN, size, inner);
  auto vector = [&](Part part, int64_t length, bool needed) {
    const Tensor& tensor = parts[part];
    STD_TORCH_CHECK((!needed && tensor.numel() == 0) || (tensor.numel() == length && tensor.is_contiguous() &&
                                                         tensor.scalar_type() == hidden.scalar_type()),
                    "shapes do not fit");
  };
  vector(NORM_1, size, true), vector(NORM_2, size, true), vector(Q_NORM, width, false), vector(K_NORM, width, false);
  vector(Q_BIAS, heads * width, false), vector(K_BIAS, kv_heads * width, false);
  vector(V_BIAS, kv_heads * width, false), vector(O_BIAS, size, false);
  check_held(hidden, rows, heads, kv_heads, width, all_keys, all_values, pasts);
  Tensor out = torch::stable::new_empty(hidden, {1, rows, size});
  by_dtype(hidden, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    block_of(hidden, cos, sin, parts, all_keys, all_values, pasts, window, epsilon, scale, width,
             static_cast<T*>(out.data_ptr()));
  });
  return out;
}

int64_t lanes() { return LANES; }

}  // namespace

STABLE_TORCH_LIBRARY(swarm_native, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def(
      "attend_rows(Tensor query, Tensor key, Tensor value, Tensor[] all_keys, Tensor[] all_values, int[] pasts, "
      "int window, float scale) -> Tensor");
  library.def(
      "block(Tensor hidden, Tensor cos, Tensor sin, Tensor[] parts, Tensor[] all_keys, Tensor[] all_values, "
      "int[] pasts, int window, float epsilon, float scale) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  library.def("lanes() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_native, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("attend_rows", TORCH_BOX(&attend_rows));
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("block", TORCH_BOX(&block));
}

STABLE_TORCH_LIBRARY_IMPL(swarm_native, CompositeExplicitAutograd, library) {
  library.impl("lanes", TORCH_BOX(&lanes));
}
