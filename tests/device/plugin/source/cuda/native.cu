// Kernels for CUDA of what the library's device path does. Each is a function of the number of an element.
#include "../native.h"
#include "cuda.h"

#ifdef REHEARSAL_FAKE_CUDA  // no compiler for cards: the elements are walked on the host, by fake/cudart.cc's rules
#define __device__
#define __host__
template <typename F>
void run_on_card(const F& f, int64_t count, cudaStream_t stream) {
  CUDA_CALL(cudaLaunchFake(stream));
  for (int64_t i = 0; i < count; ++i) f(i);
}
template <typename T>
void add_to(T* sum, T more) { *sum += more; }
#else
template <typename F>
__global__ void each(F f, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) f(i);
}
template <typename F>
void run_on_card(const F& f, int64_t count, cudaStream_t stream) {
  if (!count) return;
  constexpr int kThreads = 256;
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(blocks < 65536 ? blocks : 65536)), block(kThreads);
  void* arguments[] = {const_cast<F*>(&f), &count};
  // Its own status: the last error of the thread may be another call's.
  CUDA_CALL(cudaLaunchKernel(reinterpret_cast<const void*>(&each<F>), grid, block, arguments, 0, stream));
}
template <typename T>
__device__ void add_to(T* sum, T more) {  // of integers, so the order does not matter
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(more));
}
#endif

namespace rehearsal::native {
namespace {

constexpr int kMostAxes = 9;  // Paddle's tensors have no more

struct Wide {  // an element of 16 bytes
  uint64_t low, high;
};

// Where element k in row-major order of some extents lies.
struct Layout {
  int64_t extents[kMostAxes] = {}, strides[kMostAxes] = {};
  int axes = 0;

  // Axes that continue each other are one.
  Layout(const Extents& all_extents, const Extents& all_strides) {
    for (size_t i = 0; i < all_extents.size(); ++i) {
      if (all_extents[i] == 1) continue;
      if (axes && strides[axes - 1] == all_strides[i] * all_extents[i]) {
        extents[axes - 1] *= all_extents[i];
        strides[axes - 1] = all_strides[i];
      } else {
        extents[axes] = all_extents[i];
        strides[axes++] = all_strides[i];
      }
    }
  }
  __host__ __device__ int64_t operator()(int64_t k) const {
    int64_t offset = 0;
    for (int axis = axes - 1; axis > 0; --axis) {
      const int64_t rest = k / extents[axis];
      offset += (k - rest * extents[axis]) * strides[axis];
      k = rest;
    }
    return axes ? offset + k * strides[0] : 0;
  }
};

int64_t product(const Extents& extents) {
  int64_t n = 1;
  for (const int64_t extent : extents) n *= extent;
  return n;
}

template <typename T>
struct Move {
  T* to;
  const T* from;
  Layout to_at, from_at;
  __host__ __device__ void operator()(int64_t k) const { to[to_at(k)] = from[from_at(k)]; }
};

template <typename T>
struct Fill {
  T* to;
  T element;
  __host__ __device__ void operator()(int64_t k) const { to[k] = element; }
};

// ---- casts; the 16-bit floats by their bits, rounded to the nearest even ----

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

template <typename To, typename From>
__host__ __device__ To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

__host__ __device__ inline float widened(Brain value) { return bits_of<float>(static_cast<uint32_t>(value.bits) << 16); }
__host__ __device__ inline float widened(Half value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16, exponent = value.bits >> 10 & 31u, fraction = value.bits & 1023u;
  if (exponent == 31) return bits_of<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent) return bits_of<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2**-24
  return sign ? -tiny : tiny;
}
template <typename T>
__host__ __device__ T widened(T value) { return value; }

// The bits of a magnitude, rounded to the nearest even where `drop` of them go.
__host__ __device__ inline uint32_t rounded(uint32_t bits, int drop) {
  return (bits + ((1u << (drop - 1)) - 1) + (bits >> drop & 1u)) >> drop;
}

template <typename To>
struct Narrow {
  template <typename From>
  __host__ __device__ static To of(From value) { return static_cast<To>(value); }
};
template <>
struct Narrow<Brain> {
  template <typename From>
  __host__ __device__ static Brain of(From value) {
    const uint32_t bits = bits_of<uint32_t>(static_cast<float>(value));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(0x7fff)};
    return {static_cast<uint16_t>((bits & 0x80000000u) >> 16 | rounded(bits & 0x7fffffffu, 16))};
  }
};
template <>
struct Narrow<Half> {
  template <typename From>
  __host__ __device__ static Half of(From value) {
    const uint32_t bits = bits_of<uint32_t>(static_cast<float>(value)), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits & 0x80000000u) >> 16;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(0x7fff)};
    if (magnitude >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65536 and more
    if (magnitude >= 0x38800000u) {                                                // 2**-14: a normal number
      return {static_cast<uint16_t>(sign | (rounded(magnitude, 13) - (112u << 10)))};
    }
    const int drop = 126 - static_cast<int>(magnitude >> 23);  // of the fraction with its leading one
    if (drop > 24) return {static_cast<uint16_t>(sign)};
    return {static_cast<uint16_t>(sign | rounded((magnitude & 0x7fffffu) | 0x800000u, drop))};
  }
};

