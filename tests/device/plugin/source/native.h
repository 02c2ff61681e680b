// Kernels of the device's own, for what the library's device path does. False: there is none for this, and the work is
// handed to launch(). The simulated runtime has none, since its launch() is no other.
//
// This file is compiled by nvcc as well, so it knows nothing of Paddle.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace rehearsal {

class Stream;

namespace native {

using Extents = std::vector<int64_t>;
enum class Type { kBool, kUint8, kInt8, kInt16, kInt32, kInt64, kFloat16, kBfloat16, kFloat32, kFloat64, kOther };
struct Rows {  // `count` stretches of `bytes`, each pitch after the one before
  char* to;
  const char* from;
  size_t bytes, to_pitch, from_pitch;
};
enum class Combination { kNone, kAdd, kMultiply };

// Element k in row-major order goes from one layout to the other. Strides count elements.
bool move(Stream* stream, size_t width, void* to, const Extents& to_extents, const Extents& to_strides, const void* from,
          const Extents& from_extents, const Extents& from_strides);
bool fill(Stream* stream, size_t width, void* to, size_t count, const void* element);
bool copy_rows(Stream* stream, size_t count, const std::vector<Rows>& parts);
bool cast(Stream* stream, Type to_type, void* to, Type from_type, const void* from, size_t count);
// Of integers; the strides are those of the operands along `extents`.
bool combine(Stream* stream, Combination how, Type type, void* to, const Extents& extents, const void* a,
             const Extents& a_strides, const void* b, const Extents& b_strides);
// Of integers, into int64; `strides` are those of the result along `extents`, zero where axes are summed.
bool sum(Stream* stream, Type type, const void* from, const Extents& extents, void* to, size_t count,
         const Extents& strides);

}  // namespace native

}  // namespace rehearsal
