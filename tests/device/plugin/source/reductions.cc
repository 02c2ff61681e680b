// What collectives compute: sums, products and extremes of elements.
#include <cstring>

#include "mesh.h"

namespace rehearsal {
namespace {

struct Brain {  // bfloat16
  uint16_t bits;
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Brain(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
};

template <typename T, typename Wide>
void combine_as(const std::vector<const char*>& inputs, char* output, size_t count, C_CCLReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    Wide value = static_cast<Wide>(reinterpret_cast<const T*>(inputs[0])[i]);
    for (size_t k = 1; k < inputs.size(); ++k) {
      const Wide other = static_cast<Wide>(reinterpret_cast<const T*>(inputs[k])[i]);
      switch (op) {
        case MAX: value = value < other ? other : value; break;
        case MIN: value = other < value ? other : value; break;
        case PRODUCT: value = value * other; break;
        default: value = value + other;
      }
    }
    if (op == AVG) value = value / static_cast<Wide>(inputs.size());
    reinterpret_cast<T*>(output)[i] = static_cast<T>(value);
  }
}

}  // namespace

size_t width(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case UINT64: case INT64: case FLOAT64: case COMPLEX64: return 8;
    case COMPLEX128: return 16;
    default: return 0;
  }
}

bool combine(const std::vector<const char*>& inputs, char* output, size_t count, C_DataType type, C_CCLReduceOp op) {
  switch (type) {
    case BOOL: combine_as<bool, int>(inputs, output, count, op); return true;
    case UINT8: combine_as<uint8_t, uint8_t>(inputs, output, count, op); return true;
    case INT8: combine_as<int8_t, int8_t>(inputs, output, count, op); return true;
    case INT16: combine_as<int16_t, int16_t>(inputs, output, count, op); return true;
    case INT32: combine_as<int32_t, int32_t>(inputs, output, count, op); return true;
    case INT64: combine_as<int64_t, int64_t>(inputs, output, count, op); return true;
    case FLOAT16: combine_as<_Float16, float>(inputs, output, count, op); return true;
    case BFLOAT16: combine_as<Brain, float>(inputs, output, count, op); return true;
    case FLOAT32: combine_as<float, float>(inputs, output, count, op); return true;
    case FLOAT64: combine_as<double, double>(inputs, output, count, op); return true;
    default: return false;
  }
}

}  // namespace rehearsal
