// Kernels that move, fill or convert elements.
//
// Paddle looks up contiguous and strided_copy without falling back to the CPU. The others are here because a fallback
// gives the result of an in-place operation new memory, and its copies would drown those of the code under test.
#include <algorithm>

#include "kernels.h"

namespace rehearsal {
namespace {

// The lowest and the highest element that a layout touches; strides may be negative.
void checked_span(const void* pointer, const Extents& extents, const Extents& strides, size_t width) {
  int64_t low = 0, high = 0;
  for (size_t i = 0; i < extents.size(); ++i) (strides[i] < 0 ? low : high) += (extents[i] - 1) * strides[i];
  reached(static_cast<const char*>(pointer) + low * static_cast<int64_t>(width), (high - low + 1) * width);
}

// Element k in row-major order goes from one layout to the other, which may have other extents.
template <typename T>
void move_elements(T* to, const Extents& to_extents, const Extents& to_strides, const T* from,
                   const Extents& from_extents, const Extents& from_strides) {
  if (to_extents == from_extents) {
    const int64_t a = run_stride(to_strides), b = run_stride(from_strides);
    each_run(to_extents, {to_strides, from_strides}, [&](const int64_t* at, int64_t length) {
      if (a == 1 && b == 1) {
        memcpy(to + at[0], from + at[1], length * sizeof(T));
      } else {
        for (int64_t i = 0; i < length; ++i) to[at[0] + i * a] = from[at[1] + i * b];
      }
    });
    return;
  }
  std::vector<T> packed;
  packed.reserve(product(from_extents));
  each_run(from_extents, {from_strides}, [&](const int64_t* at, int64_t length) {
    for (int64_t i = 0; i < length; ++i) packed.push_back(from[at[0] + i * run_stride(from_strides)]);
  });
  int64_t next = 0;
  each_run(to_extents, {to_strides}, [&](const int64_t* at, int64_t length) {
    for (int64_t i = 0; i < length; ++i) to[at[0] + i * run_stride(to_strides)] = packed[next++];
  });
}

void move(const CustomContext& context, size_t width, void* to, const Extents& to_extents, const Extents& to_strides,
          const void* from, const Extents& from_extents, const Extents& from_strides) {
  if (launched(native::move(stream_of(context), width, to, to_extents, to_strides, from, from_extents, from_strides))) return;
  checked_span(to, to_extents, to_strides, width);
  checked_span(from, from_extents, from_strides, width);
  by_width(width, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* target = reinterpret_cast<T*>(reached(to, width));
    auto* source = reinterpret_cast<const T*>(reached(from, width));
    launch(context, [=] { move_elements(target, to_extents, to_strides, source, from_extents, from_strides); });
  });
}

void Contiguous(const CustomContext& context, const DenseTensor& x, DenseTensor* out) {
  phi::DenseTensorMeta meta = x.meta();
  meta.strides = meta.calc_strides(meta.dims);
  meta.offset = 0;
  const Extents extents = list(x.dims()), strides = list(x.strides());
  const void* from = x.numel() ? x.data() : nullptr;
  out->set_meta(meta);
  void* to = context.Alloc(out, meta.dtype);
  if (!product(extents)) return;
  move(context, phi::SizeOf(meta.dtype), to, extents, row_major(extents), from, extents, strides);
}

void StridedCopy(const CustomContext& context, const DenseTensor& x, const std::vector<int64_t>& extents,
                 const std::vector<int64_t>& strides, int64_t offset, DenseTensor* out) {
  phi::DenseTensorMeta meta = x.meta();
  meta.strides = common::make_ddim(strides);
  meta.dims = common::make_ddim(extents);
  meta.offset = offset;
  const Extents from_extents = list(x.dims()), from_strides = list(x.strides());
  out->set_meta(meta);
  if (!product(extents)) return;
  const size_t width = phi::SizeOf(meta.dtype);
  if (product(from_extents) == 1) {  // one value for all
    const Extents still(extents.size(), 0);
    return move(context, width, out->data(), extents, strides, x.data(), extents, still);
  }
  move(context, width, out->data(), extents, strides, x.data(), from_extents, from_strides);
}

void Assign(const CustomContext& context, const DenseTensor& x, DenseTensor* out) {
  const void* from = x.numel() ? x.data() : nullptr;
  void* to = allocated(context, out, x.dtype());
  if (!to || to == from) return;
  ++tally().kernels;
  runtime::copy_async(Way::D2D, stream_of(context), to, from, x.numel() * phi::SizeOf(x.dtype()));
}

// What tensor parallelism's forward does before a column-parallel layer. The wheel has it for custom devices in all
// types but bfloat16.
void Identity(const CustomContext& context, const DenseTensor& x, int, bool, bool, DenseTensor* out) {
  Assign(context, x, out);
}

void fill(const CustomContext& context, const phi::Scalar& value, DenseTensor* out) {
  void* at = allocated(context, out, out->dtype());
  if (!at) return;
  const int64_t count = out->numel();
  by_type(out->dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T element = value.to<T>();
    if (launched(native::fill(stream_of(context), sizeof(T), at, count, &element))) return;
    T* to = reinterpret_cast<T*>(reached(at, count * sizeof(T)));
    launch(context, [=] { std::fill(to, to + count, element); });
  });
}

