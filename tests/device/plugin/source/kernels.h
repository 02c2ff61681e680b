// What the kernels share: how they are registered, how they reach memory, how they walk over elements.
//
// A kernel is a plain function for all data types; what differs by type is chosen inside by `by_type`. Registered by a
// template over the function alone, it costs the compiler one instantiation where Paddle's macros cost one for each type.
#pragma once
#include <cstring>
#include <initializer_list>
#include <vector>

#include "native.h"
#include "rehearsal.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_registry.h"

namespace rehearsal {

using phi::CustomContext;
using phi::DataType;
using phi::DenseTensor;
using OptionalTensor = paddle::optional<DenseTensor>;
using half = phi::dtype::float16;
using brain = phi::dtype::bfloat16;
using e4m3 = phi::dtype::float8_e4m3fn;
using e5m2 = phi::dtype::float8_e5m2;
using complex64 = phi::dtype::complex<float>;
using complex128 = phi::dtype::complex<double>;
using Types = std::initializer_list<DataType>;

#define REHEARSAL_INTEGERS \
  DataType::BOOL, DataType::UINT8, DataType::INT8, DataType::INT16, DataType::INT32, DataType::INT64
#define REHEARSAL_FLOATS DataType::FLOAT32, DataType::FLOAT64, DataType::FLOAT16, DataType::BFLOAT16
#define REHEARSAL_COMPLEX DataType::COMPLEX64, DataType::COMPLEX128
#define REHEARSAL_FLOAT8 DataType::FLOAT8_E4M3FN, DataType::FLOAT8_E5M2
#define REHEARSAL_REAL REHEARSAL_INTEGERS, REHEARSAL_FLOATS
#define REHEARSAL_NUMBERS REHEARSAL_REAL, REHEARSAL_COMPLEX
#define REHEARSAL_ALL REHEARSAL_NUMBERS, REHEARSAL_FLOAT8

// ---- registration ----
// The kernel as a function that notes its name, for what it launches.
template <auto kernel, typename F = decltype(kernel)>
struct Named;
template <auto kernel, typename... Arguments>
struct Named<kernel, void (*)(Arguments...)> {
  inline static const char* name = "";
  static void run(Arguments... arguments) {
    const Work scope;
    current_kernel() = name;
    kernel(std::forward<Arguments>(arguments)...);
  }
};

template <auto kernel>
struct Registered {
  using Adjust = void (*)(const phi::KernelKey&, phi::Kernel*);
  using Implementation = phi::KernelImpl<decltype(kernel), &Named<kernel>::run>;
  Registered(const char* name, Types types, Adjust adjust = [](const phi::KernelKey&, phi::Kernel*) {}) {
    Named<kernel>::name = name;
    for (DataType type : types) {
      phi::KernelRegistrar(phi::RegType::OUTER, name, "rehearsal", phi::DataLayout::ALL_LAYOUT, type,
                           phi::KernelArgsParseFunctor<decltype(kernel)>::Parse, adjust, Implementation::Compute,
                           reinterpret_cast<void*>(&Implementation::VariadicCompute));
    }
  }
};

// ---- launching and memory ----
inline Stream* stream_of(const CustomContext& context) {
  return runtime::stream_of(reinterpret_cast<C_Stream>(context.stream()), context.GetPlace().GetDeviceId());
}

inline void launch(const CustomContext& context, std::function<void()> work) {
  ++tally().kernels;
  runtime::launch(stream_of(context), std::move(work));
}

// Of a kernel of the device's own (namespace native): whether it was launched.
inline bool launched(bool natively) {
  if (natively) ++tally().kernels;
  return natively;
}

inline char* reached(const void* pointer, size_t bytes) {
  char* at = runtime::seen_by_work(pointer, bytes);
  if (!at) PADDLE_THROW(common::errors::Fatal("rehearsal: illegal device address %p", pointer));
  return at;
}

// The elements of a contiguous tensor, for the stream's thread; nullptr where there is none.
template <typename T>
const T* input(const DenseTensor& tensor) {
  return tensor.numel() ? reinterpret_cast<const T*>(reached(tensor.data(), tensor.numel() * sizeof(T))) : nullptr;
}
// Memory of its own for a result, unless it has some: an in-place operation writes where the tensor lies.
inline void* allocated(const CustomContext& context, DenseTensor* tensor, DataType type) {
  void* at = context.Alloc(tensor, type);
  return tensor->numel() ? at : nullptr;
}
inline char* output(const CustomContext& context, DenseTensor* tensor, DataType type) {
  void* at = allocated(context, tensor, type);
  return at ? reached(at, tensor->numel() * phi::SizeOf(type)) : nullptr;
}
template <typename T>
T* output(const CustomContext& context, DenseTensor* tensor) {
  return reinterpret_cast<T*>(output(context, tensor, phi::CppTypeToDataType<T>::Type()));
}

inline native::Type native_type(DataType type) {
  using native::Type;
  switch (type) {
    case DataType::BOOL: return Type::kBool;
    case DataType::UINT8: return Type::kUint8;
    case DataType::INT8: return Type::kInt8;
    case DataType::INT16: return Type::kInt16;
    case DataType::INT32: return Type::kInt32;
    case DataType::INT64: return Type::kInt64;
    case DataType::FLOAT16: return Type::kFloat16;
    case DataType::BFLOAT16: return Type::kBfloat16;
    case DataType::FLOAT32: return Type::kFloat32;
    case DataType::FLOAT64: return Type::kFloat64;
    default: return Type::kOther;
  }
}

// ---- layouts ----
using native::Extents;

inline Extents list(const phi::DDim& dims) { return Extents(dims.Get(), dims.Get() + dims.size()); }

inline int64_t product(const Extents& extents) {
  int64_t n = 1;
  for (int64_t e : extents) n *= e;
  return n;
}

inline Extents row_major(const Extents& extents) {
  Extents strides(extents.size(), 1);
  for (int i = static_cast<int>(extents.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * extents[i + 1];
  return strides;
}

// Strides of a row-major tensor that is broadcast to `to`: zero where its extent is 1.
inline Extents broadcast_strides(const Extents& from, const Extents& to) {
  Extents out(to.size(), 0), own = row_major(from);
  const size_t missing = to.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i) out[i + missing] = from[i] == 1 ? 0 : own[i];
  return out;
}

inline Extents broadcast(const Extents& a, const Extents& b) {
  Extents out(std::max(a.size(), b.size()), 1);
  for (size_t i = 0; i < out.size(); ++i) {  // from the last axis
    const int64_t x = i < a.size() ? a[a.size() - 1 - i] : 1, y = i < b.size() ? b[b.size() - 1 - i] : 1;
    out[out.size() - 1 - i] = x == 1 ? y : x;
  }
  return out;
}

inline int axis_of(int64_t axis, int64_t rank) { return static_cast<int>(axis < 0 ? axis + rank : axis); }

// Walks over all positions of `extents` in row-major order, in runs along the last axis: run(offsets, length), where
// offsets[k] counts in elements of the layout strides[k]. The runs' strides are strides[k].back().
template <size_t N, typename F>
void each_run(const Extents& extents, const Extents (&strides)[N], F&& run) {
  if (!product(extents)) return;
  int64_t offsets[N] = {};
  if (extents.empty()) return run(offsets, int64_t{1});
  const int last = static_cast<int>(extents.size()) - 1;
  Extents at(extents.size(), 0);
  for (;;) {
    run(offsets, extents[last]);
    int axis = last - 1;
    for (; axis >= 0; --axis) {
      for (size_t k = 0; k < N; ++k) offsets[k] += strides[k][axis];
      if (++at[axis] < extents[axis]) break;
      for (size_t k = 0; k < N; ++k) offsets[k] -= strides[k][axis] * extents[axis];
      at[axis] = 0;
    }
    if (axis < 0) return;
  }
}
inline int64_t run_stride(const Extents& strides) { return strides.empty() ? 0 : strides.back(); }

// ---- data types ----
template <typename T>
struct Tag {
  using type = T;
};

[[noreturn]] inline void unknown_type(DataType type) {
  PADDLE_THROW(common::errors::Unimplemented("rehearsal: no kernel for data type %d", static_cast<int>(type)));
}

template <typename F>
void by_integer(DataType type, F&& f) {
  switch (type) {
    case DataType::BOOL: return f(Tag<bool>{});
    case DataType::UINT8: return f(Tag<uint8_t>{});
    case DataType::INT8: return f(Tag<int8_t>{});
    case DataType::INT16: return f(Tag<int16_t>{});
    case DataType::INT32: return f(Tag<int32_t>{});
    case DataType::INT64: return f(Tag<int64_t>{});
    default: unknown_type(type);
  }
}
template <typename F>
void by_float(DataType type, F&& f) {
  switch (type) {
    case DataType::FLOAT32: return f(Tag<float>{});
    case DataType::FLOAT64: return f(Tag<double>{});
    case DataType::FLOAT16: return f(Tag<half>{});
    case DataType::BFLOAT16: return f(Tag<brain>{});
    default: unknown_type(type);
  }
}
template <typename F>
void by_real(DataType type, F&& f) {
  switch (type) {
    case DataType::FLOAT32:
    case DataType::FLOAT64:
    case DataType::FLOAT16:
    case DataType::BFLOAT16: return by_float(type, f);
    default: return by_integer(type, f);
  }
}
template <typename F>
void by_number(DataType type, F&& f) {
  switch (type) {
    case DataType::COMPLEX64: return f(Tag<complex64>{});
    case DataType::COMPLEX128: return f(Tag<complex128>{});
    default: return by_real(type, f);
  }
}
template <typename F>
void by_type(DataType type, F&& f) {
  switch (type) {
    case DataType::FLOAT8_E4M3FN: return f(Tag<e4m3>{});
    case DataType::FLOAT8_E5M2: return f(Tag<e5m2>{});
    default: return by_number(type, f);
  }
}
// Where only bytes move, the width is all that matters.
template <typename F>
void by_width(size_t width, F&& f) {
  switch (width) {
    case 1: return f(Tag<uint8_t>{});
    case 2: return f(Tag<uint16_t>{});
    case 4: return f(Tag<uint32_t>{});
    case 8: return f(Tag<uint64_t>{});
    case 16: return f(Tag<complex128>{});
    default: PADDLE_THROW(common::errors::Unimplemented("rehearsal: elements of %d bytes", static_cast<int>(width)));
  }
}

// The type that arithmetic on T is done in: what comes out is rounded (or wrapped around) to T when it is stored.
template <typename T>
struct WideOf {
  using type = std::conditional_t<std::is_integral_v<T>, int64_t, T>;
};
template <>
struct WideOf<half> {
  using type = float;
};
template <>
struct WideOf<brain> {
  using type = float;
};
template <>
struct WideOf<e4m3> {
  using type = float;
};
template <>
struct WideOf<e5m2> {
  using type = float;
};
template <typename T>
using Wide = typename WideOf<T>::type;
// The type that sums over many elements of T are kept in.
template <typename T>
using Sum = std::conditional_t<
    std::is_integral_v<T>, int64_t,
    std::conditional_t<std::is_same_v<T, complex64> || std::is_same_v<T, complex128>, complex128, double>>;

template <typename T>
constexpr bool is_complex = std::is_same_v<T, complex64> || std::is_same_v<T, complex128>;

template <typename To, typename From>
To to(From value) {
  if constexpr (is_complex<From> && !is_complex<To>) {
    return to<To>(value.real);
  } else if constexpr (is_complex<To> && !is_complex<From>) {
    using Part = decltype(To{}.real);
    return To(static_cast<Part>(value), Part(0));
  } else if constexpr (is_complex<To>) {
    using Part = decltype(To{}.real);
    return To(static_cast<Part>(value.real), static_cast<Part>(value.imag));
  } else if constexpr (std::is_arithmetic_v<To> || std::is_arithmetic_v<From>) {
    return static_cast<To>(value);
  } else {
    return static_cast<To>(static_cast<float>(value));  // between two of the small float types
  }
}

// For kernels whose result is BOOL, whatever their arguments are.
inline void gives_bool(const phi::KernelKey&, phi::Kernel* kernel) { kernel->OutputAt(0).SetDataType(DataType::BOOL); }

}  // namespace rehearsal
