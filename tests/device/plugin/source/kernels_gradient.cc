// Gradients of the element-wise kernels, of reductions and of kernels that move.
#include <cmath>

#include "kernels.h"

namespace rehearsal {
namespace {

// The gradient of one operand of a broadcast operation: f(gradient, x, y), summed up where that operand was repeated.
// x and y may be null where f does not look at them (Paddle does not keep what a gradient does not need).
template <typename T, typename F>
void of_operand(const CustomContext& context, const DenseTensor& gradient, const T* x, const Extents& of_x, const T* y,
                const Extents& of_y, bool first, DenseTensor* out, F f) {
  if (!out) return;
  const T* g = input<T>(gradient);
  const Extents extents = list(gradient.dims());
  T* at = output<T>(context, out);
  if (!at) return;
  const int64_t count = out->numel();
  launch(context, [=] {
    const Extents s = broadcast_strides(of_x, extents), t = broadcast_strides(of_y, extents), target = first ? s : t;
    const int64_t a = run_stride(s), b = run_stride(t), c = run_stride(target);
    std::vector<Sum<T>> sums(count, Sum<T>(0));
    const T* next = g;
    each_run(extents, {s, t, target}, [&](const int64_t* from, int64_t length) {
      for (int64_t i = 0; i < length; ++i) {
        const Wide<T> left = x ? to<Wide<T>>(x[from[0] + i * a]) : Wide<T>(0);
        const Wide<T> right = y ? to<Wide<T>>(y[from[1] + i * b]) : Wide<T>(0);
        Sum<T>& sum = sums[from[2] + i * c];
        sum = sum + to<Sum<T>>(f(to<Wide<T>>(*next++), left, right));
      }
    });
    for (int64_t i = 0; i < count; ++i) at[i] = to<T>(sums[i]);
  });
}

template <int sign>
void AddGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, const DenseTensor& gradient, int,
             DenseTensor* dx, DenseTensor* dy) {
  by_float(gradient.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    const Extents a = list(x.dims()), b = list(y.dims());
    const T* none = nullptr;
    // dx may lie where the gradient lies (Paddle computes it in place): it comes last.
    of_operand<T>(context, gradient, none, a, none, b, false, dy, [](W g, W, W) { return W(sign) * g; });
    of_operand<T>(context, gradient, none, a, none, b, true, dx, [](W g, W, W) { return g; });
  });
}

void MultiplyGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, const DenseTensor& gradient,
                  int, DenseTensor* dx, DenseTensor* dy) {
  by_float(gradient.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    const Extents a = list(x.dims()), b = list(y.dims());
    const T *p = input<T>(x), *q = input<T>(y);
    of_operand<T>(context, gradient, p, a, q, b, true, dx, [](W g, W, W v) { return g * v; });
    of_operand<T>(context, gradient, p, a, q, b, false, dy, [](W g, W u, W) { return g * u; });
  });
}

void DivideGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, const DenseTensor& result,
                const DenseTensor& gradient, int, DenseTensor* dx, DenseTensor* dy) {
  by_float(gradient.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    const T *q = input<T>(y), *r = input<T>(result);
    const Extents a = list(x.dims()), b = list(y.dims()), of_result = list(result.dims());
    of_operand<T>(context, gradient, static_cast<const T*>(nullptr), a, q, b, true, dx,
                  [](W g, W, W v) { return g / v; });
    of_operand<T>(context, gradient, r, of_result, q, b, false, dy, [](W g, W u, W v) { return -g * u / v; });
  });
}

// The gradient of a reduction: what came out goes back to all that went in, by a factor.
void spread(const CustomContext& context, const DenseTensor& x, const DenseTensor& gradient,
            const std::vector<int64_t>& axes, bool all, double factor, DenseTensor* dx) {
  const Extents extents = list(x.dims());
  std::vector<bool> reduced(extents.size(), all || axes.empty());
  for (int64_t axis : axes) reduced[axis_of(axis, extents.size())] = true;
  Extents strides(extents.size(), 0);
  int64_t step = 1;
  for (int i = static_cast<int>(extents.size()) - 1; i >= 0; --i) {
    if (reduced[i]) continue;
    strides[i] = step;
    step *= extents[i];
  }
  by_number(gradient.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* g = input<T>(gradient);
    by_number(dx->dtype(), [&](auto other) {
      using To = typename decltype(other)::type;
      To* at = output<To>(context, dx);
      if (!at) return;
      launch(context, [=] {
        To* next = at;
        each_run(extents, {strides}, [&](const int64_t* from, int64_t length) {
          for (int64_t i = 0; i < length; ++i) {
            const Sum<T> value = to<Sum<T>>(g[from[0] + i * run_stride(strides)]);
            *next++ = to<To>(factor == 1 ? value : value * to<Sum<T>>(factor));
          }
        });
      });
    });
  });
}

void SumGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& gradient, const phi::IntArray& axes,
             bool, bool all, DenseTensor* dx) {
  spread(context, x, gradient, axes.GetData(), all, 1, dx);
}
void MeanGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& gradient, const phi::IntArray& axes,
              bool, bool all, DenseTensor* dx) {
  const double share = x.numel() ? static_cast<double>(gradient.numel()) / static_cast<double>(x.numel()) : 1;
  spread(context, x, gradient, axes.GetData(), all, share, dx);
}
void MeanAllGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& gradient, DenseTensor* dx) {
  MeanGrad(context, x, gradient, {}, false, true, dx);
}

// Gradients that are a function of the operand (or of the result) and of the gradient, element by element.
template <typename T, typename F>
void pointwise(const CustomContext& context, const DenseTensor& x, const DenseTensor& gradient, DenseTensor* dx, F f) {
  const T *a = input<T>(x), *g = input<T>(gradient);
  T* at = output<T>(context, dx);
  const int64_t count = dx->numel();
  launch(context, [=] {
    for (int64_t i = 0; i < count; ++i) at[i] = to<T>(f(to<Wide<T>>(a[i]), to<Wide<T>>(g[i])));
  });
}
#define POINTWISE(Name, expression)                                                                              \
  void Name(const CustomContext& context, const DenseTensor& x, const DenseTensor& gradient, DenseTensor* dx) {  \
    by_float(x.dtype(), [&](auto tag) {                                                                          \
      using T = typename decltype(tag)::type;                                                                    \
      using W = Wide<T>;                                                                                         \
      pointwise<T>(context, x, gradient, dx, [](W a, W g) { return expression; });                               \
    });                                                                                                          \
  }
POINTWISE(SquareGrad, 2 * a * g)
POINTWISE(SqrtGrad, g / (2 * a))            // of the result
POINTWISE(ReluGrad, a > 0 ? g : W(0))       // of the result
POINTWISE(TanhGrad, (1 - a * a) * g)        // of the result
POINTWISE(SigmoidGrad, a * (1 - a) * g)     // of the result
POINTWISE(ExpGrad, a* g)                    // of the result
POINTWISE(AbsGrad, a < 0 ? -g : a > 0 ? g : W(0))

void GeluGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& gradient, bool approximate,
              DenseTensor* dx) {
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    pointwise<T>(context, x, gradient, dx, [=](W a, W g) {
      const double v = a, root = std::sqrt(2 / M_PI);
      if (approximate) {
        const double inner = std::tanh(root * (v + 0.044715 * v * v * v));
        return static_cast<W>(g * (0.5 * (1 + inner) +
                                   0.5 * v * (1 - inner * inner) * root * (1 + 3 * 0.044715 * v * v)));
      }
      return static_cast<W>(g * (0.5 * (1 + std::erf(v / std::sqrt(2.0))) + v * std::exp(-v * v / 2) / std::sqrt(2 * M_PI)));
    });
  });
}

void ExpandGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& gradient, const phi::IntArray&,
                DenseTensor* dx) {
  by_float(gradient.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    const T* none = nullptr;
    of_operand<T>(context, gradient, none, list(x.dims()), none, list(x.dims()), true, dx, [](W g, W, W) { return g; });
  });
}

void ConcatGrad(const CustomContext& context, const std::vector<const DenseTensor*>&, const DenseTensor& gradient,
                const phi::Scalar& along, std::vector<DenseTensor*> dx) {
  const Extents extents = list(gradient.dims());
  const int axis = axis_of(along.to<int64_t>(), extents.size());
  const int64_t width = phi::SizeOf(gradient.dtype());
  int64_t outer = 1, inner = width, begin = 0;
  for (int i = 0; i < static_cast<int>(extents.size()); ++i) (i < axis ? outer : inner) *= extents[i];
  const char* from = gradient.numel() ? reached(gradient.data(), gradient.numel() * width) : nullptr;
  // A part that wants no gradient is null: where the next one begins is in the parts' own extents.
  for (DenseTensor* part : dx) {
    PADDLE_ENFORCE_NOT_NULL(part, common::errors::Unimplemented("rehearsal: concat_grad of a part without gradient"));
    char* at = output(context, part, gradient.dtype());
    if (!at) continue;
    const int64_t bytes = part->numel() * width / outer;
    launch(context, [=] {
      for (int64_t row = 0; row < outer; ++row) memcpy(at + row * bytes, from + row * inner + begin, bytes);
    });
    begin += bytes;
  }
}

