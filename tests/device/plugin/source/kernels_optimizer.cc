// Optimizers in place, with and without master weights, gradient scaling, fused buffers.
//
// Paddle's fallback gives what an optimizer updates new memory, which breaks every view of it; these write in place.
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace rehearsal {
namespace {

// A number that some kernels take from a tensor of one element, wherever it lies: on the host it is read now, on the
// device in the stream's thread.
using Number = std::function<double()>;
Number number(const DenseTensor& tensor) {
  const void* at = tensor.data();
  const bool host = tensor.place().GetType() == phi::AllocationType::CPU;
  const void* from = host ? at : reached(at, phi::SizeOf(tensor.dtype()));
  Number read;
  by_real(tensor.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    read = [from] { return to<double>(*static_cast<const T*>(from)); };
  });
  if (!host) return read;
  const double value = read();
  return [value] { return value; };
}

// Elements of any float type, read as M.
template <typename M>
using Load = M (*)(const char*, int64_t);
template <typename M>
Load<M> loader(DataType type) {
  Load<M> load = nullptr;
  by_float(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    load = [](const char* at, int64_t i) { return static_cast<M>(reinterpret_cast<const T*>(at)[i]); };
  });
  return load;
}

// What is updated: the parameter in type T, and the type M that the arithmetic is done in. With master weights M's
// values are in `master`, and T's are rounded from them.
template <typename T, typename M>
struct Target {
  const T* from;
  const M* master_from;
  T* out;
  M* master;
  const char* gradient;
  Load<M> load;
  int64_t count;

  Target(const CustomContext& context, const DenseTensor& param, const DenseTensor& grad, const OptionalTensor& masters,
         bool multi_precision, DenseTensor* param_out, DenseTensor* master_out)
      : from(input<T>(param)), master_from(multi_precision && masters ? input<M>(*masters) : nullptr),
        out(output<T>(context, param_out)),
        master(multi_precision && masters ? output<M>(context, master_out) : nullptr),
        gradient(grad.numel() ? reached(grad.data(), grad.numel() * phi::SizeOf(grad.dtype())) : nullptr),
        load(loader<M>(grad.dtype())), count(param.numel()) {}
  M value(int64_t i) const { return master_from ? master_from[i] : static_cast<M>(from[i]); }
  M slope(int64_t i) const { return load(gradient, i); }
  void put(int64_t i, M updated) const {
    if (master) master[i] = updated;
    out[i] = static_cast<T>(updated);
  }
};
template <typename T>
using Master = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A power of beta goes on by one step: where it lies, on the host or on the device.
void advance(const CustomContext& context, const DenseTensor& power, double beta, DenseTensor* out) {
  const bool host = power.place().GetType() == phi::AllocationType::CPU;
  by_float(power.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (host) {
      const T old = *power.data<T>();
      *context.HostAlloc<T>(out) = static_cast<T>(static_cast<T>(beta) * old);
      return;
    }
    const T* from = input<T>(power);
    T* at = output<T>(context, out);
    launch(context, [=] { *at = static_cast<T>(static_cast<T>(beta) * *from); });
  });
}

struct AdamRates {
  double beta1, beta2, epsilon, ratio = 1, decay = 0;
};

