// Rounding to and from the 16-bit formats, bit for bit what the GPU's conversion instructions give: to nearest even,
// every NaN becomes 0x7FFF. Plain integer code, so that one definition serves any host.
#pragma once

#include <bit>
#include <cstdint>

namespace moe_ep {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline BFloat16 to_bfloat16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7FFFu + (u >> 16 & 1u)) >> 16;
  return {static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded)};
}

inline float to_float(Float16 x) {
  // Shift exponent and fraction into place, then scale by 2^112 (exact; also normalises subnormals). Inf and NaN
  // have the exponent 31 and need 2^143 - all ones - instead.
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7FFFu) << 13;
  const float finite = std::bit_cast<float>(rest) * std::bit_cast<float>(0x77800000u);
  const uint32_t magnitude = (x.bits & 0x7C00u) == 0x7C00u ? rest | 0x7F800000u : std::bit_cast<uint32_t>(finite);
  return std::bit_cast<float>(sign | magnitude);
}

inline Float16 to_float16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = u >> 16 & 0x8000u, a = u & 0x7FFFFFFFu;
  // Subnormal results: adding 0.5 aligns the fraction so that the float addition itself rounds to nearest even.
  const uint32_t tiny = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (a - 0x38000000u + 0xFFFu + (a >> 13 & 1u)) >> 13;
  const uint32_t magnitude = a < 0x38800000u ? tiny : a < 0x477FF000u ? normal : 0x7C00u;
  return {static_cast<uint16_t>(a > 0x7F800000u ? 0x7FFFu : sign | magnitude)};
}

}  // namespace moe_ep
