// Whole blocks of a model like llama, for rows of different sessions.

#pragma once

#include "attention.h"
#include "elementwise.h"
#include "quantized.h"

namespace swarm {

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
  linear_of(normed.data(), parts[Q], bias(Q_BIAS), q.data(), rows, size);
  linear_of(normed.data(), parts[K], bias(K_BIAS), k.data(), rows, size);
  linear_of(normed.data(), parts[V], bias(V_BIAS), v.data(), rows, size);
  if (bias(Q_NORM)) rms_norm_of(q.data(), data(parts[Q_NORM]), q.data(), rows * heads, width, epsilon);
  if (bias(K_NORM)) rms_norm_of(k.data(), data(parts[K_NORM]), k.data(), rows * kv_heads, width, epsilon);
  rotate_of(q.data(), data(cos), data(sin), q.data(), rows, heads, width);
  rotate_of(k.data(), data(cos), data(sin), k.data(), rows, kv_heads, width);
  attend_of<T>(Rows<T>(q.data(), heads, width), Rows<T>(k.data(), kv_heads, width), Rows<T>(v.data(), kv_heads, width),
               heads, kv_heads, width, all_keys, all_values, pasts, window, scale, attended.data());
  linear_of(attended.data(), parts[O], bias(O_BIAS), more.data(), rows, q_size);
  std::memcpy(out, data(hidden), rows * size * sizeof(T));
  add_to(out, more.data(), rows * size);

  rms_norm_of<T>(out, data(parts[NORM_2]), normed.data(), rows, size, epsilon);
  linear_of<T>(normed.data(), parts[GATE], nullptr, gate.data(), rows, size);
  linear_of<T>(normed.data(), parts[UP], nullptr, up.data(), rows, size);
  gated_of(gate.data(), up.data(), gate.data(), rows * inner);
  linear_of<T>(gate.data(), parts[DOWN], nullptr, more.data(), rows, inner);
  add_to(out, more.data(), rows * size);
}

inline Tensor block(const Tensor& hidden, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& parts,
                    const std::vector<Tensor>& all_keys, const std::vector<Tensor>& all_values,
                    const std::vector<int64_t>& pasts, int64_t window, double epsilon, double scale) {
  STD_TORCH_CHECK(parts.size() == PARTS && hidden.dim() == 3 && hidden.is_contiguous(), "a block's tensors expected");
  int64_t rows = hidden.size(1), size = hidden.size(2), width = cos.size(2);
  int64_t heads = parts[Q].size(0) / width, kv_heads = parts[K].size(0) / width, inner = parts[GATE].size(0);
  for (const Tensor* table : {&cos, &sin})
    STD_TORCH_CHECK(table->is_contiguous() && table->size(1) == rows && table->size(2) == width &&
                        table->scalar_type() == hidden.scalar_type(),
                    "rotary tables of its rows expected");
  auto shape = [&](Part part, int64_t outputs, int64_t inputs) { check_weight(parts[part], hidden, inputs, outputs); };
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

// Blocks as llama's, one after the other, for rows of different sessions, one each: hidden [1, rows, size], cos and sin
// [1, rows, width]; of each block its parts, the keys and values of all sessions as for `attend_rows`, its window,
// epsilon and scale. -> [1, rows, size]. Whoever calls it has compared it with the library's blocks.
inline Tensor blocks(const Tensor& hidden, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& parts,
                     const std::vector<Tensor>& all_keys, const std::vector<Tensor>& all_values,
                     const std::vector<int64_t>& pasts, const std::vector<int64_t>& windows,
                     const std::vector<double>& epsilons, const std::vector<double>& scales) {
  size_t count = windows.size(), rows = pasts.size();
  STD_TORCH_CHECK(count && epsilons.size() == count && scales.size() == count && parts.size() == count * PARTS &&
                      all_keys.size() == count * rows && all_values.size() == count * rows,
                  "as much of each block expected");
  auto some = [](const std::vector<Tensor>& all, size_t index, size_t each) {
    return std::vector<Tensor>(all.begin() + index * each, all.begin() + (index + 1) * each);
  };
  Tensor through = hidden;
  for (size_t i = 0; i < count; i++)
    through = block(through, cos, sin, some(parts, i, PARTS), some(all_keys, i, rows), some(all_values, i, rows), pasts,
                    windows[i], epsilons[i], scales[i]);
  return through;
}

}  // namespace swarm
