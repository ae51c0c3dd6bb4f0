// Rows of hidden states in 8 bits for the wire, bit by bit as `swarm/codec.py` does it in torch.
//
// A row is: scales of its groups of 64 channels (bf16), channels of its 8 greatest magnitudes (u16, ascending), those
// values (bf16), all channels (int8, 0 where the value stands before). Unaligned, so everything is copied.

#pragma once

#include "vectors.h"

namespace swarm {

constexpr int64_t ROW_GROUP = 64, KEPT = 8;
constexpr uint32_t INFINITE = 0x7f800000, LEAST_NORMAL = 0x00800000;

inline uint32_t magnitude(float value) {  // ordered as the absolute values are
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits & 0x7fffffff;
}

struct RowShape {
  int64_t width, groups, kept;
  explicit RowShape(int64_t width)
      : width(width), groups((width + ROW_GROUP - 1) / ROW_GROUP), kept(std::min<int64_t>(KEPT, width)) {}
  int64_t bytes() const { return 2 * groups + 4 * kept + width; }
};

inline uint32_t greatest(const float* values, int64_t count) {
  uint32_t most = 0;
  for (int64_t at = 0; at < count; at++) most = std::max(most, magnitude(values[at]));
  return most;
}

// The channels of greatest magnitude, of equal ones the first, in ascending order. `most` is each group's greatest.
inline void choose_kept(const float* row, const uint32_t* most, const RowShape& shape, uint16_t* channels) {
  uint32_t held[KEPT];
  int64_t count = 0;
  for (int64_t group = 0; group < shape.groups; group++) {
    if (count == shape.kept && most[group] <= held[count - 1]) continue;
    for (int64_t at = group * ROW_GROUP; at < std::min(shape.width, (group + 1) * ROW_GROUP); at++) {
      uint32_t size = magnitude(row[at]);
      if (count == shape.kept && size <= held[count - 1]) continue;
      int64_t place = count < shape.kept ? count++ : count - 1;
      for (; place > 0 && held[place - 1] < size; place--) {
        held[place] = held[place - 1];
        channels[place] = channels[place - 1];
      }
      held[place] = size;
      channels[place] = uint16_t(at);
    }
  }
  std::sort(channels, channels + shape.kept);
}

inline bool pack_row(float* row, const RowShape& shape, uint32_t* most, uint8_t* out) {
  for (int64_t group = 0; group < shape.groups; group++)
    most[group] = greatest(row + group * ROW_GROUP, std::min(ROW_GROUP, shape.width - group * ROW_GROUP));
  if (*std::max_element(most, most + shape.groups) >= INFINITE) return false;
  uint16_t channels[KEPT];
  choose_kept(row, most, shape, channels);
  uint8_t* values = out + 2 * shape.groups + 2 * shape.kept;
  for (int64_t index = 0; index < shape.kept; index++) {
    bf16 value = narrow<bf16>(row[channels[index]]);
    if (magnitude(widen(value)) >= INFINITE) return false;
    std::memcpy(values + 2 * index, &value, 2);
    row[channels[index]] = 0;
    int64_t group = channels[index] / ROW_GROUP;
    most[group] = greatest(row + group * ROW_GROUP, std::min(ROW_GROUP, shape.width - group * ROW_GROUP));
  }
  std::memcpy(out + 2 * shape.groups, channels, 2 * shape.kept);
  int8_t* steps = reinterpret_cast<int8_t*>(values + 2 * shape.kept);
  for (int64_t group = 0; group < shape.groups; group++) {
    float peak;
    std::memcpy(&peak, &most[group], 4);
    bf16 narrowed = narrow<bf16>(peak / 127.0f);
    float scale = widen(narrowed);
    int64_t begin = group * ROW_GROUP, end = std::min(shape.width, begin + ROW_GROUP);
    if (magnitude(scale) < LEAST_NORMAL) {
      narrowed = {0};
      std::memset(steps + begin, 0, end - begin);
    } else {
      constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded, ties to even
      for (int64_t at = begin; at < end; at++) steps[at] = int8_t((row[at] / scale + ROUND) - ROUND);
    }
    std::memcpy(out + 2 * group, &narrowed, 2);
  }
  return true;
}

inline bool unpack_row(const uint8_t* data, const RowShape& shape, float* row) {
  const uint8_t* values = data + 2 * shape.groups + 2 * shape.kept;
  const int8_t* steps = reinterpret_cast<const int8_t*>(values + 2 * shape.kept);
  for (int64_t group = 0; group < shape.groups; group++) {
    bf16 narrowed;
    std::memcpy(&narrowed, data + 2 * group, 2);
    float scale = widen(narrowed);
    if ((narrowed.bits & 0x8000) || magnitude(scale * 128) >= INFINITE) return false;
    for (int64_t at = group * ROW_GROUP; at < std::min(shape.width, (group + 1) * ROW_GROUP); at++)
      row[at] = float(steps[at]) * scale;
  }
  int64_t before = -1;
  for (int64_t index = 0; index < shape.kept; index++) {
    uint16_t channel;
    bf16 value;
    std::memcpy(&channel, data + 2 * shape.groups + 2 * index, 2);
    std::memcpy(&value, values + 2 * index, 2);
    if (channel <= before || channel >= shape.width || magnitude(widen(value)) >= INFINITE) return false;
    row[channel] = widen(value);
    before = channel;
  }
  return true;
}

inline RowShape row_shape(const Tensor& rows, const Tensor& data) {
  STD_TORCH_CHECK(rows.dim() == 2 && data.dim() == 2 && rows.size(0) == data.size(0), "two matrices expected");
  STD_TORCH_CHECK(rows.size(1) > 0 && rows.size(1) <= 1 << 16, "a channel is a u16");
  RowShape shape(rows.size(1));
  STD_TORCH_CHECK(data.size(1) == shape.bytes() && data.scalar_type() == ScalarType::Byte, "the bytes do not fit");
  STD_TORCH_CHECK(rows.is_contiguous() && data.is_contiguous(), "contiguous tensors expected");
  return shape;
}

// rows [n, width] fp32 or bf16 to data [n, bytes] u8. The first row with a value that is not finite (in bf16), or -1.
// On the caller's thread: a few microseconds a row, beside which waking another one is no gain.
inline int64_t pack_rows(const Tensor& rows, const Tensor& data) {
  RowShape shape = row_shape(rows, data);
  std::vector<float> row(shape.width);
  std::vector<uint32_t> most(shape.groups);
  int64_t bad = -1;
  by_dtype(rows, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = static_cast<const T*>(rows.data_ptr());
    uint8_t* to = static_cast<uint8_t*>(data.data_ptr());
    for (int64_t index = 0; index < rows.size(0) && bad < 0; index++) {
      for (int64_t at = 0; at < shape.width; at++) row[at] = widen(from[index * shape.width + at]);
      if (!pack_row(row.data(), shape, most.data(), to + index * shape.bytes())) bad = index;
    }
  });
  return bad;
}

// The other way, to fp32. The first row that nobody wrote so, or -1.
inline int64_t unpack_rows(const Tensor& data, const Tensor& rows) {
  RowShape shape = row_shape(rows, data);
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Float, "fp32 expected");
  const uint8_t* from = static_cast<const uint8_t*>(data.data_ptr());
  float* to = static_cast<float*>(rows.data_ptr());
  for (int64_t index = 0; index < rows.size(0); index++)
    if (!unpack_row(from + index * shape.bytes(), shape, to + index * shape.width)) return index;
  return -1;
}

}  // namespace swarm