void adam(const CustomContext& context, const DenseTensor& param, const DenseTensor& grad, const DenseTensor& rate,
          const DenseTensor& moment1, const DenseTensor& moment2, const OptionalTensor& moment2_max,
          const DenseTensor& beta1_power, const DenseTensor& beta2_power, const OptionalTensor& masters,
          const OptionalTensor& skip, const AdamRates& rates, bool multi_precision, bool global_powers, bool amsgrad,
          DenseTensor* param_out, DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor* moment2_max_out,
          DenseTensor* beta1_out, DenseTensor* beta2_out, DenseTensor* master_out) {
  PADDLE_ENFORCE_EQ(static_cast<bool>(skip), false, common::errors::Unimplemented("rehearsal: adam with skip_update"));
  by_float(param.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using M = Master<T>;
    const Number speed = number(rate), power1 = number(beta1_power), power2 = number(beta2_power);
    const M *m_from = input<M>(moment1), *v_from = input<M>(moment2);
    const M* top_from = amsgrad ? input<M>(*moment2_max) : nullptr;
    const Target<T, M> target(context, param, grad, masters, multi_precision, param_out, master_out);
    M *m = output<M>(context, moment1_out), *v = output<M>(context, moment2_out);
    M* top = amsgrad ? output<M>(context, moment2_max_out) : nullptr;
    launch(context, [=] {
      const M lr = static_cast<M>(speed()) * static_cast<M>(rates.ratio);
      const M beta1 = rates.beta1, beta2 = rates.beta2, one = 1;
      const M step = lr / (one - static_cast<M>(power1())), correction = std::sqrt(one - static_cast<M>(power2()));
      const M epsilon = rates.epsilon, decay = lr * static_cast<M>(rates.decay);
      for (int64_t i = 0; i < target.count; ++i) {
        const M g = target.slope(i);
        m[i] = beta1 * m_from[i] + (one - beta1) * g;
        v[i] = beta2 * v_from[i] + (one - beta2) * g * g;
        M second = v[i];
        if (top) second = top[i] = std::max(top_from[i], v[i]);
        const M before = target.value(i);
        target.put(i, before - decay * before - step * m[i] / (std::sqrt(second) / correction + epsilon));
      }
    });
  });
  if (!global_powers) {
    advance(context, beta1_power, rates.beta1, beta1_out);
    advance(context, beta2_power, rates.beta2, beta2_out);
  }
}

void Adam(const CustomContext& context, const DenseTensor& param, const DenseTensor& grad, const DenseTensor& rate,
          const DenseTensor& moment1, const DenseTensor& moment2, const OptionalTensor& moment2_max,
          const DenseTensor& beta1_power, const DenseTensor& beta2_power, const OptionalTensor& masters,
          const OptionalTensor& skip, const phi::Scalar& beta1, const phi::Scalar& beta2, const phi::Scalar& epsilon,
          bool, int64_t, bool multi_precision, bool global_powers, bool amsgrad, DenseTensor* param_out,
          DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor* moment2_max_out, DenseTensor* beta1_out,
          DenseTensor* beta2_out, DenseTensor* master_out) {
  adam(context, param, grad, rate, moment1, moment2, moment2_max, beta1_power, beta2_power, masters, skip,
       {beta1.to<double>(), beta2.to<double>(), epsilon.to<double>()}, multi_precision, global_powers, amsgrad, param_out,
       moment1_out, moment2_out, moment2_max_out, beta1_out, beta2_out, master_out);
}

void AdamW(const CustomContext& context, const DenseTensor& param, const DenseTensor& grad, const DenseTensor& rate,
           const DenseTensor& moment1, const DenseTensor& moment2, const OptionalTensor& moment2_max,
           const DenseTensor& beta1_power, const DenseTensor& beta2_power, const OptionalTensor& masters,
           const OptionalTensor& skip, const phi::Scalar& beta1, const phi::Scalar& beta2, const phi::Scalar& epsilon,
           float ratio, float coefficient, bool with_decay, bool, int64_t, bool multi_precision, bool global_powers,
           bool amsgrad, DenseTensor* param_out, DenseTensor* moment1_out, DenseTensor* moment2_out,
           DenseTensor* moment2_max_out, DenseTensor* beta1_out, DenseTensor* beta2_out, DenseTensor* master_out) {
  adam(context, param, grad, rate, moment1, moment2, moment2_max, beta1_power, beta2_power, masters, skip,
       {beta1.to<double>(), beta2.to<double>(), epsilon.to<double>(), ratio, with_decay ? coefficient : 0},
       multi_precision, global_powers, amsgrad, param_out, moment1_out, moment2_out, moment2_max_out, beta1_out,
       beta2_out, master_out);
}

