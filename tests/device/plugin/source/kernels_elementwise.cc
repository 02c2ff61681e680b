// Kernels that compute element by element.
#include <cmath>

#include "kernels.h"

namespace rehearsal {
namespace {

using native::Combination;

// ---- two operands, broadcast ----

// One run: `length` results from operands that advance by `s` and `t` elements.
using Loop = void (*)(const char* a, const char* b, char* out, int64_t length, int64_t s, int64_t t);

template <typename In, typename Out, typename F>
void loop(const char* x, const char* y, char* out, int64_t length, int64_t s, int64_t t) {
  using W = Wide<In>;
  auto *a = reinterpret_cast<const In*>(x), *b = reinterpret_cast<const In*>(y);
  auto* at = reinterpret_cast<Out*>(out);
  for (int64_t i = 0; i < length; ++i) at[i] = to<Out>(F()(to<W>(a[i * s]), to<W>(b[i * t])));
}

void binary(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, DataType type, DenseTensor* out,
            Loop loop, Combination native_way = Combination::kNone) {
  const int64_t width = phi::SizeOf(x.dtype()), out_width = phi::SizeOf(type), count_x = x.numel(), count_y = y.numel();
  const Extents of_x = list(x.dims()), of_y = list(y.dims()), extents = broadcast(of_x, of_y);
  const void *from_x = count_x ? x.data() : nullptr, *from_y = count_y ? y.data() : nullptr;
  void* to_at = allocated(context, out, type);
  if (!to_at) return;
  if (launched(native::combine(stream_of(context), native_way, native_type(type), to_at, extents, from_x,
                               broadcast_strides(of_x, extents), from_y, broadcast_strides(of_y, extents)))) {
    return;
  }
  const char *a = reached(from_x, count_x * width), *b = reached(from_y, count_y * width);
  const int64_t count = out->numel();
  char* at = reached(to_at, count * out_width);
  if (of_x == of_y || count_y == 1) {
    return launch(context, [=] { loop(a, b, at, count, count_x == count ? 1 : 0, count_y == count ? 1 : 0); });
  }
  launch(context, [=] {
    const Extents first = broadcast_strides(of_x, extents), second = broadcast_strides(of_y, extents);
    char* next = at;
    each_run(extents, {first, second}, [&](const int64_t* from, int64_t length) {
      loop(a + from[0] * width, b + from[1] * width, next, length, run_stride(first), run_stride(second));
      next += length * out_width;
    });
  });
}

struct Plus {
  template <typename W>
  W operator()(W a, W b) const { return a + b; }
};
struct Minus {
  template <typename W>
  W operator()(W a, W b) const { return a - b; }
};
struct Times {
  template <typename W>
  W operator()(W a, W b) const { return a * b; }
};
struct Over {
  template <typename W>
  W operator()(W a, W b) const {
    if constexpr (std::is_integral_v<W>) return b ? a / b : 0;
    else return a / b;
  }
};
struct Larger {
  template <typename W>
  W operator()(W a, W b) const { return a < b ? b : a; }
};
struct Smaller {
  template <typename W>
  W operator()(W a, W b) const { return b < a ? b : a; }
};

#define ARITHMETIC(Name, F, native_way)                                                                    \
  void Name(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {  \
    by_number(x.dtype(), [&](auto tag) {                                                                   \
      using T = typename decltype(tag)::type;                                                              \
      binary(context, x, y, x.dtype(), out, loop<T, T, F>, native_way);                                    \
    });                                                                                                    \
  }
ARITHMETIC(Add, Plus, Combination::kAdd)
ARITHMETIC(Subtract, Minus, Combination::kNone)
ARITHMETIC(Multiply, Times, Combination::kMultiply)
ARITHMETIC(Divide, Over, Combination::kNone)
#define ORDERED(Name, F)                                                                                   \
  void Name(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {  \
    by_real(x.dtype(), [&](auto tag) {                                                                     \
      using T = typename decltype(tag)::type;                                                              \
      binary(context, x, y, x.dtype(), out, loop<T, T, F>);                                                             \
    });                                                                                                    \
  }
ORDERED(Maximum, Larger)
ORDERED(Minimum, Smaller)

#define BITWISE(Name, expression)                                                                          \
  struct Name##Of {                                                                                        \
    int64_t operator()(int64_t a, int64_t b) const { return expression; }                                  \
  };                                                                                                       \
  void Name(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {  \
    by_integer(x.dtype(), [&](auto tag) {                                                                  \
      using T = typename decltype(tag)::type;                                                              \
      binary(context, x, y, x.dtype(), out, loop<T, T, Name##Of>);                                         \
    });                                                                                                    \
  }
BITWISE(BitwiseAnd, a & b)
BITWISE(BitwiseOr, a | b)
BITWISE(BitwiseXor, a ^ b)

template <typename T, bool left, bool arithmetic>
struct Shifted {
  T operator()(int64_t value, int64_t by) const {
    using Unsigned = std::make_unsigned_t<T>;
    const bool over = by < 0 || by >= static_cast<int64_t>(sizeof(T) * 8);
    const auto bits = static_cast<Unsigned>(value);
    if (left) return over ? T(0) : static_cast<T>(bits << by);
    if (arithmetic) return over ? static_cast<T>(value < 0 ? -1 : 0) : static_cast<T>(static_cast<T>(value) >> by);
    return over ? T(0) : static_cast<T>(bits >> by);
  }
};

template <bool left>
void BitwiseShift(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, bool arithmetic,
                  DenseTensor* out) {
  by_integer(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, bool>) {
      binary(context, x, y, x.dtype(), out,
             arithmetic ? loop<T, T, Shifted<T, left, true>> : loop<T, T, Shifted<T, left, false>>);
    } else {
      unknown_type(x.dtype());
    }
  });
}

#define COMPARISON(Name, by, expression)                                                                   \
  struct Name##Of {                                                                                        \
    template <typename W>                                                                                  \
    bool operator()(W a, W b) const { return expression; }                                                 \
  };                                                                                                       \
  void Name(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {  \
    by(x.dtype(), [&](auto tag) {                                                                          \
      using T = typename decltype(tag)::type;                                                              \
      binary(context, x, y, DataType::BOOL, out, loop<T, bool, Name##Of>);                                 \
    });                                                                                                    \
  }
COMPARISON(Equal, by_number, a == b)
COMPARISON(NotEqual, by_number, !(a == b))
COMPARISON(LessThan, by_real, a < b)
COMPARISON(LessEqual, by_real, a <= b)
COMPARISON(GreaterThan, by_real, a > b)
COMPARISON(GreaterEqual, by_real, a >= b)
COMPARISON(LogicalAnd, by_real, a && b)
COMPARISON(LogicalOr, by_real, a || b)

void EqualAll(const CustomContext& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  bool* at = output<bool>(context, out);
  const int64_t count = x.numel();
  const bool alike = x.dims() == y.dims();
  by_number(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *a = input<T>(x), *b = input<T>(y);
    launch(context, [=] {
      bool same = alike;
      for (int64_t i = 0; same && i < count; ++i) same = a[i] == b[i];
      *at = same;
    });
  });
}

// ---- one operand ----

template <typename In, typename Out, typename F>
void unary(const CustomContext& context, const DenseTensor& x, DenseTensor* out, F f) {
  const In* a = input<In>(x);
  Out* at = output<Out>(context, out);
  const int64_t count = out->numel();
  if (!at) return;
  launch(context, [=] {
    for (int64_t i = 0; i < count; ++i) at[i] = to<Out>(f(to<Wide<In>>(a[i])));
  });
}

#define FLOAT_FUNCTION(Name, expression)                                              \
  void Name(const CustomContext& context, const DenseTensor& x, DenseTensor* out) {   \
    by_float(x.dtype(), [&](auto tag) {                                               \
      using T = typename decltype(tag)::type;                                         \
      unary<T, T>(context, x, out, [](Wide<T> a) { return expression; });             \
    });                                                                               \
  }
FLOAT_FUNCTION(Sqrt, std::sqrt(a))
FLOAT_FUNCTION(Rsqrt, 1 / std::sqrt(a))
FLOAT_FUNCTION(Exp, std::exp(a))
FLOAT_FUNCTION(Log, std::log(a))
FLOAT_FUNCTION(Reciprocal, 1 / a)

#define NUMBER_FUNCTION(Name, Out, expression)                                        \
  void Name(const CustomContext& context, const DenseTensor& x, DenseTensor* out) {   \
    by_real(x.dtype(), [&](auto tag) {                                                \
      using T = typename decltype(tag)::type;                                         \
      using W = Wide<T>;                                                              \
      unary<T, Out>(context, x, out, [](W a) { return expression; });                 \
    });                                                                               \
  }
NUMBER_FUNCTION(Square, T, a* a)
NUMBER_FUNCTION(Abs, T, a < 0 ? -a : a)
NUMBER_FUNCTION(IsFinite, bool, (std::is_integral_v<W> || std::isfinite(static_cast<double>(a))))
NUMBER_FUNCTION(IsNan, bool, (!std::is_integral_v<W> && std::isnan(static_cast<double>(a))))
NUMBER_FUNCTION(IsInf, bool, (!std::is_integral_v<W> && std::isinf(static_cast<double>(a))))
NUMBER_FUNCTION(LogicalNot, bool, !a)

void BitwiseNot(const CustomContext& context, const DenseTensor& x, DenseTensor* out) {
  by_integer(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    unary<T, T>(context, x, out, [](int64_t a) { return std::is_same_v<T, bool> ? int64_t{!a} : ~a; });
  });
}

void Scale(const CustomContext& context, const DenseTensor& x, const phi::Scalar& scale, const phi::Scalar& bias,
           bool bias_after_scale, DenseTensor* out) {
  by_number(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    const W by = scale.to<W>(), plus = bias.to<W>();
    if (bias_after_scale) {
      unary<T, T>(context, x, out, [=](W a) { return a * by + plus; });
    } else {
      unary<T, T>(context, x, out, [=](W a) { return (a + plus) * by; });
    }
  });
}

void Clip(const CustomContext& context, const DenseTensor& x, const phi::Scalar& low, const phi::Scalar& high,
          DenseTensor* out) {
  by_real(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    const W a = low.to<W>(), b = high.to<W>();
    unary<T, T>(context, x, out, [=](W value) { return value < a ? a : value > b ? b : value; });
  });
}