DataType known(DataType type, const DenseTensor* out) { return type == DataType::UNDEFINED ? out->dtype() : type; }

void Full(const CustomContext& context, const phi::IntArray& shape, const phi::Scalar& value, DataType type,
          DenseTensor* out) {
  type = known(type, out);
  out->Resize(common::make_ddim(shape.GetData()));
  context.Alloc(out, type);
  fill(context, value, out);
}

void FullLike(const CustomContext& context, const DenseTensor&, const phi::Scalar& value, DataType type,
              DenseTensor* out) {
  context.Alloc(out, known(type, out));
  fill(context, value, out);
}

void Fill(const CustomContext& context, const DenseTensor& x, const phi::Scalar& value, DenseTensor* out) {
  context.Alloc(out, x.dtype());
  fill(context, value, out);
}

void AssignValue(const CustomContext& context, const std::vector<int>& shape, DataType type,
                 const std::vector<phi::Scalar>& values, DenseTensor* out) {
  out->Resize(common::make_ddim(shape));
  char* at = output(context, out, type);
  if (!at) return;
  by_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<T> elements;
    for (const phi::Scalar& value : values) elements.push_back(value.to<T>());
    launch(context, [at, elements] { std::copy(elements.begin(), elements.end(), reinterpret_cast<T*>(at)); });
  });
}

void Arange(const CustomContext& context, const phi::Scalar& start, const phi::Scalar& end, const phi::Scalar& step,
            DenseTensor* out) {
  by_real(out->dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using W = std::conditional_t<std::is_integral_v<T>, int64_t, double>;
    const W first = start.to<W>(), last = end.to<W>(), stride = step.to<W>();
    PADDLE_ENFORCE_EQ(stride == W(0), false, common::errors::InvalidArgument("rehearsal: a range with a step of 0"));
    int64_t count = 0;
    if constexpr (std::is_integral_v<T>) {
      count = (last - first + stride + (stride > 0 ? -1 : 1)) / stride;
    } else {
      count = static_cast<int64_t>(std::ceil((last - first) / stride));
    }
    out->Resize(common::make_ddim(Extents{std::max<int64_t>(count, 0)}));
    T* at = output<T>(context, out);
    launch(context, [=] {
      for (int64_t i = 0; i < count; ++i) at[i] = static_cast<T>(first + static_cast<W>(i) * stride);
    });
  });
}

void Cast(const CustomContext& context, const DenseTensor& x, DataType type, DenseTensor* out) {
  const int64_t count = x.numel();
  const DataType from_type = x.dtype();
  void* to_at = allocated(context, out, type);
  if (!count || launched(native::cast(stream_of(context), native_type(type), to_at, native_type(from_type), x.data(), count))) return;
  const char* from = reached(x.data(), count * phi::SizeOf(from_type));
  char* at = reached(to_at, count * phi::SizeOf(type));
  by_type(from_type, [&](auto tag) {
    using From = typename decltype(tag)::type;
    by_type(type, [&](auto other) {
      using To = typename decltype(other)::type;
      launch(context, [=] {
        auto* source = reinterpret_cast<const From*>(from);
        auto* target = reinterpret_cast<To*>(at);
        for (int64_t i = 0; i < count; ++i) target[i] = to<To>(source[i]);
      });
    });
  });
}

// A tensor as rows of `inner` bytes: `outer` of them, `extent` along the axis in each.
struct Slab {
  int64_t outer = 1, extent = 1, inner = 1;
  Slab(const DenseTensor& tensor, int axis) {
    const Extents extents = list(tensor.dims());
    for (int i = 0; i < static_cast<int>(extents.size()); ++i) (i < axis ? outer : i > axis ? inner : extent) *= extents[i];
    inner *= phi::SizeOf(tensor.dtype());
  }
};