void Sgd(const CustomContext& context, const DenseTensor& param, const DenseTensor& rate, const DenseTensor& grad,
         const OptionalTensor& masters, bool multi_precision, DenseTensor* param_out, DenseTensor* master_out) {
  by_float(param.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using M = Master<T>;
    const Number speed = number(rate);
    const Target<T, M> target(context, param, grad, masters, multi_precision, param_out, master_out);
    launch(context, [=] {
      const M lr = speed();
      for (int64_t i = 0; i < target.count; ++i) target.put(i, target.value(i) - lr * target.slope(i));
    });
  });
}

void Momentum(const CustomContext& context, const DenseTensor& param, const DenseTensor& grad,
              const DenseTensor& velocity, const DenseTensor& rate, const OptionalTensor& masters, float mu,
              bool nesterov, const std::string& regularization, float coefficient, bool multi_precision, float rescale,
              DenseTensor* param_out, DenseTensor* velocity_out, DenseTensor* master_out) {
  const float decay = regularization == "l2_decay" ? coefficient : 0;
  by_float(param.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using M = Master<T>;
    const Number speed = number(rate);
    const M* from = input<M>(velocity);
    const Target<T, M> target(context, param, grad, masters, multi_precision, param_out, master_out);
    M* at = output<M>(context, velocity_out);
    launch(context, [=] {
      const M lr = speed(), keep = mu;
      for (int64_t i = 0; i < target.count; ++i) {
        const M before = target.value(i), g = target.slope(i) * static_cast<M>(rescale) + static_cast<M>(decay) * before;
        at[i] = keep * from[i] + g;
        target.put(i, before - lr * (nesterov ? g + keep * at[i] : at[i]));
      }
    });
  });
}

// ---- scaled losses ----

void CheckFiniteAndUnscale(const CustomContext& context, const std::vector<const DenseTensor*>& x,
                           const DenseTensor& scale, std::vector<DenseTensor*> out, DenseTensor* found) {
  const Number by = number(scale);
  bool* infinite = output<bool>(context, found);
  launch(context, [=] { *infinite = false; });
  for (size_t k = 0; k < x.size(); ++k) {
    by_float(x[k]->dtype(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* from = input<T>(*x[k]);
      T* at = output<T>(context, out[k]);
      const int64_t count = x[k]->numel();
      launch(context, [=] {
        const double factor = 1 / by();
        for (int64_t i = 0; i < count; ++i) {
          const double value = static_cast<double>(from[i]) * factor;
          if (!std::isfinite(value)) *infinite = true;
          at[i] = static_cast<T>(value);
        }
      });
    });
  }
}

void UpdateLossScaling(const CustomContext& context, const std::vector<const DenseTensor*>& x, const DenseTensor& found,
                       const DenseTensor& scaling, const DenseTensor& good, const DenseTensor& bad, int up_after,
                       int down_after, float up, float down, const phi::Scalar& stop, std::vector<DenseTensor*> out,
                       DenseTensor* scaling_out, DenseTensor* good_out, DenseTensor* bad_out) {
  const Number infinite = number(found);
  for (size_t k = 0; k < x.size(); ++k) {  // gradients that are not finite become zero
    const size_t bytes = x[k]->numel() * phi::SizeOf(x[k]->dtype());
    const char* from = bytes ? reached(x[k]->data(), bytes) : nullptr;
    char* at = output(context, out[k], x[k]->dtype());
    launch(context, [=] {
      if (infinite() != 0) memset(at, 0, bytes);
      else if (at != from) memcpy(at, from, bytes);
    });
  }
  if (stop.to<bool>()) return;
  const int *good_from = input<int>(good), *bad_from = input<int>(bad);
  by_float(scaling.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = input<T>(scaling);
    T* at = output<T>(context, scaling_out);
    int *goods = output<int>(context, good_out), *bads = output<int>(context, bad_out);
    launch(context, [=] {
      const double before = static_cast<double>(*from);
      const bool overflow = infinite() != 0;
      const int good_steps = overflow ? 0 : *good_from + 1, bad_steps = overflow ? *bad_from + 1 : 0;
      const bool rise = good_steps == up_after, fall = bad_steps == down_after;
      double after = before;
      if (rise && std::isfinite(before * up)) after = before * up;
      if (fall) after = std::max(1.0, before * down);
      *at = static_cast<T>(after);
      *goods = rise ? 0 : good_steps;
      *bads = fall ? 0 : bad_steps;
    });
  });
}