void Increment(const CustomContext& context, const DenseTensor& x, float value, DenseTensor* out) {
  by_real(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    unary<T, T>(context, x, out, [=](Wide<T> a) { return a + static_cast<Wide<T>>(value); });
  });
}

void AddN(const CustomContext& context, const std::vector<const phi::TensorBase*>& x, DenseTensor* out) {
  by_number(x[0]->dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<const T*> parts;
    for (const phi::TensorBase* part : x) {
      PADDLE_ENFORCE_EQ(DenseTensor::classof(part), true,
                        common::errors::Unimplemented("rehearsal: add_n of tensors that are not dense"));
      parts.push_back(input<T>(*static_cast<const DenseTensor*>(part)));
    }
    T* at = output<T>(context, out);
    const int64_t count = out->numel();
    launch(context, [=] {
      for (int64_t i = 0; i < count; ++i) {
        Wide<T> sum = to<Wide<T>>(parts[0][i]);
        for (size_t k = 1; k < parts.size(); ++k) sum = sum + to<Wide<T>>(parts[k][i]);
        at[i] = to<T>(sum);
      }
    });
  });
}

void Where(const CustomContext& context, const DenseTensor& condition, const DenseTensor& x, const DenseTensor& y,
           DenseTensor* out) {
  const bool* chosen = input<bool>(condition);
  const Extents of_x = list(x.dims()), of_y = list(y.dims()), of_condition = list(condition.dims());
  const Extents extents = broadcast(broadcast(of_x, of_y), of_condition);
  by_number(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *a = input<T>(x), *b = input<T>(y);
    T* at = output<T>(context, out);
    if (!at) return;
    launch(context, [=] {
      const Extents c = broadcast_strides(of_condition, extents);
      const Extents s = broadcast_strides(of_x, extents), t = broadcast_strides(of_y, extents);
      T* next = at;
      each_run(extents, {c, s, t}, [&](const int64_t* from, int64_t length) {
        for (int64_t i = 0; i < length; ++i) {
          *next++ = chosen[from[0] + i * run_stride(c)] ? a[from[1] + i * run_stride(s)] : b[from[2] + i * run_stride(t)];
        }
      });
    });
  });
}