// Copies stretches of rows within the device.
void copy_rows(const CustomContext& context, int64_t rows, std::vector<native::Rows> parts) {
  if (!rows || parts.empty() || launched(native::copy_rows(stream_of(context), rows, parts))) return;
  for (native::Rows& part : parts) {
    part.to = reached(part.to, (rows - 1) * part.to_pitch + part.bytes);
    part.from = reached(part.from, (rows - 1) * part.from_pitch + part.bytes);
  }
  launch(context, [=] {
    for (int64_t row = 0; row < rows; ++row) {
      for (const native::Rows& part : parts) memcpy(part.to + row * part.to_pitch, part.from + row * part.from_pitch, part.bytes);
    }
  });
}

void Concat(const CustomContext& context, const std::vector<const DenseTensor*>& x, const phi::Scalar& along,
            DenseTensor* out) {
  const int axis = axis_of(along.to<int64_t>(), x[0]->dims().size());
  auto* next = static_cast<char*>(allocated(context, out, x[0]->dtype()));
  if (!next) return;
  const Slab whole(*out, axis);
  std::vector<native::Rows> parts;
  for (const DenseTensor* part : x) {
    if (!part->numel()) continue;
    const Slab slab(*part, axis);
    const size_t bytes = slab.extent * slab.inner;
    parts.push_back({next, static_cast<const char*>(part->data()), bytes, static_cast<size_t>(whole.extent * whole.inner), bytes});
    next += bytes;
  }
  copy_rows(context, whole.outer, parts);
}

void Split(const CustomContext& context, const DenseTensor& x, const phi::IntArray&, const phi::Scalar& along,
           std::vector<DenseTensor*> out) {
  const int axis = axis_of(along.to<int64_t>(), x.dims().size());
  const Slab whole(x, axis);
  const auto* next = static_cast<const char*>(x.numel() ? x.data() : nullptr);
  for (DenseTensor* part : out) {  // their extents come from the shape inference
    auto* at = static_cast<char*>(allocated(context, part, x.dtype()));
    if (!at || !next) continue;
    const size_t bytes = Slab(*part, axis).extent * whole.inner;
    copy_rows(context, whole.outer, {{at, next, bytes, bytes, static_cast<size_t>(whole.extent * whole.inner)}});
    next += bytes;
  }
}

void SplitWithNum(const CustomContext& context, const DenseTensor& x, int, const phi::Scalar& along,
                  std::vector<DenseTensor*> out) {
  Split(context, x, {}, along, std::move(out));
}

void Stack(const CustomContext& context, const std::vector<const DenseTensor*>& x, int along, DenseTensor* out) {
  const int axis = axis_of(along, x[0]->dims().size() + 1);
  auto* next = static_cast<char*>(allocated(context, out, x[0]->dtype()));
  if (!next) return;
  const Slab slab(*out, axis);
  const auto bytes = static_cast<size_t>(slab.inner);
  std::vector<native::Rows> parts;
  for (const DenseTensor* part : x) {
    parts.push_back({next, static_cast<const char*>(part->data()), bytes, slab.extent * bytes, bytes});
    next += bytes;
  }
  copy_rows(context, slab.outer, parts);
}

void gather_rows(const CustomContext& context, const DenseTensor& x, const DenseTensor& index, int axis,
                 DenseTensor* out) {
  const char* from = x.numel() ? reached(x.data(), x.numel() * phi::SizeOf(x.dtype())) : nullptr;
  char* at = output(context, out, x.dtype());
  if (!at) return;
  const Slab slab(x, axis);
  const int device = context.GetPlace().GetDeviceId();
  by_integer(index.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* rows = input<T>(index);
    const int64_t count = index.numel();
    launch(context, [=] {
      for (int64_t outer = 0; outer < slab.outer; ++outer) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = rows[i] < T(0) ? rows[i] + slab.extent : rows[i];
          if (row < 0 || row >= slab.extent) return fail(device, "an index is out of range");
          memcpy(at + (outer * count + i) * slab.inner, from + (outer * slab.extent + row) * slab.inner, slab.inner);
        }
      }
    });
  });
}

void Gather(const CustomContext& context, const DenseTensor& x, const DenseTensor& index, const phi::Scalar& axis,
            DenseTensor* out) {
  gather_rows(context, x, index, axis_of(axis.to<int64_t>(), x.dims().size()), out);
}

void IndexSelect(const CustomContext& context, const DenseTensor& x, const DenseTensor& index, int axis,
                 DenseTensor* out) {
  gather_rows(context, x, index, axis_of(axis, x.dims().size()), out);
}

