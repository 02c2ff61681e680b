// What a small model is made of, forward and backward: matrix products, embeddings, activations, normalisation, losses.
//
// Sums are kept in double precision and rounded once, so that results differ from the CPU's by their last bits at most.
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace rehearsal {
namespace {

// ---- matrix products ----

// An operand as matrices, one for each position of the batch axes.
struct Matrices {
  Extents batch;
  int64_t rows = 1, columns = 1, row_stride = 0, column_stride = 0;

  Matrices(const DenseTensor& tensor, bool transposed, bool left) {
    const Extents extents = list(tensor.dims());
    if (extents.size() == 1) {  // a row on the left, a column on the right
      (left ? columns : rows) = extents[0];
      (left ? column_stride : row_stride) = 1;
      return;
    }
    batch.assign(extents.begin(), extents.end() - 2);
    rows = extents[extents.size() - 2];
    columns = extents.back();
    row_stride = columns;
    column_stride = 1;
    if (transposed) {
      std::swap(rows, columns);
      std::swap(row_stride, column_stride);
    }
  }
  Matrices(const Extents& batch, int64_t rows, int64_t columns)
      : batch(batch), rows(rows), columns(columns), row_stride(columns), column_stride(1) {}

  Matrices transposed() const {
    Matrices other = *this;
    std::swap(other.rows, other.columns);
    std::swap(other.row_stride, other.column_stride);
    return other;
  }
  Extents batch_strides(const Extents& to) const {
    Extents strides = broadcast_strides(batch, to);
    for (int64_t& stride : strides) stride *= rows * columns;
    return strides;
  }
};

// out += a b, over all positions of the batch; what is broadcast in `out` is summed up.
template <typename T>
void accumulate(const T* a, const Matrices& left, const T* b, const Matrices& right, std::vector<double>& out,
                const Matrices& result, const Extents& batch) {
  const Extents s = left.batch_strides(batch), t = right.batch_strides(batch), u = result.batch_strides(batch);
  each_run(batch, {s, t, u}, [&](const int64_t* from, int64_t length) {
    for (int64_t n = 0; n < length; ++n) {
      const T *x = a + from[0] + n * run_stride(s), *y = b + from[1] + n * run_stride(t);
      double* to_at = out.data() + from[2] + n * run_stride(u);
      for (int64_t i = 0; i < left.rows; ++i) {
        for (int64_t k = 0; k < left.columns; ++k) {
          const double factor = static_cast<double>(x[i * left.row_stride + k * left.column_stride]);
          const T* row = y + k * right.row_stride;
          double* sums = to_at + i * result.row_stride;
          for (int64_t j = 0; j < right.columns; ++j) {
            sums[j * result.column_stride] += factor * static_cast<double>(row[j * right.column_stride]);
          }
        }
      }
    }
  });
}

template <typename T>
void product_into(const CustomContext& context, const T* a, const Matrices& left, const T* b, const Matrices& right,
                  const Matrices& result, const Extents& batch, DenseTensor* out) {
  T* at = output<T>(context, out);
  if (!at) return;
  const int64_t count = out->numel();
  launch(context, [=] {
    std::vector<double> sums(count, 0);
    if (a && b) accumulate(a, left, b, right, sums, result, batch);
    for (int64_t i = 0; i < count; ++i) at[i] = static_cast<T>(sums[i]);
  });
}

void Matmul(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, bool transpose_x, bool transpose_y,
            DenseTensor* out) {
  const Matrices left(x, transpose_x, true), right(y, transpose_y, false);
  const Extents batch = broadcast(left.batch, right.batch);
  // The shape inference takes the batch of the operand with more axes, broadcast or not: the kernel knows it right.
  Extents extents = batch;
  if (x.dims().size() > 1) extents.push_back(left.rows);
  if (y.dims().size() > 1) extents.push_back(right.columns);
  out->Resize(common::make_ddim(extents));
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Matrices result(batch, left.rows, right.columns);
    product_into<T>(context, input<T>(x), left, input<T>(y), right, result, batch, out);
  });
}

void MatmulGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, const DenseTensor& gradient,
                bool transpose_x, bool transpose_y, DenseTensor* dx, DenseTensor* dy) {
  const Matrices left(x, transpose_x, true), right(y, transpose_y, false);
  const Extents batch = broadcast(left.batch, right.batch);
  const Matrices result(batch, left.rows, right.columns);
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* g = input<T>(gradient);
    if (dx) product_into<T>(context, g, result, input<T>(y), right.transposed(), left, batch, dx);
    if (dy) product_into<T>(context, input<T>(x), left.transposed(), g, result, right, batch, dy);
  });
}

// ---- embeddings ----

void Embedding(const CustomContext& context, const DenseTensor& ids, const DenseTensor& weight, int64_t padding,
               DenseTensor* out) {
  const int64_t rows = weight.dims()[0], bytes = weight.dims()[1] * phi::SizeOf(weight.dtype()), count = ids.numel();
  const char* from = reached(weight.data(), rows * bytes);
  char* at = output(context, out, weight.dtype());
  if (!at) return;
  const int device = context.GetPlace().GetDeviceId();
  by_integer(ids.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* picked = input<T>(ids);
    launch(context, [=] {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = picked[i];
        if (row == padding) {
          memset(at + i * bytes, 0, bytes);
        } else if (row < 0 || row >= rows) {
          return fail(device, "an embedding's index is out of range");
        } else {
          memcpy(at + i * bytes, from + row * bytes, bytes);
        }
      }
    });
  });
}

template <bool scaled>
void EmbeddingGrad(const CustomContext& context, const DenseTensor& ids, const DenseTensor& weight,
                   const DenseTensor& gradient, int64_t padding, DenseTensor* out) {
  const int64_t rows = weight.dims()[0], width = weight.dims()[1], count = ids.numel();
  by_integer(ids.dtype(), [&](auto tag) {
    using Index = typename decltype(tag)::type;
    const Index* picked = input<Index>(ids);
    by_float(gradient.dtype(), [&](auto other) {
      using T = typename decltype(other)::type;
      const T* g = input<T>(gradient);
      T* at = output<T>(context, out);
      launch(context, [=] {
        std::vector<double> sums(rows * width, 0);
        std::vector<int64_t> times(rows, 0);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = picked[i];
          if (row == padding || row < 0 || row >= rows) continue;
          ++times[row];
          for (int64_t k = 0; k < width; ++k) sums[row * width + k] += static_cast<double>(g[i * width + k]);
        }
        for (int64_t i = 0; i < rows * width; ++i) {
          at[i] = static_cast<T>(scaled && times[i / width] ? sums[i] / static_cast<double>(times[i / width]) : sums[i]);
        }
      });
    });
  });
}

// ---- activations ----

#define ACTIVATION(Name, expression)                                                   \
  void Name(const CustomContext& context, const DenseTensor& x, DenseTensor* out) {    \
    by_float(x.dtype(), [&](auto tag) {                                                \
      using T = typename decltype(tag)::type;                                          \
      using W = Wide<T>;                                                               \
      const T* from = input<T>(x);                                                     \
      T* at = output<T>(context, out);                                                 \
      const int64_t count = out->numel();                                              \
      launch(context, [=] {                                                            \
        for (int64_t i = 0; i < count; ++i) {                                          \
          const W a = to<W>(from[i]);                                                  \
          at[i] = static_cast<T>(expression);                                          \
        }                                                                              \
      });                                                                              \
    });                                                                                \
  }
ACTIVATION(Relu, a > 0 ? a : W(0))
ACTIVATION(Tanh, std::tanh(a))
ACTIVATION(Sigmoid, 1 / (1 + std::exp(-a)))

void Gelu(const CustomContext& context, const DenseTensor& x, bool approximate, DenseTensor* out) {
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = input<T>(x);
    T* at = output<T>(context, out);
    const int64_t count = out->numel();
    launch(context, [=] {
      for (int64_t i = 0; i < count; ++i) {
        const double v = static_cast<double>(from[i]);
        const double part = approximate ? std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)) : std::erf(v / std::sqrt(2.0));
        at[i] = static_cast<T>(0.5 * v * (1 + part));
      }
    });
  });
}

