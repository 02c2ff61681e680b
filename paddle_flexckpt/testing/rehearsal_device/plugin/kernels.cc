// The few kernels that Paddle looks up without falling back to the CPU (contiguous, strided_copy), and those that are
// worth having on the device, so that copies of the library under test are not drowned in copies of the fallback: full,
// assign, cast. Each computes in its stream's thread, as a device would.
#include <algorithm>
#include <cstring>

#include "rehearsal.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_registry.h"

namespace rehearsal {
namespace {

Stream* stream_in(const phi::CustomContext& context) {
  return stream_of(reinterpret_cast<C_Stream>(context.stream()), context.GetPlace().GetDeviceId());
}

void launch(const phi::CustomContext& context, std::function<void()> work) {
  ++tally().kernels;
  stream_in(context)->push(std::move(work));
}

using Extents = std::vector<int64_t>;

int64_t product(const Extents& extents) {
  int64_t n = 1;
  for (int64_t e : extents) n *= e;
  return n;
}

Extents list(const phi::DDim& dims) {
  Extents out(dims.size());
  for (int i = 0; i < dims.size(); ++i) out[i] = dims[i];
  return out;
}

Extents row_major(const Extents& extents) {
  Extents strides(extents.size(), 1);
  for (int i = static_cast<int>(extents.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * extents[i + 1];
  return strides;
}

int64_t reach(const Extents& extents, const Extents& strides) {  // elements from the first to one past the last
  int64_t last = 0;
  for (size_t i = 0; i < extents.size(); ++i) last += (extents[i] - 1) * strides[i];
  return last + 1;
}

// Element k in row-major order goes from one layout to the other.
void move_elements(char* to, const Extents& to_extents, const Extents& to_strides, const char* from,
                   const Extents& from_extents, const Extents& from_strides, size_t width) {
  const int64_t count = product(to_extents);
  Extents at(to_extents.size(), 0), from_at(from_extents.size(), 0);
  int64_t a = 0, b = 0;
  auto advance = [](Extents& index, const Extents& extents, const Extents& strides, int64_t& offset) {
    for (int i = static_cast<int>(extents.size()) - 1; i >= 0; --i) {
      offset += strides[i];
      if (++index[i] < extents[i]) return;
      offset -= strides[i] * extents[i];
      index[i] = 0;
    }
  };
  for (int64_t k = 0; k < count; ++k) {
    memcpy(to + a * width, from + b * width, width);
    advance(at, to_extents, to_strides, a);
    advance(from_at, from_extents, from_strides, b);
  }
}

char* reached(const void* pointer, size_t bytes) {
  char* at = shadow(pointer, bytes);
  if (!at) PADDLE_THROW(common::errors::Fatal("rehearsal: illegal device address %p", pointer));
  return at;
}

template <typename From, typename To>
void convert(const phi::CustomContext& context, const phi::DenseTensor& input, phi::DenseTensor* out) {
  To* result = context.Alloc<To>(out);
  const int64_t count = input.numel();
  if (!count) return;
  To* to = reinterpret_cast<To*>(reached(result, count * sizeof(To)));
  const From* from = reinterpret_cast<const From*>(reached(input.data<From>(), count * sizeof(From)));
  launch(context, [=] {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
  });
}

}  // namespace

template <typename T, typename Context>
void Contiguous(const Context& context, const phi::DenseTensor& input, phi::DenseTensor* out) {
  phi::DenseTensorMeta meta = input.meta();
  meta.strides = meta.calc_strides(meta.dims);
  meta.offset = 0;
  out->set_meta(meta);
  if (!input.numel()) return;
  T* result = context.template Alloc<T>(out);
  const Extents extents = list(input.dims()), strides = list(input.strides());
  char* to = reached(result, input.numel() * sizeof(T));
  const char* from = reached(input.data<T>(), reach(extents, strides) * sizeof(T));
  launch(context, [=] { move_elements(to, extents, row_major(extents), from, extents, strides, sizeof(T)); });
}

template <typename T, typename Context>
void StridedCopy(const Context& context, const phi::DenseTensor& input, const std::vector<int64_t>& extents,
                 const std::vector<int64_t>& strides, int64_t offset, phi::DenseTensor* out) {
  phi::DenseTensorMeta meta = input.meta();
  meta.strides = common::make_ddim(strides);
  meta.dims = common::make_ddim(extents);
  meta.offset = offset;
  out->set_meta(meta);
  if (!product(extents)) return;
  const Extents in_extents = list(input.dims()), in_strides = list(input.strides());
  char* to = reached(out->data<T>(), reach(extents, strides) * sizeof(T));
  if (product(in_extents) == 1) {  // one value for all
    const char* from = reached(input.data<T>(), sizeof(T));
    launch(context, [=] {
      const Extents still(extents.size(), 0);
      move_elements(to, extents, strides, from, extents, still, sizeof(T));
    });
    return;
  }
  const char* from = reached(input.data<T>(), reach(in_extents, in_strides) * sizeof(T));
  launch(context, [=] { move_elements(to, extents, strides, from, in_extents, in_strides, sizeof(T)); });
}

template <typename T, typename Context>
void Full(const Context& context, const phi::IntArray& shape, const phi::Scalar& value, phi::DataType, phi::DenseTensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  T* result = context.template Alloc<T>(out);
  const int64_t count = out->numel();
  if (!count) return;
  T* to = reinterpret_cast<T*>(reached(result, count * sizeof(T)));
  const T element = value.to<T>();
  launch(context, [=] { std::fill(to, to + count, element); });
}

template <typename T, typename Context>
void FullLike(const Context& context, const phi::DenseTensor&, const phi::Scalar& value, phi::DataType, phi::DenseTensor* out) {
  T* result = context.template Alloc<T>(out);
  const int64_t count = out->numel();
  if (!count) return;
  T* to = reinterpret_cast<T*>(reached(result, count * sizeof(T)));
  const T element = value.to<T>();
  launch(context, [=] { std::fill(to, to + count, element); });
}

template <typename T, typename Context>
void Assign(const Context& context, const phi::DenseTensor& input, phi::DenseTensor* out) {
  T* result = context.template Alloc<T>(out);
  const size_t bytes = input.numel() * sizeof(T);
  if (!bytes) return;
  char* to = reached(result, bytes);
  const char* from = reached(input.data<T>(), bytes);
  const int device = context.GetPlace().GetDeviceId();
  launch(context, [=] { transfer(Way::D2D, device, to, from, bytes, true); });
}

template <typename T, typename Context>
void Cast(const Context& context, const phi::DenseTensor& input, phi::DataType type, phi::DenseTensor* out) {
  switch (type) {
    case phi::DataType::FLOAT32: return convert<T, float>(context, input, out);
    case phi::DataType::FLOAT64: return convert<T, double>(context, input, out);
    case phi::DataType::FLOAT16: return convert<T, phi::dtype::float16>(context, input, out);
    case phi::DataType::BFLOAT16: return convert<T, phi::dtype::bfloat16>(context, input, out);
    case phi::DataType::INT32: return convert<T, int32_t>(context, input, out);
    case phi::DataType::INT64: return convert<T, int64_t>(context, input, out);
    case phi::DataType::UINT8: return convert<T, uint8_t>(context, input, out);
    case phi::DataType::BOOL: return convert<T, bool>(context, input, out);
    default: PADDLE_THROW(common::errors::Unimplemented("rehearsal: cast to data type %d", static_cast<int>(type)));
  }
}

}  // namespace rehearsal

PD_REGISTER_PLUGIN_KERNEL(contiguous, rehearsal, ALL_LAYOUT, rehearsal::Contiguous, bool, uint8_t, int8_t, int16_t, int32_t,
                          int64_t, float, double, phi::dtype::float16, phi::dtype::bfloat16, phi::dtype::float8_e4m3fn,
                          phi::dtype::float8_e5m2, phi::dtype::complex<float>, phi::dtype::complex<double>) {}
PD_REGISTER_PLUGIN_KERNEL(strided_copy, rehearsal, ALL_LAYOUT, rehearsal::StridedCopy, bool, uint8_t, int8_t, int16_t, int32_t,
                          int64_t, float, double, phi::dtype::float16, phi::dtype::bfloat16, phi::dtype::float8_e4m3fn,
                          phi::dtype::float8_e5m2, phi::dtype::complex<float>, phi::dtype::complex<double>) {}
PD_REGISTER_PLUGIN_KERNEL(full, rehearsal, ALL_LAYOUT, rehearsal::Full, bool, uint8_t, int8_t, int16_t, int32_t, int64_t, float,
                          double, phi::dtype::float16, phi::dtype::bfloat16) {}
PD_REGISTER_PLUGIN_KERNEL(full_like, rehearsal, ALL_LAYOUT, rehearsal::FullLike, bool, uint8_t, int8_t, int16_t, int32_t,
                          int64_t, float, double, phi::dtype::float16, phi::dtype::bfloat16) {
  kernel->InputAt(0).SetBackend(phi::Backend::ALL_BACKEND);
}
PD_REGISTER_PLUGIN_KERNEL(cast, rehearsal, ALL_LAYOUT, rehearsal::Cast, bool, uint8_t, int8_t, int16_t, int32_t, int64_t, float,
                          double, phi::dtype::float16, phi::dtype::bfloat16) {}
PD_REGISTER_PLUGIN_KERNEL(assign, rehearsal, ALL_LAYOUT, rehearsal::Assign, bool, uint8_t, int8_t, int16_t, int32_t, int64_t,
                          float, double, phi::dtype::float16, phi::dtype::bfloat16, phi::dtype::float8_e4m3fn,
                          phi::dtype::float8_e5m2, phi::dtype::complex<float>, phi::dtype::complex<double>) {}
