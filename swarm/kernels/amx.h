// Products in bf16 on a processor's matrix unit (Intel AMX), for any number of rows.
//
// Its instruction wants the left matrix as it lies in memory and the right one with neighbours of a column side by
// side. Libraries take the weight as the right one and rearrange it in every call, which for a hundred rows costs as
// much as the product. Here the weight is the left one, read once and as it lies; x, which is smaller, is rearranged.

#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define SWARM_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace swarm {

constexpr long AMX_ROWS = 16;   // of a tile: outputs in a tile of the weight, rows of x in one of x
constexpr long AMX_DEPTH = 32;  // inputs of a tile

#if defined(SWARM_AMX)

// Linux keeps the tiles of those processes only that ask for them.
inline bool amx_allowed() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed;
}

// Whether a product of these sizes is for the matrix unit.
inline bool amx_takes(long inputs, long outputs) {
  return inputs > 0 && inputs % AMX_DEPTH == 0 && outputs % AMX_ROWS == 0 && amx_allowed();
}

// 16 vectors of 16 words: rows become columns.
inline void transpose(__m512i (&rows)[16]) {
  __m512i some[16];
  for (int i = 0; i < 8; i++) {
    some[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    some[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(some[i], some[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(some[i], some[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(some[i + 1], some[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(some[i + 1], some[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    some[i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
    some[4 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
    some[8 + i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
    some[12 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm512_shuffle_i32x4(some[i], some[4 + i], 0x88);
    rows[4 + i] = _mm512_shuffle_i32x4(some[8 + i], some[12 + i], 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(some[i], some[4 + i], 0xdd);
    rows[12 + i] = _mm512_shuffle_i32x4(some[8 + i], some[12 + i], 0xdd);
  }
}

constexpr long TILE_WORDS = 256;

// x [rows, inputs] -> tiles [rows / 16, inputs / 32, 16 pairs of inputs, 16 rows]; missing rows are zeros.
inline std::vector<uint32_t> amx_tiles_of(const bf16* x, long rows, long inputs) {
  long groups = (rows + AMX_ROWS - 1) / AMX_ROWS, depth = inputs / AMX_DEPTH;
  std::vector<uint32_t> tiles(groups * depth * TILE_WORDS);
  for (long group = 0; group < groups; group++)
    for (long at = 0; at < depth; at++) {
      __m512i words[16];
      for (long i = 0; i < 16; i++) {
        long row = group * AMX_ROWS + i;
        words[i] = row < rows ? _mm512_loadu_si512(x + row * inputs + at * AMX_DEPTH) : _mm512_setzero_si512();
      }
      transpose(words);
      uint32_t* tile = tiles.data() + (group * depth + at) * TILE_WORDS;
      for (long i = 0; i < 16; i++) _mm512_storeu_si512(tile + i * 16, words[i]);
    }
  return tiles;
}

struct AmxConfig {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sums [16 OUTS outputs, 16 rows] to y: two neighbouring outputs become one word, and words are transposed.
template <int OUTS>
void amx_store(const float (*sums)[16], const bf16* bias, bf16* y, long outputs, long rows) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i words[16];
  for (int i = 0; i < 16; i++) {
    if (i >= 8 * OUTS) {
      words[i] = _mm512_setzero_si512();
      continue;
    }
    __m512 even = _mm512_loadu_ps(sums[2 * i]), odd = _mm512_loadu_ps(sums[2 * i + 1]);
    if (bias) {
      even = _mm512_add_ps(even, _mm512_set1_ps(widen(bias[2 * i])));
      odd = _mm512_add_ps(odd, _mm512_set1_ps(widen(bias[2 * i + 1])));
    }
    words[i] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
  }
  transpose(words);
  for (long row = 0; row < std::min(rows, AMX_ROWS); row++)
    if constexpr (OUTS == 2)
      _mm512_storeu_si512(y + row * outputs, words[row]);
    else
      _mm256_storeu_si256((__m256i*)(y + row * outputs), _mm512_castsi512_si256(words[row]));
}

// OUTS tiles of outputs by GROUPS tiles of rows.
template <int OUTS, int GROUPS>
void amx_strip(const uint32_t* tiles, const bf16* weight, const bf16* bias, bf16* y, long rows, long inputs,
               long outputs) {
  long depth = inputs / AMX_DEPTH;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long at = 0; at < depth; at++) {
    _tile_loadd(4, weight + at * AMX_DEPTH, inputs * 2);
    _tile_loadd(6, tiles + at * TILE_WORDS, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (OUTS == 2) {
      _tile_loadd(5, weight + AMX_ROWS * inputs + at * AMX_DEPTH, inputs * 2);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (GROUPS == 2) {
      _tile_loadd(7, tiles + (depth + at) * TILE_WORDS, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (OUTS * GROUPS == 4) { _tile_dpbf16ps(3, 5, 7); }
  }
  alignas(64) float sums[2 * AMX_ROWS][AMX_ROWS];
  _tile_stored(0, sums, 64);
  if constexpr (OUTS == 2) { _tile_stored(1, sums + AMX_ROWS, 64); }
  amx_store<OUTS>(sums, bias, y, outputs, rows);
  if constexpr (GROUPS == 2) {
    _tile_stored(2, sums, 64);
    if constexpr (OUTS == 2) { _tile_stored(3, sums + AMX_ROWS, 64); }
    amx_store<OUTS>(sums, bias, y + AMX_ROWS * outputs, outputs, rows - AMX_ROWS);
  }
}

// Tiles of outputs `[begin, end)` of the product; `tiles` are those of x. Fetching the weight ahead, and passes over
// parts of the inputs that stay in the first cache, were tried and brought nothing.
inline void amx_part(const uint32_t* tiles, const bf16* weight, const bf16* bias, bf16* y, long rows, long inputs,
                     long outputs, long begin, long end) {
  long groups = (rows + AMX_ROWS - 1) / AMX_ROWS, group_words = inputs / AMX_DEPTH * TILE_WORDS;
  AmxConfig config;
  _tile_loadconfig(&config);
  for (long tile = begin; tile < end; tile += 2) {
    long out = tile * AMX_ROWS;
    for (long group = 0; group < groups; group += 2) {
      bool two_outs = tile + 1 < end, two_groups = group + 1 < groups;
      auto strip = two_outs ? (two_groups ? amx_strip<2, 2> : amx_strip<2, 1>)
                            : (two_groups ? amx_strip<1, 2> : amx_strip<1, 1>);
      strip(tiles + group * group_words, weight + out * inputs, bias ? bias + out : nullptr,
            y + group * AMX_ROWS * outputs + out, rows - group * AMX_ROWS, inputs, outputs);
    }
  }
  _tile_release();
}

#else

inline bool amx_takes(long, long) { return false; }
inline std::vector<uint32_t> amx_tiles_of(const bf16*, long, long) { return {}; }
inline void amx_part(const uint32_t*, const bf16*, const bf16*, bf16*, long, long, long, long, long) {}

#endif

}  // namespace swarm