void Expand(const CustomContext& context, const DenseTensor& x, const phi::IntArray& shape, DenseTensor* out) {
  const Extents from = list(x.dims());
  Extents extents = shape.GetData();
  for (size_t i = 0; i < extents.size(); ++i) {
    if (extents[i] < 0) extents[i] = from[i + from.size() - extents.size()];
  }
  out->Resize(common::make_ddim(extents));
  void* to = context.Alloc(out, x.dtype());
  if (!out->numel()) return;
  move(context, phi::SizeOf(x.dtype()), to, extents, row_major(extents), x.data(), extents,
       broadcast_strides(from, extents));
}

void Transpose(const CustomContext& context, const DenseTensor& x, const std::vector<int>& axes, DenseTensor* out) {
  const Extents from = list(x.dims()), own = row_major(from);
  Extents extents, strides;
  for (int axis : axes) {
    extents.push_back(from[axis_of(axis, from.size())]);
    strides.push_back(own[axis_of(axis, from.size())]);
  }
  const void* source = x.numel() ? x.data() : nullptr;
  void* to = context.Alloc(out, x.dtype());
  if (!product(extents)) return;
  move(context, phi::SizeOf(x.dtype()), to, extents, row_major(extents), source, extents, strides);
}

// ---- x[a:b:c, ...] = value ----

struct Region {
  Extents extents, strides, unit;  // of the tensor's axes; `unit`: as the value counts them, without decreased axes
  int64_t begin = 0;

  Region(const DenseTensor& x, const Extents& starts, const Extents& ends, const Extents& steps, const Extents& axes,
         const Extents& decreased)
      : extents(list(x.dims())), strides(row_major(extents)) {
    std::vector<bool> gone(extents.size(), false);
    for (int64_t axis : decreased) gone[axis_of(axis, extents.size())] = true;
    for (size_t i = 0; i < axes.size(); ++i) {
      const int axis = axis_of(axes[i], extents.size());
      const int64_t extent = extents[axis], step = steps[i], low = step > 0 ? 0 : -1;
      const auto bounded = [&](int64_t at) {
        if (at < 0) at = std::max(at + extent, low);
        return std::min(at, step > 0 ? extent : extent - 1);
      };
      // A step backwards to before the first element is written as an end of -(extent + 1) or less.
      const int64_t first = bounded(starts[i]), last = bounded(ends[i]);
      const int64_t count = step > 0 ? (last - first + step - 1) / step : (first - last - step - 1) / -step;
      begin += first * strides[axis];
      extents[axis] = std::max<int64_t>(count, 0);
      strides[axis] *= step;
    }
    for (size_t i = 0; i < extents.size(); ++i) {
      if (!gone[i]) unit.push_back(extents[i]);
    }
  }
};

using Fetch = std::function<const char*()>;

// Copies x to `out` where they are not the same, then the value over the region of it.
void set_region(const CustomContext& context, const DenseTensor& x, const Region& region, const Extents& decreased,
                const Extents& none, const Extents& value_extents, const Fetch& value, DenseTensor* out) {
  const size_t width = phi::SizeOf(x.dtype());
  const char* from = x.numel() ? reached(x.data(), x.numel() * width) : nullptr;
  char* at = output(context, out, x.dtype());
  if (!at) return;
  const size_t bytes = x.numel() * width;
  // The value's axes, from the last: those that the region has not (new axes, leading ones) are of extent 1.
  Extents shape = value_extents;
  if (!none.empty()) shape.erase(std::remove(shape.begin(), shape.end(), 1), shape.end());
  while (shape.size() > region.unit.size() && shape.front() == 1) shape.erase(shape.begin());
  PADDLE_ENFORCE_LE(shape.size(), region.unit.size(),
                    common::errors::Unimplemented("rehearsal: set_value of a value with more axes than the target"));
  const Extents reduced = broadcast_strides(shape, region.unit);
  Extents strides(region.extents.size(), 0);
  std::vector<bool> gone(region.extents.size(), false);
  for (int64_t axis : decreased) gone[axis_of(axis, gone.size())] = true;
  for (size_t i = 0, k = 0; i < strides.size(); ++i) {
    if (!gone[i]) strides[i] = reduced[k++];
  }
  launch(context, [=] {
    if (at != from) memcpy(at, from, bytes);
    const char* source = value();
    each_run(region.extents, {region.strides, strides}, [&](const int64_t* offset, int64_t length) {
      for (int64_t i = 0; i < length; ++i) {
        memcpy(at + (region.begin + offset[0] + i * run_stride(region.strides)) * static_cast<int64_t>(width),
               source + (offset[1] + i * run_stride(strides)) * static_cast<int64_t>(width), width);
      }
    });
  });
}