// ---- fused buffers ----

void CoalesceTensor(const CustomContext& context, const std::vector<const DenseTensor*>& x, DataType type,
                    bool copy_data, bool set_constant, bool, float constant, bool use_align, int align_size,
                    int size_of_type, const std::vector<int64_t>&, const std::vector<int64_t>&,
                    std::vector<DenseTensor*> out, DenseTensor* fused) {
  const int64_t width = size_of_type > 0 ? size_of_type : static_cast<int64_t>(phi::SizeOf(type));
  const int64_t unit = use_align ? std::max<int64_t>(align_size > 0 ? align_size : 256, width) / width : 1;
  std::vector<int64_t> begins;
  int64_t total = 0;
  for (const DenseTensor* part : x) {
    begins.push_back(total);
    total += (part->numel() + unit - 1) / unit * unit;
  }
  std::vector<phi::DDim> dims;
  std::vector<const char*> sources;  // taken before the outputs, which may be the inputs, change
  for (const DenseTensor* part : x) {
    dims.push_back(part->dims());
    sources.push_back(copy_data && part->numel() ? reached(part->data(), part->numel() * phi::SizeOf(type)) : nullptr);
  }
  const std::vector<DenseTensor> kept = [&] {
    std::vector<DenseTensor> held;
    for (const DenseTensor* part : x) held.push_back(*part);
    return held;
  }();
  fused->Resize(common::make_ddim(Extents{total}));
  char* at = output(context, fused, type);
  if (set_constant) {
    by_real(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      launch(context, [=] { std::fill_n(reinterpret_cast<T*>(at), total, static_cast<T>(constant)); });
    });
  }
  for (size_t k = 0; k < out.size(); ++k) {
    const int64_t count = product(list(dims[k]));
    if (sources[k]) {
      launch(context, [=, from = sources[k], begin = begins[k]] {
        memcpy(at + begin * width, from, count * width);
      });
    }
    DenseTensor slice = fused->Slice(begins[k], begins[k] + count);
    out[k]->ShareDataWith(slice);
    out[k]->Resize(dims[k]);
  }
  // What the inputs held is freed when `kept` goes; the memory is not given back before the streams have drained.
  if (copy_data) runtime::synchronize_stream(stream_of(context));
}

// Powers of beta, and whether to skip, may lie on the host.
void host_scalars(const phi::KernelKey&, phi::Kernel* kernel) {
  for (size_t i : {6, 7, 9}) kernel->InputAt(i).SetBackend(phi::Backend::ALL_BACKEND);
  for (size_t i : {4, 5}) kernel->OutputAt(i).SetBackend(phi::Backend::UNDEFINED);
}

const Registered<&Adam> adam_kernel("adam", {REHEARSAL_FLOATS}, host_scalars);
const Registered<&AdamW> adamw_kernel("adamw", {REHEARSAL_FLOATS}, host_scalars);
const Registered<&Sgd> sgd("sgd", {REHEARSAL_FLOATS});
const Registered<&Momentum> momentum("momentum", {REHEARSAL_FLOATS});
const Registered<&CheckFiniteAndUnscale> check_finite("check_finite_and_unscale", {REHEARSAL_FLOATS});
const Registered<&UpdateLossScaling> update_loss_scaling("update_loss_scaling", {REHEARSAL_FLOATS});
const Registered<&CoalesceTensor> coalesce_tensor("coalesce_tensor", {REHEARSAL_REAL});

}  // namespace
}  // namespace rehearsal
