// Products with weights of 8 or 4 bits, for few rows by integer dot products, for many by widening some outputs at a
// time.
//
// A row of a weight is, for groups of 32 inputs: scales (fp16), offsets (fp16; not for nf4), codes, those of two groups
// side by side. Then weight = scale * value(code) + offset, where the value is in 0 .. 255: the code itself (int8, int4)
// or its place in a table (nf4, whose offset is -128 * scale). `swarm/quantized.py` packs them.

#pragma once

#include "amx.h"
#include "products.h"
#include "vectors.h"

namespace swarm {

enum class Format { INT8, INT4, NF4 };

constexpr long GROUP = 32, PAIR = 2 * GROUP;

// The codes of NF4 (QLoRA, appendix E) in 127ths, plus 128.
alignas(16) constexpr uint8_t NF4_VALUES[16] = {1, 40, 61, 78, 92, 105, 116, 128, 138, 148, 159, 171, 184, 199, 220, 255};

struct half {
  uint16_t bits;
};

#if defined(__F16C__)
inline float widen(half value) { return _cvtsh_ss(value.bits); }
#else
inline float widen(half value) {
  uint32_t bits = uint32_t(value.bits & 0x7fff) << 13, sign = uint32_t(value.bits & 0x8000) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  wide *= 0x1p112f;  // the exponents' zeros lie so far apart
  return sign ? -wide : wide;
}
#endif

// How a weight [outputs, row bytes] is packed.
struct Packing {
  Format format;
  long groups, row_bytes;

  Packing(const Tensor& weight, long inputs) : groups((inputs + PAIR - 1) / PAIR * 2) {
    STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.scalar_type() == ScalarType::Byte && groups,
                    "a packed weight expected");
    row_bytes = weight.size(1);
    long bytes = row_bytes % (groups / 2) ? 0 : row_bytes / (groups / 2);
    STD_TORCH_CHECK(bytes == 72 || bytes == 40 || bytes == 36, "shapes do not fit");
    format = bytes == 72 ? Format::INT8 : bytes == 40 ? Format::INT4 : Format::NF4;
  }
  long pair_bytes() const { return format == Format::INT8 ? PAIR : PAIR / 2; }
  long header_bytes() const { return groups * (format == Format::NF4 ? 2 : 4); }
};

// Calls `run` with the format as a type.
template <typename Run>
void by_format(Format format, Run run) {
  switch (format) {
    case Format::INT8: return run(std::integral_constant<Format, Format::INT8>{});
    case Format::INT4: return run(std::integral_constant<Format, Format::INT4>{});
    default: run(std::integral_constant<Format, Format::NF4>{});
  }
}

#if defined(__AVX512BW__)

// The values of a pair of groups.
template <Format F>
__m512i values_of(const uint8_t* codes) {
  if constexpr (F == Format::INT8) return _mm512_loadu_si512(codes);
  const __m256i low_bits = _mm256_set1_epi8(15);
  __m256i both = _mm256_loadu_si256((const __m256i*)codes);
  __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
  __m512i values = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(both, low_bits)), high, 1);
  if constexpr (F == Format::NF4) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)NF4_VALUES));
    values = _mm512_shuffle_epi8(table, values);
  }
  return values;
}

inline void store_pair(float* out, const __m512 (&wide)[4]) {
  for (int i = 0; i < 4; i++) _mm512_storeu_ps(out + 16 * i, wide[i]);
}

inline void store_pair(bf16* out, const __m512 (&wide)[4]) {
#if defined(__AVX512BF16__)
  for (int i = 0; i < 4; i += 2)
    _mm512_storeu_si512(out + 16 * i, (__m512i)_mm512_cvtne2ps_pbh(wide[i + 1], wide[i]));
#else
  for (int i = 0; i < 4; i++) store(out + 16 * i, (Floats)wide[i]);
#endif
}

template <Format F, typename T>
void widen_pair(const uint8_t* codes, const float (&scales)[2], const float (&offsets)[2], T* out) {
  __m512i values = values_of<F>(codes);
  __m128i parts[4] = {_mm512_castsi512_si128(values), _mm512_extracti32x4_epi32(values, 1),
                      _mm512_extracti32x4_epi32(values, 2), _mm512_extracti32x4_epi32(values, 3)};
  __m512 wide[4];
  for (int i = 0; i < 4; i++)
    wide[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(parts[i])), _mm512_set1_ps(scales[i / 2]),
                              _mm512_set1_ps(offsets[i / 2]));
  store_pair(out, wide);
}

