// Kernels that reduce axes: sums, means, extremes, truth.
#include <cmath>
#include <limits>

#include "kernels.h"

namespace rehearsal {
namespace {

// ---- reductions ----

// Strides of the result along the axes of `extents`: zero where they are reduced (all of them if `axes` is empty).
Extents reduced_strides(const Extents& extents, const std::vector<int64_t>& axes) {
  std::vector<bool> reduced(extents.size(), axes.empty());
  for (int64_t axis : axes) reduced[axis_of(axis, extents.size())] = true;
  Extents strides(extents.size(), 0);
  int64_t step = 1;
  for (int i = static_cast<int>(extents.size()) - 1; i >= 0; --i) {
    if (reduced[i]) continue;
    strides[i] = step;
    step *= extents[i];
  }
  return strides;
}

struct Same {
  template <typename T>
  T operator()(T value) const { return value; }
};

// Writes the sums, or whatever they are, as the result's type.
template <typename Acc, typename Last>
void store(const std::vector<Acc>& sums, DataType type, char* at, Last last) {
  by_number(type, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    auto* out = reinterpret_cast<Out*>(at);
    for (size_t i = 0; i < sums.size(); ++i) out[i] = to<Out>(last(sums[i]));
  });
}

template <typename In, typename Acc, typename F, typename Last>
void reduce(const CustomContext& context, const DenseTensor& x, const std::vector<int64_t>& axes, DenseTensor* out,
            Acc start, F f, Last last, DataType type = DataType::UNDEFINED) {
  const In* from = input<In>(x);
  const Extents extents = list(x.dims());
  if (type == DataType::UNDEFINED) type = out->dtype();
  char* at = output(context, out, type);
  const int64_t count = out->numel();
  if (!at) return;
  launch(context, [=] {
    std::vector<Acc> sums(count, start);
    const Extents strides = reduced_strides(extents, axes);
    const int64_t step = run_stride(strides);
    const In* next = from;
    each_run(extents, {strides}, [&](const int64_t* to_at, int64_t length) {
      if (step) {
        for (int64_t i = 0; i < length; ++i) f(sums[to_at[0] + i], next[i]);
      } else {
        Acc sum = sums[to_at[0]];
        for (int64_t i = 0; i < length; ++i) f(sum, next[i]);
        sums[to_at[0]] = sum;
      }
      next += length;
    });
    store(sums, type, at, last);
  });
}

void SumOver(const CustomContext& context, const DenseTensor& x, const phi::IntArray& axes, DataType, bool,
             DenseTensor* out) {
  if (out->dtype() == DataType::INT64 && x.numel()) {
    void* at = allocated(context, out, DataType::INT64);
    const Extents extents = list(x.dims());
    if (launched(native::sum(stream_of(context), native_type(x.dtype()), x.data(), extents, at, out->numel(),
                             reduced_strides(extents, axes.GetData())))) {
      return;
    }
  }
  by_number(x.dtype(), [&](auto tag) {
    using In = typename decltype(tag)::type;
    using Acc = Sum<In>;
    reduce<In, Acc>(context, x, axes.GetData(), out, Acc(0), [](Acc& sum, In value) { sum = sum + to<Acc>(value); },
                    Same());
  });
}

void mean(const CustomContext& context, const DenseTensor& x, const std::vector<int64_t>& axes, DenseTensor* out) {
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const double count = out->numel() ? static_cast<double>(x.numel()) / static_cast<double>(out->numel()) : 1;
    reduce<T, double>(context, x, axes, out, 0.0, [](double& sum, T value) { sum += static_cast<double>(value); },
                         [=](double sum) { return sum / count; });
  });
}
void Mean(const CustomContext& context, const DenseTensor& x, const phi::IntArray& axes, bool, DenseTensor* out) {
  mean(context, x, axes.GetData(), out);
}
void MeanAll(const CustomContext& context, const DenseTensor& x, DenseTensor* out) { mean(context, x, {}, out); }

template <bool largest>
void Extreme(const CustomContext& context, const DenseTensor& x, const phi::IntArray& axes, bool, DenseTensor* out) {
  by_real(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    using Limits = std::numeric_limits<W>;
    const W start = largest ? (std::is_integral_v<W> ? Limits::lowest() : -Limits::infinity())
                            : (std::is_integral_v<W> ? Limits::max() : Limits::infinity());
    reduce<T, W>(context, x, axes.GetData(), out, start,
                    [](W& best, T value) {
                      const W w = to<W>(value);
                      if (largest ? !(w <= best) : !(w >= best)) best = w;  // a NaN wins
                    },
                    Same());
  });
}

template <bool every>
void Truth(const CustomContext& context, const DenseTensor& x, const std::vector<int64_t>& axes, bool,
           DenseTensor* out) {
  by_number(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = int8_t;  // std::vector<bool> has no references to its elements
    reduce<T, Acc>(context, x, axes, out, Acc(every),
                         [](Acc& all, T value) {
                           const Acc is = !(to<Wide<T>>(value) == Wide<T>(0));
                           all = every ? all & is : all | is;
                         },
                         Same(), DataType::BOOL);  // the shape inference leaves the operand's type
  });
}

// The sum of squares: of gradients, for clipping them by their common norm.
void SquaredL2Norm(const CustomContext& context, const DenseTensor& x, DenseTensor* out) {
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    reduce<T, double>(context, x, {}, out, 0.0,
                         [](double& sum, T value) { sum += static_cast<double>(value) * static_cast<double>(value); },
                         Same());
  });
}

const Registered<&SumOver> sum_over("sum", {REHEARSAL_NUMBERS});
const Registered<&Mean> mean_over("mean", {REHEARSAL_FLOATS});
const Registered<&MeanAll> mean_all("mean_all", {REHEARSAL_FLOATS});
const Registered<&Extreme<true>> largest("max", {REHEARSAL_REAL});
const Registered<&Extreme<false>> smallest("min", {REHEARSAL_REAL});
const Registered<&Truth<true>> all_true("all", {REHEARSAL_NUMBERS}, gives_bool);
const Registered<&Truth<false>> any_true("any", {REHEARSAL_NUMBERS}, gives_bool);
const Registered<&SquaredL2Norm> squared_l2_norm("squared_l2_norm", {REHEARSAL_FLOATS});

}  // namespace
}  // namespace rehearsal