// ---- softmax and cross entropy ----

struct Along {  // one axis of a tensor: element (o, k, i) lies at (o * extent + k) * inner + i
  int64_t outer = 1, extent = 1, inner = 1;
  Along(const DenseTensor& tensor, int along) {
    const Extents extents = list(tensor.dims());
    const int axis = axis_of(along, extents.size());
    for (int i = 0; i < static_cast<int>(extents.size()); ++i) (i < axis ? outer : i > axis ? inner : extent) *= extents[i];
  }
  int64_t at(int64_t o, int64_t k, int64_t i) const { return (o * extent + k) * inner + i; }
};

template <typename T>
double softmax_of(const T* from, T* at, const Along& axis, int64_t o, int64_t i) {  // returns the logarithm of the sum
  double top = -INFINITY, sum = 0;
  for (int64_t k = 0; k < axis.extent; ++k) top = std::max(top, static_cast<double>(from[axis.at(o, k, i)]));
  for (int64_t k = 0; k < axis.extent; ++k) sum += std::exp(static_cast<double>(from[axis.at(o, k, i)]) - top);
  const double whole = top + std::log(sum);
  for (int64_t k = 0; k < axis.extent; ++k) {
    at[axis.at(o, k, i)] = static_cast<T>(std::exp(static_cast<double>(from[axis.at(o, k, i)]) - whole));
  }
  return whole;
}

void Softmax(const CustomContext& context, const DenseTensor& x, int along, DenseTensor* out) {
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = input<T>(x);
    T* at = output<T>(context, out);
    const Along axis(x, along);
    launch(context, [=] {
      for (int64_t o = 0; o < axis.outer; ++o)
        for (int64_t i = 0; i < axis.inner; ++i) softmax_of(from, at, axis, o, i);
    });
  });
}

void SoftmaxGrad(const CustomContext& context, const DenseTensor& out, const DenseTensor& gradient, int along,
                 DenseTensor* dx) {
  by_float(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *p = input<T>(out), *g = input<T>(gradient);
    T* at = output<T>(context, dx);
    const Along axis(out, along);
    launch(context, [=] {
      for (int64_t o = 0; o < axis.outer; ++o) {
        for (int64_t i = 0; i < axis.inner; ++i) {
          double dot = 0;
          for (int64_t k = 0; k < axis.extent; ++k) {
            dot += static_cast<double>(p[axis.at(o, k, i)]) * static_cast<double>(g[axis.at(o, k, i)]);
          }
          for (int64_t k = 0; k < axis.extent; ++k) {
            const int64_t n = axis.at(o, k, i);
            at[n] = static_cast<T>(static_cast<double>(p[n]) * (static_cast<double>(g[n]) - dot));
          }
        }
      }
    });
  });
}

// A class's index, or its probability: f(o, i, k) of the label tensor, whatever its type.
using Label = std::function<int64_t(int64_t)>;
Label hard_label(const DenseTensor& label) {
  Label at;
  by_integer(label.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = input<T>(label);
    at = [from](int64_t i) { return static_cast<int64_t>(from[i]); };
  });
  return at;
}

void CrossEntropy(const CustomContext& context, const DenseTensor& logits, const DenseTensor& label, bool soft_label,
                  bool use_softmax, bool, int ignored, int along, DenseTensor* softmax, DenseTensor* loss) {
  PADDLE_ENFORCE_EQ(use_softmax, true, common::errors::Unimplemented("rehearsal: cross entropy of probabilities"));
  by_float(logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = input<T>(logits);
    T *at = output<T>(context, softmax), *losses = output<T>(context, loss);
    const Along axis(logits, along);
    const T* soft = soft_label ? input<T>(label) : nullptr;
    const Label hard = soft_label ? Label() : hard_label(label);
    launch(context, [=] {
      for (int64_t o = 0; o < axis.outer; ++o) {
        for (int64_t i = 0; i < axis.inner; ++i) {
          const double whole = softmax_of(from, at, axis, o, i);
          double sum = 0;
          if (soft) {
            for (int64_t k = 0; k < axis.extent; ++k) {
              const int64_t n = axis.at(o, k, i);
              sum += static_cast<double>(soft[n]) * (whole - static_cast<double>(from[n]));
            }
          } else {
            const int64_t k = hard(o * axis.inner + i);
            if (k != ignored && k >= 0 && k < axis.extent) sum = whole - static_cast<double>(from[axis.at(o, k, i)]);
          }
          losses[o * axis.inner + i] = static_cast<T>(sum);
        }
      }
    });
  });
}