template <typename To, typename From>
struct Cast {
  To* to;
  const From* from;
  __host__ __device__ void operator()(int64_t k) const { to[k] = Narrow<To>::of(widened(from[k])); }
};

template <typename T>
struct Tag {
  using type = T;
};
template <typename F>
bool by_type(Type type, const F& f) {
  switch (type) {
    case Type::kBool: return f(Tag<bool>{});
    case Type::kUint8: return f(Tag<uint8_t>{});
    case Type::kInt8: return f(Tag<int8_t>{});
    case Type::kInt16: return f(Tag<int16_t>{});
    case Type::kInt32: return f(Tag<int32_t>{});
    case Type::kInt64: return f(Tag<int64_t>{});
    case Type::kFloat16: return f(Tag<Half>{});
    case Type::kBfloat16: return f(Tag<Brain>{});
    case Type::kFloat32: return f(Tag<float>{});
    case Type::kFloat64: return f(Tag<double>{});
    default: return false;
  }
}
template <typename F>
bool by_integer(Type type, const F& f) {
  return type <= Type::kInt64 && type != Type::kBool && by_type(type, [&](auto tag) {
    if constexpr (std::is_integral_v<typename decltype(tag)::type>) return f(tag);
    else return false;
  });
}
template <typename F>
bool by_width(size_t width, const F& f) {
  switch (width) {
    case 1: return f(Tag<uint8_t>{});
    case 2: return f(Tag<uint16_t>{});
    case 4: return f(Tag<uint32_t>{});
    case 8: return f(Tag<uint64_t>{});
    case 16: return f(Tag<Wide>{});
    default: return false;
  }
}

template <typename T, bool adds>
struct Combine {  // integers wrap around
  T* to;
  const T *a, *b;
  Layout a_at, b_at;
  __host__ __device__ void operator()(int64_t k) const {
    const auto x = static_cast<uint64_t>(a[a_at(k)]), y = static_cast<uint64_t>(b[b_at(k)]);
    to[k] = static_cast<T>(adds ? x + y : x * y);
  }
};

template <typename T>
struct SumRun {  // one stretch of the operand into one element of the result
  static constexpr int64_t kRun = 64;
  int64_t* to;
  const T* from;
  Layout to_at;
  int64_t count;
  __device__ __host__ void operator()(int64_t run) const {
    const int64_t begin = run * kRun, end = begin + kRun < count ? begin + kRun : count;
    int64_t sum = 0, at = to_at(begin);
    for (int64_t k = begin; k < end; ++k) {
      const int64_t here = to_at(k);
      if (here != at) {
        put(at, sum);
        sum = 0;
        at = here;
      }
      sum += static_cast<int64_t>(from[k]);
    }
    put(at, sum);
  }
  __device__ __host__ void put(int64_t at, int64_t sum) const {
#if defined(__CUDA_ARCH__) || defined(REHEARSAL_FAKE_CUDA)
    add_to(to + at, sum);
#endif
  }
};

}  // namespace