#else

template <Format F, typename T>
void widen_pair(const uint8_t* codes, const float (&scales)[2], const float (&offsets)[2], T* out) {
  for (long i = 0; i < PAIR; i++) {
    uint8_t value = F == Format::INT8 ? codes[i] : i < GROUP ? codes[i] & 15 : codes[i - GROUP] >> 4;
    if (F == Format::NF4) value = NF4_VALUES[value];
    out[i] = narrow<T>(value * scales[i / GROUP] + offsets[i / GROUP]);
  }
}

#endif

// One row of a packed weight -> [inputs].
template <Format F, typename T>
void widen_row(const uint8_t* row, const Packing& packing, T* out, long inputs) {
  auto scales = reinterpret_cast<const half*>(row), offsets = scales + packing.groups;
  const uint8_t* codes = row + packing.header_bytes();
  for (long at = 0; at < inputs; at += PAIR, codes += packing.pair_bytes(), scales += 2, offsets += 2) {
    float scale[2] = {widen(scales[0]), widen(scales[1])}, offset[2] = {-128 * scale[0], -128 * scale[1]};
    if (F != Format::NF4) offset[0] = widen(offsets[0]), offset[1] = widen(offsets[1]);
    prefetch(codes);
    if (at + PAIR <= inputs) {
      widen_pair<F>(codes, scale, offset, out + at);
    } else {
      T wide[PAIR];
      widen_pair<F>(codes, scale, offset, wide);
      std::memcpy(out + at, wide, (inputs - at) * sizeof(T));
    }
  }
}