void CrossEntropyGrad(const CustomContext& context, const DenseTensor& label, const DenseTensor& softmax,
                      const DenseTensor& gradient, bool soft_label, bool, bool, int ignored, int along, DenseTensor* dx) {
  by_float(softmax.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *p = input<T>(softmax), *g = input<T>(gradient);
    T* at = output<T>(context, dx);
    const Along axis(softmax, along);
    const T* soft = soft_label ? input<T>(label) : nullptr;
    const Label hard = soft_label ? Label() : hard_label(label);
    launch(context, [=] {
      for (int64_t o = 0; o < axis.outer; ++o) {
        for (int64_t i = 0; i < axis.inner; ++i) {
          const double factor = static_cast<double>(g[o * axis.inner + i]);
          const int64_t right = soft ? -1 : hard(o * axis.inner + i);
          for (int64_t k = 0; k < axis.extent; ++k) {
            const int64_t n = axis.at(o, k, i);
            const double wanted = soft ? static_cast<double>(soft[n]) : k == right ? 1 : 0;
            const bool counted = soft || right != ignored;
            at[n] = static_cast<T>(counted ? factor * (static_cast<double>(p[n]) - wanted) : 0);
          }
        }
      }
    });
  });
}

// ---- layer norm ----

// Reads a parameter of any float type; a missing one is `otherwise`.
using Reader = std::function<double(int64_t)>;
Reader reader(const OptionalTensor& tensor, double otherwise) {
  if (!tensor) return [otherwise](int64_t) { return otherwise; };
  Reader at;
  by_float(tensor->dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = input<T>(*tensor);
    at = [from](int64_t i) { return static_cast<double>(from[i]); };
  });
  return at;
}

struct Norm {
  int64_t rows = 1, width = 1;
  Norm(const DenseTensor& x, int begin) {
    for (int i = 0; i < x.dims().size(); ++i) (i < begin ? rows : width) *= x.dims()[i];
  }
};

template <typename T>
using Statistic = std::conditional_t<std::is_same_v<T, double>, double, float>;

void LayerNorm(const CustomContext& context, const DenseTensor& x, const OptionalTensor& scale,
               const OptionalTensor& bias, float epsilon, int begin, DenseTensor* out, DenseTensor* mean,
               DenseTensor* variance) {
  const Norm norm(x, begin);
  const Reader by = reader(scale, 1), plus = reader(bias, 0);
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = input<T>(x);
    T* at = output<T>(context, out);
    auto *means = output<Statistic<T>>(context, mean), *variances = output<Statistic<T>>(context, variance);
    launch(context, [=] {
      for (int64_t row = 0; row < norm.rows; ++row) {
        const T* a = from + row * norm.width;
        double sum = 0, squares = 0;
        for (int64_t i = 0; i < norm.width; ++i) sum += static_cast<double>(a[i]);
        const double middle = sum / norm.width;
        for (int64_t i = 0; i < norm.width; ++i) squares += std::pow(static_cast<double>(a[i]) - middle, 2);
        const double spread = squares / norm.width, factor = 1 / std::sqrt(spread + epsilon);
        means[row] = middle;
        variances[row] = spread;
        for (int64_t i = 0; i < norm.width; ++i) {
          at[row * norm.width + i] = static_cast<T>((static_cast<double>(a[i]) - middle) * factor * by(i) + plus(i));
        }
      }
    });
  });
}

