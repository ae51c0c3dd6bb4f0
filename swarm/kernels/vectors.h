// Vectors of the machine's own width, the two dtypes, and what is done with them everywhere.

#pragma once

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

namespace swarm {

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

inline void store(float* data, Floats values) { *reinterpret_cast<Floats*>(data) = values; }
inline void store(bf16* data, Floats values) {  // rounded as by `narrow`
  Words bits = (Words)values;
  bits = values == values ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : Words{} + 0x7fc0u;
  *reinterpret_cast<Halves*>(data) = __builtin_convertvector(bits, Halves);
}

// The values that storing them as T and loading them again would give.
template <typename T>
Floats rounded(Floats values) {
  if constexpr (std::is_same_v<T, float>) return values;
  Words bits = (Words)values;
  bits = values == values ? (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u : Words{} + 0x7fc00000u;
  return (Floats)bits;
}

}  // namespace swarm
