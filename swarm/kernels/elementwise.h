// What lies between the products of a block: norms, rotary embeddings, gates, sums. All round where the library does.

#pragma once

#include "vectors.h"

namespace swarm {

constexpr int64_t GRAIN = 1 << 15;  // values a thread

// Calls `run(begin, end)` for parts of `rows` rows of `width`.
template <typename Run>
void by_rows(int64_t rows, int64_t width, Run run) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, width)), run);
}

// One row: x / sqrt(mean(x^2) + epsilon) * weight.
template <typename T>
void rms_norm_row(const T* x, const T* weight, T* y, long width, float epsilon) {
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
  for (at = 0; at + LANES <= width; at += LANES)
    store(y + at, lanes_of(weight + at) * rounded<T>(lanes_of(x + at) * scale));
  for (; at < width; at++) y[at] = narrow<T>(widen(weight[at]) * widen(narrow<T>(widen(x[at]) * scale)));
}

template <typename T>
void rms_norm_of(const T* x, const T* weight, T* y, long rows, long width, float epsilon) {
  by_rows(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      rms_norm_row(x + row * width, weight, y + row * width, width, epsilon);
  });
}

// x [..., width], weight [width]: contiguous, one dtype. As llama's: x / sqrt(mean(x^2) + epsilon) * weight.
inline Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
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

// gate * sigmoid(gate) * up, to out, which may be one of them.
template <typename T>
void gated_of(const T* gate, const T* up, T* out, long size) {
  torch::stable::parallel_for(0, (size + LANES - 1) / LANES, GRAIN / LANES, [&](int64_t begin, int64_t end) {
    for (long at = begin * LANES; at < std::min<long>(size, end * LANES); at += LANES) {
      if (at + LANES > size) {
        for (; at < size; at++) {
          float x = widen(gate[at]), activated = x / (1.0f + std::exp(-x));
          out[at] = narrow<T>(widen(narrow<T>(activated)) * widen(up[at]));
        }
        return;
      }
      Floats x = lanes_of(gate + at), other = lanes_of(up + at);
      Floats power = exponential(x > 0.0f ? -x : x);
      Floats sigmoid = (x > 0.0f ? Floats{} + 1.0f : power) / (power + 1.0f);
      store(out + at, rounded<T>(x * sigmoid) * other);
    }
  });
}

// gate, up: contiguous, of one shape and dtype -> silu(gate) * up.
inline Tensor gated(const Tensor& gate, const Tensor& up) {
  STD_TORCH_CHECK(gate.is_contiguous() && up.is_contiguous() && gate.scalar_type() == up.scalar_type() &&
                      gate.numel() == up.numel(),
                  "contiguous tensors of one shape and dtype expected");
  Tensor out = torch::stable::new_empty(gate, gate.sizes());
  by_dtype(gate, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    gated_of(static_cast<const T*>(gate.data_ptr()), static_cast<const T*>(up.data_ptr()),
             static_cast<T*>(out.data_ptr()), gate.numel());
  });
  return out;
}

template <typename T>
void add_to(T* sum, const T* more, long size) {
  long at = 0;
  for (; at + LANES <= size; at += LANES) store(sum + at, lanes_of(sum + at) + lanes_of(more + at));
  for (; at < size; at++) sum[at] = narrow<T>(widen(sum[at]) + widen(more[at]));
}

// One head, as the library's rotate_half: x, cos, sin [width] -> y, which may be x.
template <typename T>
void rotate_head(const T* x, const T* cos, const T* sin, T* y, long width) {
  long half = width / 2, at = 0;
  for (; at + LANES <= half; at += LANES) {
    Floats low = lanes_of(x + at), high = lanes_of(x + half + at);
    Floats turned = rounded<T>(high * lanes_of(cos + half + at)) + rounded<T>(low * lanes_of(sin + half + at));
    store(y + at, rounded<T>(low * lanes_of(cos + at)) - rounded<T>(high * lanes_of(sin + at)));
    store(y + half + at, turned);
  }
  for (; at < half; at++) {
    float low = widen(x[at]), high = widen(x[at + half]);
    y[at] = narrow<T>(widen(narrow<T>(low * widen(cos[at]))) - widen(narrow<T>(high * widen(sin[at]))));
    y[at + half] =
        narrow<T>(widen(narrow<T>(high * widen(cos[at + half]))) + widen(narrow<T>(low * widen(sin[at + half]))));
  }
}

// x, y [rows, heads, width], cos and sin [rows, width].
template <typename T>
void rotate_of(const T* x, const T* cos, const T* sin, T* y, long rows, long heads, long width) {
  by_rows(rows, heads * width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      for (long head = 0; head < heads; head++)
        rotate_head(x + (row * heads + head) * width, cos + row * width, sin + row * width,
                    y + (row * heads + head) * width, width);
  });
}

// x [1, rows, heads, width], cos and sin [1, rows, width]: contiguous, one dtype. -> the same, turned.
inline Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  STD_TORCH_CHECK(x.dim() == 4 && x.is_contiguous() && x.size(0) == 1 && x.size(3) % 2 == 0,
                  "[1, rows, heads, width] expected");
  for (const Tensor* table : {&cos, &sin})
    STD_TORCH_CHECK(table->dim() == 3 && table->is_contiguous() && table->size(1) == x.size(1) &&
                        table->size(2) == x.size(3) && table->scalar_type() == x.scalar_type(),
                    "rotary tables of its rows expected");
  Tensor y = torch::stable::new_empty(x, x.sizes());
  by_dtype(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto data = [](const Tensor& tensor) { return static_cast<const T*>(tensor.data_ptr()); };
    rotate_of(data(x), data(cos), data(sin), static_cast<T*>(y.data_ptr()), x.size(1), x.size(2), x.size(3));
  });
  return y;
}

}  // namespace swarm