void LayerNormGrad(const CustomContext& context, const DenseTensor& x, const OptionalTensor& scale,
                   const OptionalTensor&, const DenseTensor& mean, const DenseTensor& variance,
                   const DenseTensor& gradient, float epsilon, int begin, DenseTensor* dx, DenseTensor* dscale,
                   DenseTensor* dbias) {
  const Norm norm(x, begin);
  const Reader by = reader(scale, 1);
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *from = input<T>(x), *g = input<T>(gradient);
    const auto *means = input<Statistic<T>>(mean), *variances = input<Statistic<T>>(variance);
    T* at = dx ? output<T>(context, dx) : nullptr;
    const DataType type = scale ? scale->dtype() : x.dtype();
    char *of_scale = dscale ? output(context, dscale, type) : nullptr, *of_bias = dbias ? output(context, dbias, type) : nullptr;
    launch(context, [=] {
      std::vector<double> scales(norm.width, 0), biases(norm.width, 0);
      for (int64_t row = 0; row < norm.rows; ++row) {
        const double middle = means[row], factor = 1 / std::sqrt(static_cast<double>(variances[row]) + epsilon);
        double sum = 0, dot = 0;
        for (int64_t i = 0; i < norm.width; ++i) {
          const int64_t n = row * norm.width + i;
          const double normed = (static_cast<double>(from[n]) - middle) * factor, d = static_cast<double>(g[n]);
          scales[i] += d * normed;
          biases[i] += d;
          sum += d * by(i);
          dot += d * by(i) * normed;
        }
        for (int64_t i = 0; at && i < norm.width; ++i) {
          const int64_t n = row * norm.width + i;
          const double normed = (static_cast<double>(from[n]) - middle) * factor;
          at[n] = static_cast<T>(factor * (static_cast<double>(g[n]) * by(i) - (sum + normed * dot) / norm.width));
        }
      }
      by_float(type, [&](auto other) {
        using P = typename decltype(other)::type;
        for (int64_t i = 0; of_scale && i < norm.width; ++i) reinterpret_cast<P*>(of_scale)[i] = static_cast<P>(scales[i]);
        for (int64_t i = 0; of_bias && i < norm.width; ++i) reinterpret_cast<P*>(of_bias)[i] = static_cast<P>(biases[i]);
      });
    });
  });
}

const Registered<&Matmul> matmul("matmul", {REHEARSAL_FLOATS});
const Registered<&MatmulGrad> matmul_grad("matmul_grad", {REHEARSAL_FLOATS});
const Registered<&Embedding> embedding("embedding", {REHEARSAL_FLOATS});
const Registered<&EmbeddingGrad<false>> embedding_grad("embedding_grad", {REHEARSAL_FLOATS});
const Registered<&EmbeddingGrad<true>> embedding_scaled_grad("embedding_with_scaled_gradient_grad", {REHEARSAL_FLOATS});
const Registered<&Relu> relu("relu", {REHEARSAL_FLOATS});
const Registered<&Tanh> hyperbolic_tangent("tanh", {REHEARSAL_FLOATS});
const Registered<&Sigmoid> sigmoid("sigmoid", {REHEARSAL_FLOATS});
const Registered<&Gelu> gelu("gelu", {REHEARSAL_FLOATS});
const Registered<&Softmax> softmax("softmax", {REHEARSAL_FLOATS});
const Registered<&SoftmaxGrad> softmax_grad("softmax_grad", {REHEARSAL_FLOATS});
const Registered<&CrossEntropy> cross_entropy("cross_entropy_with_softmax", {REHEARSAL_FLOATS});
const Registered<&CrossEntropyGrad> cross_entropy_grad("cross_entropy_with_softmax_grad", {REHEARSAL_FLOATS});
const Registered<&LayerNorm> layer_norm("layer_norm", {REHEARSAL_FLOATS});
const Registered<&LayerNormGrad> layer_norm_grad("layer_norm_grad", {REHEARSAL_FLOATS});

}  // namespace
}  // namespace rehearsal