// `count` rows of a packed weight, from `first` on -> [count, inputs].
template <typename T>
void widen_rows(const uint8_t* weight, const Packing& packing, T* out, long first, long count, long inputs) {
  by_format(packing.format, [&](auto format) {
    for (long i = 0; i < count; i++)
      widen_row<decltype(format)::value>(weight + (first + i) * packing.row_bytes, packing, out + i * inputs, inputs);
  });
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SWARM_VNNI 1

// Rows of x in 16 bits, as two digits: x = scale * (256 * high + low), a scale for each group. That is 2^-16 of the
// largest value of a group off at most, less than bf16 is.
struct Digits {
  long groups, padded;              // padded: to whole vectors of groups
  std::vector<int8_t> digits;       // [rows, pairs of groups, 2, PAIR]
  std::vector<float> scales, sums;  // [rows, padded]; sums: of what x is by its digits

  template <typename T>
  Digits(const T* x, long rows, long inputs)
      : groups((inputs + PAIR - 1) / PAIR * 2),
        padded((groups + 15) / 16 * 16),
        digits(rows * groups * PAIR),
        scales(rows * padded),
        sums(rows * padded) {
    for (long row = 0; row < rows; row++)
      for (long group = 0; group * GROUP < inputs; group++)
        take(x + row * inputs + group * GROUP, std::min(GROUP, inputs - group * GROUP), row, group);
  }

  const int8_t* row(long index) const { return digits.data() + index * groups * PAIR; }

 private:
  template <typename T>
  void take(const T* x, long count, long row, long group) {
    constexpr float MOST = 127 * 256;
    float wide[GROUP] = {};
    for (long i = 0; i < count; i++) wide[i] = widen(x[i]);
    __m512 halves[2] = {_mm512_loadu_ps(wide), _mm512_loadu_ps(wide + 16)};
    __m512 sizes[2] = {_mm512_abs_ps(halves[0]), _mm512_abs_ps(halves[1])};
    const __m512 infinity = _mm512_set1_ps(INFINITY);
    float& scale = scales[row * padded + group];
    float& sum = sums[row * padded + group];
    if ((_mm512_cmp_ps_mask(sizes[0], infinity, _CMP_LT_OQ) & _mm512_cmp_ps_mask(sizes[1], infinity, _CMP_LT_OQ)) !=
        0xffff) {  // the digits stay 0
      scale = sum = NAN;
      return;
    }
    scale = _mm512_reduce_max_ps(_mm512_max_ps(sizes[0], sizes[1])) / MOST;
    if (scale < 1e-37f) {
      scale = 0;
      return;
    }
    __m512 inverse = _mm512_set1_ps(1 / scale);
    __m512i total = _mm512_setzero_si512();
    int8_t* to = const_cast<int8_t*>(this->row(row)) + group / 2 * 2 * PAIR + group % 2 * GROUP;
    for (int i = 0; i < 2; i++) {
      __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(halves[i], inverse));
      __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      total = _mm512_add_epi32(total, whole);
      _mm_storeu_si128((__m128i*)(to + 16 * i), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128((__m128i*)(to + PAIR + 16 * i), _mm512_cvtepi32_epi8(whole));
    }
    sum = scale * float(_mm512_reduce_add_epi32(total));
  }
};

// `ROWS` rows of x, from `first` on, against outputs `[begin, end)`.
template <typename T, Format F, int ROWS>
void digits_tile(const Digits& x, long first, const uint8_t* weight, const Packing& packing, const T* bias, T* y,
                 long outputs, long begin, long end) {
  constexpr long BYTES = F == Format::INT8 ? PAIR : PAIR / 2;
  auto widened = [](const half* from, __mmask16 mask) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from));
  };
  const __m512i firsts = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  for (long out = begin; out < end; out++) {
    const uint8_t* row = weight + out * packing.row_bytes;
    auto scales = reinterpret_cast<const half*>(row), offsets = scales + packing.groups;
    const uint8_t* codes = row + packing.header_bytes();
    __m512 sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = _mm512_setzero_ps();
    for (long group = 0; group < packing.groups; group += 16) {
      long some = std::min(16L, packing.groups - group);
      __mmask16 mask = __mmask16((1u << some) - 1);
      __m512 scale = widened(scales + group, mask), offset, factors[ROWS];
      if constexpr (F == Format::NF4)
        offset = _mm512_mul_ps(scale, _mm512_set1_ps(-128));
      else
        offset = widened(offsets + group, mask);
      for (int r = 0; r < ROWS; r++) {
        long at = (first + r) * x.padded + group;
        factors[r] = _mm512_mul_ps(scale, _mm512_loadu_ps(x.scales.data() + at));
        sums[r] = _mm512_fmadd_ps(offset, _mm512_loadu_ps(x.sums.data() + at), sums[r]);
      }
      __m512i places = firsts;
      for (long i = 0; i < some; i += 2, codes += BYTES) {
        prefetch(codes);
        __m512i values = values_of<F>(codes);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const int8_t* digits = x.row(first + r) + (group + i) * PAIR;
          __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), values, _mm512_loadu_si512(digits));
          dot = _mm512_dpbusd_epi32(_mm512_slli_epi32(dot, 8), values, _mm512_loadu_si512(digits + PAIR));
          sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(places, factors[r]), sums[r]);
        }
        places = _mm512_add_epi32(places, _mm512_set1_epi32(2));
      }
    }
    for (int r = 0; r < ROWS; r++)
      y[(first + r) * outputs + out] = narrow<T>(_mm512_reduce_add_ps(sums[r]) + (bias ? widen(bias[out]) : 0.0f));
  }
}

template <typename T, Format F>
using DigitsTile = void (*)(const Digits&, long, const uint8_t*, const Packing&, const T*, T*, long, long, long);

template <typename T, Format F>
constexpr DigitsTile<T, F> DIGITS_TILES[] = {
    nullptr,
    digits_tile<T, F, 1>, digits_tile<T, F, 2>, digits_tile<T, F, 3>, digits_tile<T, F, 4>,
    digits_tile<T, F, 5>, digits_tile<T, F, 6>, digits_tile<T, F, 7>, digits_tile<T, F, 8>};

template <typename T>
void digits_of(const T* x, const uint8_t* weight, const Packing& packing, const T* bias, T* y, long rows, long inputs,
               long outputs, int64_t grain) {
  Digits digits(x, rows, inputs);
  by_format(packing.format, [&](auto format) {
    torch::stable::parallel_for(0, outputs, grain, [&](int64_t begin, int64_t end) {
      long strip = rows <= MOST_ROWS ? end - begin : STRIP;
      for (; begin < end; begin += strip)
        for (long row = 0; row < rows; row += MOST_ROWS)
          DIGITS_TILES<T, decltype(format)::value>[std::min<long>(MOST_ROWS, rows - row)](
              digits, row, weight, packing, bias, y, outputs, begin, std::min<int64_t>(end, begin + strip));
    });
  });
}

#endif

constexpr long WIDENED = 2 * AMX_ROWS;         // outputs at a time
constexpr long LEAST_WIDENED_AMX_ROWS = 5;  // fewer are quicker by digits