const Registered<&Add> add("add", {REHEARSAL_NUMBERS});
const Registered<&Add> grad_add("grad_add", {REHEARSAL_NUMBERS});
const Registered<&Subtract> subtract("subtract", {REHEARSAL_NUMBERS});
const Registered<&Multiply> multiply("multiply", {REHEARSAL_NUMBERS});
const Registered<&Divide> divide("divide", {REHEARSAL_NUMBERS});
const Registered<&Maximum> maximum("maximum", {REHEARSAL_REAL});
const Registered<&Minimum> minimum("minimum", {REHEARSAL_REAL});
const Registered<&AddN> add_n("add_n", {REHEARSAL_NUMBERS});
const Registered<&BitwiseAnd> bitwise_and("bitwise_and", {REHEARSAL_INTEGERS});
const Registered<&BitwiseOr> bitwise_or("bitwise_or", {REHEARSAL_INTEGERS});
const Registered<&BitwiseXor> bitwise_xor("bitwise_xor", {REHEARSAL_INTEGERS});
const Registered<&BitwiseNot> bitwise_not("bitwise_not", {REHEARSAL_INTEGERS});
const Types kShifted{DataType::UINT8, DataType::INT8, DataType::INT16, DataType::INT32, DataType::INT64};
const Registered<&BitwiseShift<true>> left_shift("bitwise_left_shift", kShifted);
const Registered<&BitwiseShift<false>> right_shift("bitwise_right_shift", kShifted);
const Registered<&Equal> equal("equal", {REHEARSAL_NUMBERS}, gives_bool);
const Registered<&NotEqual> not_equal("not_equal", {REHEARSAL_NUMBERS}, gives_bool);
const Registered<&LessThan> less_than("less_than", {REHEARSAL_REAL}, gives_bool);
const Registered<&LessEqual> less_equal("less_equal", {REHEARSAL_REAL}, gives_bool);
const Registered<&GreaterThan> greater_than("greater_than", {REHEARSAL_REAL}, gives_bool);
const Registered<&GreaterEqual> greater_equal("greater_equal", {REHEARSAL_REAL}, gives_bool);
const Registered<&LogicalAnd> logical_and("logical_and", {REHEARSAL_REAL}, gives_bool);
const Registered<&LogicalOr> logical_or("logical_or", {REHEARSAL_REAL}, gives_bool);
const Registered<&LogicalNot> logical_not("logical_not", {REHEARSAL_REAL}, gives_bool);
const Registered<&EqualAll> equal_all("equal_all", {REHEARSAL_NUMBERS}, gives_bool);
const Registered<&Where> where("where", {REHEARSAL_NUMBERS});
const Registered<&Sqrt> square_root("sqrt", {REHEARSAL_FLOATS});
const Registered<&Rsqrt> reciprocal_root("rsqrt", {REHEARSAL_FLOATS});
const Registered<&Exp> exponential("exp", {REHEARSAL_FLOATS});
const Registered<&Log> logarithm("log", {REHEARSAL_FLOATS});
const Registered<&Reciprocal> reciprocal("reciprocal", {REHEARSAL_FLOATS});
const Registered<&Square> square("square", {REHEARSAL_REAL});
const Registered<&Abs> absolute("abs", {REHEARSAL_REAL});
const Registered<&IsFinite> is_finite("isfinite", {REHEARSAL_REAL}, gives_bool);
const Registered<&IsNan> is_nan("isnan", {REHEARSAL_REAL}, gives_bool);
const Registered<&IsInf> is_inf("isinf", {REHEARSAL_REAL}, gives_bool);
const Registered<&Scale> scale("scale", {REHEARSAL_NUMBERS});
const Registered<&Clip> clip("clip", {REHEARSAL_REAL});
const Registered<&Increment> increment("increment", {REHEARSAL_REAL});

}  // namespace
}  // namespace rehearsal