bool move(Stream* stream, size_t width, void* to, const Extents& to_extents, const Extents& to_strides, const void* from,
          const Extents& from_extents, const Extents& from_strides) {
  if (to_extents.size() > kMostAxes || from_extents.size() > kMostAxes) return false;
  return by_width(width, [&](auto tag) {
    using T = typename decltype(tag)::type;
    use(stream->device);
    run_on_card(Move<T>{static_cast<T*>(to), static_cast<const T*>(from), {to_extents, to_strides}, {from_extents, from_strides}},
                product(to_extents), stream->handle);
    return true;
  });
}

bool fill(Stream* stream, size_t width, void* to, size_t count, const void* element) {
  return by_width(width, [&](auto tag) {
    using T = typename decltype(tag)::type;
    use(stream->device);
    T value;
    memcpy(&value, element, sizeof(value));
    run_on_card(Fill<T>{static_cast<T*>(to), value}, static_cast<int64_t>(count), stream->handle);
    return true;
  });
}

bool copy_rows(Stream* stream, size_t count, const std::vector<Rows>& parts) {
  use(stream->device);
  for (const Rows& part : parts) {
    if (count == 1) {  // a pitch has a limit
      CUDA_CALL(cudaMemcpyAsync(part.to, part.from, part.bytes, cudaMemcpyDeviceToDevice, stream->handle));
      continue;
    }
    CUDA_CALL(cudaMemcpy2DAsync(part.to, part.to_pitch, part.from, part.from_pitch, part.bytes, count,
                                cudaMemcpyDeviceToDevice, stream->handle));
  }
  return true;
}

bool cast(Stream* stream, Type to_type, void* to, Type from_type, const void* from, size_t count) {
  return by_type(from_type, [&](auto tag) {
    using From = typename decltype(tag)::type;
    return by_type(to_type, [&](auto other) {
      using To = typename decltype(other)::type;
      use(stream->device);
      run_on_card(Cast<To, From>{static_cast<To*>(to), static_cast<const From*>(from)}, static_cast<int64_t>(count), stream->handle);
      return true;
    });
  });
}

bool combine(Stream* stream, Combination how, Type type, void* to, const Extents& extents, const void* a,
             const Extents& a_strides, const void* b, const Extents& b_strides) {
  if (how == Combination::kNone || extents.size() > kMostAxes) return false;
  return by_integer(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    use(stream->device);
    auto* out = static_cast<T*>(to);
    const auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
    const Layout x_at(extents, a_strides), y_at(extents, b_strides);
    if (how == Combination::kAdd) run_on_card(Combine<T, true>{out, x, y, x_at, y_at}, product(extents), stream->handle);
    else run_on_card(Combine<T, false>{out, x, y, x_at, y_at}, product(extents), stream->handle);
    return true;
  });
}

bool sum(Stream* stream, Type type, const void* from, const Extents& extents, void* to, size_t count, const Extents& strides) {
  if (extents.size() > kMostAxes) return false;
  return by_integer(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    use(stream->device);
    CUDA_CALL(cudaMemsetAsync(to, 0, count * sizeof(int64_t), stream->handle));
    const SumRun<T> runs{static_cast<int64_t*>(to), static_cast<const T*>(from), {extents, strides}, product(extents)};
    run_on_card(runs, (runs.count + SumRun<T>::kRun - 1) / SumRun<T>::kRun, stream->handle);
    return true;
  });
}

}  // namespace rehearsal::native