void GatherGrad(const CustomContext& context, const DenseTensor& x, const DenseTensor& index,
                const DenseTensor& gradient, const phi::Scalar& along, DenseTensor* dx) {
  const Extents extents = list(x.dims());
  const int axis = axis_of(along.to<int64_t>(), extents.size());
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < static_cast<int>(extents.size()); ++i) i < axis ? outer *= extents[i] : i > axis ? inner *= extents[i] : 0;
  const int64_t extent = extents[axis], picked = index.numel();
  by_integer(index.dtype(), [&](auto tag) {
    using Index = typename decltype(tag)::type;
    const Index* rows = input<Index>(index);
    by_float(gradient.dtype(), [&](auto other) {
      using T = typename decltype(other)::type;
      const T* g = input<T>(gradient);
      T* at = output<T>(context, dx);
      if (!at) return;
      launch(context, [=] {
        std::vector<double> sums(outer * extent * inner, 0);
        for (int64_t o = 0; o < outer; ++o)
          for (int64_t i = 0; i < picked; ++i)
            for (int64_t k = 0; k < inner; ++k)
              sums[(o * extent + static_cast<int64_t>(rows[i])) * inner + k] += static_cast<double>(g[(o * picked + i) * inner + k]);
        for (size_t i = 0; i < sums.size(); ++i) at[i] = static_cast<T>(sums[i]);
      });
    });
  });
}

void TransposeGrad(const CustomContext& context, const DenseTensor& gradient, const std::vector<int>& axes,
                   DenseTensor* dx) {
  const Extents from = list(gradient.dims()), own = row_major(from);
  Extents extents(axes.size()), strides(axes.size());
  for (size_t i = 0; i < axes.size(); ++i) {
    const int axis = axis_of(axes[i], axes.size());
    extents[axis] = from[i];
    strides[axis] = own[i];
  }
  const size_t width = phi::SizeOf(gradient.dtype());
  const char* source = gradient.numel() ? reached(gradient.data(), gradient.numel() * width) : nullptr;
  char* at = output(context, dx, gradient.dtype());
  if (!at) return;
  launch(context, [=] {
    char* next = at;
    each_run(extents, {strides}, [&](const int64_t* offset, int64_t length) {
      for (int64_t i = 0; i < length; ++i, next += width) memcpy(next, source + (offset[0] + i * run_stride(strides)) * width, width);
    });
  });
}

const Registered<&AddGrad<1>> add_grad("add_grad", {REHEARSAL_FLOATS});
const Registered<&AddGrad<-1>> subtract_grad("subtract_grad", {REHEARSAL_FLOATS});
const Registered<&MultiplyGrad> multiply_grad("multiply_grad", {REHEARSAL_FLOATS});
const Registered<&DivideGrad> divide_grad("divide_grad", {REHEARSAL_FLOATS});
const Registered<&SumGrad> sum_grad("sum_grad", {REHEARSAL_FLOATS});
const Registered<&MeanGrad> mean_grad("mean_grad", {REHEARSAL_FLOATS});
const Registered<&MeanAllGrad> mean_all_grad("mean_all_grad", {REHEARSAL_FLOATS});
const Registered<&SquareGrad> square_grad("square_grad", {REHEARSAL_FLOATS});
const Registered<&SqrtGrad> sqrt_grad("sqrt_grad", {REHEARSAL_FLOATS});
const Registered<&ReluGrad> relu_grad("relu_grad", {REHEARSAL_FLOATS});
const Registered<&TanhGrad> tanh_grad("tanh_grad", {REHEARSAL_FLOATS});
const Registered<&SigmoidGrad> sigmoid_grad("sigmoid_grad", {REHEARSAL_FLOATS});
const Registered<&ExpGrad> exp_grad("exp_grad", {REHEARSAL_FLOATS});
const Registered<&AbsGrad> abs_grad("abs_grad", {REHEARSAL_FLOATS});
const Registered<&GeluGrad> gelu_grad("gelu_grad", {REHEARSAL_FLOATS});
const Registered<&ExpandGrad> expand_grad("expand_grad", {REHEARSAL_FLOATS});
const Registered<&ConcatGrad> concat_grad("concat_grad", {REHEARSAL_FLOATS});
const Registered<&GatherGrad> gather_grad("gather_grad", {REHEARSAL_FLOATS});
const Registered<&TransposeGrad> transpose_grad("transpose_grad", {REHEARSAL_FLOATS});

}  // namespace
}  // namespace rehearsal
