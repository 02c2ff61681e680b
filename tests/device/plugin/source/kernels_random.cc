// Random numbers of the device's own generator, so that its state matters; and dropout.
//
// They differ from the CPU's for the same seed, as those of other devices do.
#include <cmath>
#include <random>

#include "kernels.h"
#include "paddle/phi/core/generator.h"

namespace rehearsal {
namespace {

// One draw of the generator seeds the engine of one kernel: the state advances by one however many numbers are made.
std::mt19937_64 engine(const CustomContext& context, int seed) {
  if (seed) return std::mt19937_64(seed);
  return std::mt19937_64(phi::DefaultCustomDeviceGenerator(context.GetPlace())->Random64());
}

template <typename Make>
void fill_by(const CustomContext& context, int seed, DataType type, DenseTensor* out, Make make) {
  char* at = output(context, out, type);
  if (!at) return;
  const int64_t count = out->numel();
  by_real(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(context, [=, source = engine(context, seed)]() mutable {
      auto* to_at = reinterpret_cast<T*>(at);
      for (int64_t i = 0; i < count; ++i) to_at[i] = static_cast<T>(make(source));
    });
  });
}

struct UniformOf {
  double low, high;
  double operator()(std::mt19937_64& source) const {
    return low + (high - low) * static_cast<double>(source() >> 11) * 0x1p-53;
  }
};
struct GaussianOf {
  double mean, deviation;
  double operator()(std::mt19937_64& source) const {
    const UniformOf unit{0, 1};
    const double u = 1 - unit(source), v = unit(source);
    return mean + deviation * std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
  }
};
struct IntegerOf {
  int64_t low, high;
  int64_t operator()(std::mt19937_64& source) const {
    return low + static_cast<int64_t>(source() % static_cast<uint64_t>(high - low));
  }
};

void Uniform(const CustomContext& context, const phi::IntArray& shape, DataType type, const phi::Scalar& low,
             const phi::Scalar& high, int seed, DenseTensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  fill_by(context, seed, type, out, UniformOf{low.to<double>(), high.to<double>()});
}
void UniformInPlace(const CustomContext& context, const DenseTensor& x, float low, float high, int seed, int, int,
                    float, DenseTensor* out) {
  fill_by(context, seed, x.dtype(), out, UniformOf{low, high});
}
void Gaussian(const CustomContext& context, const phi::IntArray& shape, float mean, float deviation, int seed,
              DataType type, DenseTensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  fill_by(context, seed, type, out, GaussianOf{mean, deviation});
}
void GaussianInPlace(const CustomContext& context, const DenseTensor& x, float mean, float deviation, int seed,
                     DenseTensor* out) {
  fill_by(context, seed, x.dtype(), out, GaussianOf{mean, deviation});
}
void Randint(const CustomContext& context, int low, int high, const phi::IntArray& shape, DataType type,
             DenseTensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  fill_by(context, 0, type, out, IntegerOf{low, high});
}

void Dropout(const CustomContext& context, const DenseTensor& x, const OptionalTensor&, const phi::Scalar& rate,
             bool is_test, const std::string& mode, int seed, bool fixed, DenseTensor* out, DenseTensor* mask) {
  const double p = rate.to<double>();
  const bool upscale = mode == "upscale_in_train";
  by_float(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = input<T>(x);
    T* at = output<T>(context, out);
    const int64_t count = x.numel();
    if (is_test) {
      const double factor = upscale ? 1 : 1 - p;
      return launch(context, [=] {
        for (int64_t i = 0; i < count; ++i) at[i] = static_cast<T>(static_cast<double>(from[i]) * factor);
      });
    }
    auto* kept = output<uint8_t>(context, mask);
    const double factor = !upscale ? 1 : p < 1 ? 1 / (1 - p) : 0;
    launch(context, [=, source = engine(context, fixed ? seed : 0)]() mutable {
      const UniformOf unit{0, 1};
      for (int64_t i = 0; i < count; ++i) {
        kept[i] = unit(source) >= p;
        at[i] = static_cast<T>(kept[i] ? static_cast<double>(from[i]) * factor : 0);
      }
    });
  });
}

void DropoutGrad(const CustomContext& context, const DenseTensor& mask, const DenseTensor& gradient,
                 const phi::Scalar& rate, bool is_test, const std::string& mode, DenseTensor* dx) {
  const double p = rate.to<double>();
  const bool upscale = mode == "upscale_in_train";
  by_float(gradient.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* g = input<T>(gradient);
    const auto* kept = is_test ? nullptr : input<uint8_t>(mask);
    T* at = output<T>(context, dx);
    const int64_t count = gradient.numel();
    const double factor = is_test ? (upscale ? 1 : 1 - p) : !upscale ? 1 : p < 1 ? 1 / (1 - p) : 0;
    launch(context, [=] {
      for (int64_t i = 0; i < count; ++i) {
        at[i] = static_cast<T>(!kept || kept[i] ? static_cast<double>(g[i]) * factor : 0);
      }
    });
  });
}

const Registered<&Uniform> uniform("uniform", {REHEARSAL_FLOATS});
const Registered<&UniformInPlace> uniform_in_place("uniform_inplace", {REHEARSAL_FLOATS});
const Registered<&Gaussian> gaussian("gaussian", {REHEARSAL_FLOATS});
const Registered<&GaussianInPlace> gaussian_in_place("gaussian_inplace", {REHEARSAL_FLOATS});
const Registered<&Randint> randint("randint", {DataType::INT32, DataType::INT64});
const Registered<&Dropout> dropout("dropout", {REHEARSAL_FLOATS});
const Registered<&DropoutGrad> dropout_grad("dropout_grad", {REHEARSAL_FLOATS});

}  // namespace
}  // namespace rehearsal