void SetValueWithTensor(const CustomContext& context, const DenseTensor& x, const DenseTensor& value,
                        const phi::IntArray& starts, const phi::IntArray& ends, const phi::IntArray& steps,
                        const std::vector<int64_t>& axes, const std::vector<int64_t>& decreased,
                        const std::vector<int64_t>& none, DenseTensor* out) {
  const Region region(x, starts.GetData(), ends.GetData(), steps.GetData(), axes, decreased);
  const char* from = value.numel() ? reached(value.data(), value.numel() * phi::SizeOf(value.dtype())) : nullptr;
  set_region(context, x, region, decreased, none, list(value.dims()), [from] { return from; }, out);
}

void SetValue(const CustomContext& context, const DenseTensor& x, const phi::IntArray& starts, const phi::IntArray& ends,
              const phi::IntArray& steps, const std::vector<int64_t>& axes, const std::vector<int64_t>& decreased,
              const std::vector<int64_t>& none, const std::vector<int64_t>& shape,
              const std::vector<phi::Scalar>& values, DenseTensor* out) {
  const Region region(x, starts.GetData(), ends.GetData(), steps.GetData(), axes, decreased);
  // Paddle's Python hands no values over where it does not know the data type (float8).
  PADDLE_ENFORCE_EQ(static_cast<int64_t>(values.size()), product(shape),
                    common::errors::Unimplemented("rehearsal: set_value without values"));
  auto held = std::make_shared<std::vector<char>>();
  by_type(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    held->resize(values.size() * sizeof(T));
    for (size_t i = 0; i < values.size(); ++i) reinterpret_cast<T*>(held->data())[i] = values[i].to<T>();
  });
  set_region(context, x, region, decreased, none, shape, [held] { return held->data(); }, out);
}

void Numel(const CustomContext& context, const DenseTensor& x, DenseTensor* out) {
  auto* at = output<int64_t>(context, out);
  launch(context, [at, count = x.numel()] { *at = count; });
}

// start, end and step as tensors, which Paddle's Python makes on the host.
void ArangeTensor(const CustomContext& context, const DenseTensor& start, const DenseTensor& end,
                  const DenseTensor& step, DenseTensor* out) {
  Arange(context, phi::Scalar(start), phi::Scalar(end), phi::Scalar(step), out);
}

void on_host(const phi::KernelKey&, phi::Kernel* kernel) {
  for (size_t i = 0; i < 3; ++i) kernel->InputAt(i).SetBackend(phi::Backend::CPU);
}

void any_backend(const phi::KernelKey&, phi::Kernel* kernel) {
  kernel->InputAt(0).SetBackend(phi::Backend::ALL_BACKEND);  // only its meta data are read
}

const Registered<&Contiguous> contiguous("contiguous", {REHEARSAL_ALL});
const Registered<&StridedCopy> strided_copy("strided_copy", {REHEARSAL_ALL});
const Registered<&Assign> assign("assign", {REHEARSAL_ALL});
const Registered<&Identity> identity("c_identity", {DataType::BFLOAT16});
const Registered<&Full> full("full", {REHEARSAL_ALL});
const Registered<&FullLike> full_like("full_like", {REHEARSAL_ALL}, any_backend);
const Registered<&Fill> fill_in_place("fill", {REHEARSAL_ALL});
const Registered<&AssignValue> assign_value("assign_value", {REHEARSAL_ALL});
const Registered<&Arange> arange("arange", {DataType::INT32, DataType::INT64, REHEARSAL_FLOATS});
const Registered<&ArangeTensor> arange_tensor("arange_tensor", {DataType::INT32, DataType::INT64, REHEARSAL_FLOATS},
                                              on_host);
const Registered<&SetValue> set_value("set_value", {REHEARSAL_ALL});
const Registered<&SetValueWithTensor> set_value_with_tensor("set_value_with_tensor", {REHEARSAL_ALL});
const Registered<&Numel> numel("numel", {REHEARSAL_ALL}, any_backend);
const Registered<&Cast> cast("cast", {REHEARSAL_ALL});
const Registered<&Concat> concat("concat", {REHEARSAL_ALL});
const Registered<&Split> split("split", {REHEARSAL_ALL});
const Registered<&SplitWithNum> split_with_num("split_with_num", {REHEARSAL_ALL});
const Registered<&Stack> stack("stack", {REHEARSAL_ALL});
const Registered<&Gather> gather("gather", {REHEARSAL_ALL});
const Registered<&IndexSelect> index_select("index_select", {REHEARSAL_ALL});
const Registered<&Expand> expand("expand", {REHEARSAL_ALL});
const Registered<&Transpose> transpose("transpose", {REHEARSAL_ALL});

}  // namespace
}  // namespace rehearsal
