// FP8 partials on the wire: e4m3 codes with one float32 scale per block of elements.
#pragma once

#include <cstdint>

#include "csrc/routing.h"

namespace moe_ep {

constexpr int kFp8Block = 128;      // elements that share a scale
constexpr float kFp8Max = 448.0f;   // the largest e4m3 magnitude

constexpr MOE_EP_HD int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// A landing row: H codes, rounded up to 16 bytes, then the scales.
MOE_EP_HD int64_t fp8_scales_offset(int64_t hidden_size) { return round_up(hidden_size, 16); }
MOE_EP_HD int64_t fp8_row_bytes(int64_t hidden_size) {
  return fp8_scales_offset(hidden_size) + round_up((hidden_size + kFp8Block - 1) / kFp8Block * 4, 16);
}

// From the largest finite magnitude of a block: an element x travels as the code of x * inverse and counts as code *
// scale. A block of zeros, or of numbers too small or too large to divide by, travels as it is.
struct Fp8Scale {
  float scale = 1.0f, inverse = 1.0f;
  MOE_EP_HD explicit Fp8Scale(float amax) {
    constexpr float kSmallest = 1.17549435e-38f, kLargest = 3.40282347e38f;
    if (!(amax >= kSmallest * kFp8Max)) return;
    if (!(kFp8Max / amax >= kSmallest && kFp8Max / amax <= kLargest)) return;
    scale = amax / kFp8Max;
    inverse = kFp8Max / amax;
  }
};

}  // namespace moe_ep