// x [rows, inputs] against a packed weight.
template <typename T>
void quantized_of(const T* x, const Tensor& weight, const Tensor* bias, T* y, long rows, long inputs) {
  Packing packing(weight, inputs);
  long outputs = weight.size(0);
  auto data = static_cast<const uint8_t*>(weight.data_ptr());
  auto bias_data = bias ? static_cast<const T*>(bias->data_ptr()) : nullptr;
  int64_t grain = std::max<int64_t>(1, (1 << 18) / inputs);
  bool amx = std::is_same_v<T, bf16> && rows >= LEAST_WIDENED_AMX_ROWS && amx_takes(inputs, outputs);
#if defined(SWARM_VNNI)
  if (!amx) return digits_of(x, data, packing, bias_data, y, rows, inputs, outputs, grain);
#endif
  std::vector<uint32_t> tiles;
  if constexpr (std::is_same_v<T, bf16>)
    if (amx) tiles = amx_tiles_of(x, rows, inputs);
  int64_t strips = (outputs + WIDENED - 1) / WIDENED;
  grain = std::max<int64_t>(1, grain / (rows / AMX_ROWS + 1) / WIDENED);
  torch::stable::parallel_for(0, strips, grain, [&](int64_t begin, int64_t end) {
    std::vector<T> wide(WIDENED * inputs);
    for (int64_t strip = begin; strip < end; strip++) {
      long first = strip * WIDENED, count = std::min(WIDENED, outputs - first);
      widen_rows(data, packing, wide.data(), first, count, inputs);
      auto some_bias = bias_data ? bias_data + first : nullptr;
      if constexpr (std::is_same_v<T, bf16>)
        if (amx) {
          amx_part(tiles.data(), wide.data(), some_bias, y + first, rows, inputs, outputs, 0, count / AMX_ROWS);
          continue;
        }
      linear_part<T>(x, wide.data(), some_bias, y + first, rows, inputs, outputs, 0, count);
    }
  });
}

// A packed weight -> [outputs, inputs] in the dtype of `like`.
inline Tensor widened(const Tensor& weight, int64_t inputs, const Tensor& like) {
  Packing packing(weight, inputs);
  Tensor wide = torch::stable::new_empty(like, {weight.size(0), inputs});
  auto data = static_cast<const uint8_t*>(weight.data_ptr());
  by_dtype(like, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto to = static_cast<T*>(wide.data_ptr());
    torch::stable::parallel_for(0, weight.size(0), std::max<int64_t>(1, (1 << 16) / inputs),
                                [&](int64_t begin, int64_t end) {
                                  widen_rows(data, packing, to + begin * inputs, begin, end - begin, inputs);
                                });
  });
  return wide;
}

template <typename T>
void linear_of(const T* x, const Tensor& weight, const Tensor* bias, T* y, long rows, long inputs) {
  (weight.scalar_type() == ScalarType::Byte ? quantized_of<T> : dense_of<T>)(x, weight, bias, y, rows, inputs);
}

// That `weight` is one for so many inputs and outputs, packed or in the dtype of `like`.
inline void check_weight(const Tensor& weight, const Tensor& like, int64_t inputs, int64_t outputs) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == outputs, "shapes do not fit");
  if (weight.scalar_type() == ScalarType::Byte) return void(Packing(weight, inputs));
  STD_TORCH_CHECK(weight.size(1) == inputs, "shapes do not fit");
  STD_TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == like.scalar_type(),
                  "contiguous tensors of one dtype expected");
}

// x [..., inputs], weight [outputs, inputs] or packed, bias [outputs]: contiguous, one dtype (fp32 or bf16; sums in fp32).
inline Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.is_contiguous(), "contiguous tensors of one dtype expected");
  int64_t inputs = x.size(x.dim() - 1);
  check_weight(weight, x, inputs, weight.size(0));
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); i++) shape.push_back(x.size(i));
  shape.push_back(weight.size(0));
  Tensor y = torch::stable::new_empty(x, shape);
  long rows = x.numel() / std::max<int64_t>(1, inputs);
  const Tensor* given = bias.has_value() ? &*bias : nullptr;
  by_dtype(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    linear_of(static_cast<const T*>(x.data_ptr()), weight, given, static_cast<T*>(y.data_ptr()), rows, inputs);
  });
  return y;
}

}  // namespace swarm
