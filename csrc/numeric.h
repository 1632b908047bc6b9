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

// FP8 e4m3 (no infinity, NaN is 0x7F, largest 448), saturating; infinities become NaN so that they are not lost.
struct Float8 {
  uint8_t bits;
};

inline Float8 to_float8(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = u >> 24 & 0x80u, a = u & 0x7FFFFFFFu;
  if (a >= 0x7F800000u) return {0x7F};
  // Below 2^-6 the codes are multiples of 2^-9: adding 2^14 aligns the fraction so that the float addition rounds.
  const uint32_t tiny = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 16384.0f) - 0x46800000u;
  const uint32_t normal = ((a + 0x7FFFFu + (a >> 20 & 1u)) >> 20) - (120u << 3);
  const uint32_t magnitude = a < 0x3C800000u ? tiny : normal < 0x7Eu ? normal : 0x7Eu;
  return {static_cast<uint8_t>(sign | magnitude)};
}

inline float to_float(Float8 x) {
  // Shift exponent and fraction into place, then scale by 2^120 (exact; also normalises subnormals).
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24, rest = x.bits & 0x7Fu;
  if (rest == 0x7Fu) return std::bit_cast<float>(0x7FFFFFFFu);
  const float magnitude = std::bit_cast<float>(rest << 20) * std::bit_cast<float>(0x7B800000u);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

}  // namespace moe_ep
