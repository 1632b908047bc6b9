// combine between processes of one host: the protocol is in csrc/transport/fence.h.
//
// The sum of a token is taken in float32 (float64 for float64 rows), over its targets in the order of their first
// appearance in the top-k, starting from the first partial, and rounded once: any two columns or transports that
// follow this order agree bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "csrc/fp8.h"
#include "csrc/limits.h"
#include "csrc/numeric.h"
#include "csrc/transport/fence.h"

namespace moe_ep::cpu {
namespace {

template <class T>
struct Codec;
template <>
struct Codec<float> {
  using Sum = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};
template <>
struct Codec<double> {
  using Sum = double;
  static double load(double x) { return x; }
  static double store(double x) { return x; }
};
template <>
struct Codec<BFloat16> {
  using Sum = float;
  static float load(BFloat16 x) { return to_float(x); }
  static BFloat16 store(float x) { return to_bfloat16(x); }
};
template <>
struct Codec<Float16> {
  using Sum = float;
  static float load(Float16 x) { return to_float(x); }
  static Float16 store(float x) { return to_float16(x); }
};

// Vectorised for the machine at hand; the float operations and their order are the same in every clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MOE_EP_CLONES __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define MOE_EP_CLONES
#endif

constexpr int64_t kBlock = 512;  // elements summed at a time, in cache

template <class T>
inline __attribute__((always_inline)) void sum_rows(const char* const* partials, int32_t count, int64_t size,
                                                    char* out) {
  using Sum = typename Codec<T>::Sum;
  Sum sums[kBlock];
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t n = std::min(kBlock, size - begin);
    for (int32_t j = 0; j < count; ++j) {
      const T* row = reinterpret_cast<const T*>(partials[j]) + begin;
      if (j == 0) {
        for (int64_t i = 0; i < n; ++i) sums[i] = Codec<T>::load(row[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) sums[i] += Codec<T>::load(row[i]);
      }
    }
    T* to = reinterpret_cast<T*>(out) + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = Codec<T>::store(sums[i]);
  }
}

MOE_EP_CLONES void sum_bfloat16(const char* const* partials, int32_t count, int64_t size, char* out) {
  sum_rows<BFloat16>(partials, count, size, out);
}
MOE_EP_CLONES void sum_float16(const char* const* partials, int32_t count, int64_t size, char* out) {
  sum_rows<Float16>(partials, count, size, out);
}
MOE_EP_CLONES void sum_float32(const char* const* partials, int32_t count, int64_t size, char* out) {
  sum_rows<float>(partials, count, size, out);
}
MOE_EP_CLONES void sum_float64(const char* const* partials, int32_t count, int64_t size, char* out) {
  sum_rows<double>(partials, count, size, out);
}

using SumFunction = void (*)(const char* const*, int32_t, int64_t, char*);

SumFunction sum_function(ElementType type) {
  switch (type) {
    case ElementType::kBFloat16: return sum_bfloat16;
    case ElementType::kFloat16: return sum_float16;
    case ElementType::kFloat32: return sum_float32;
    case ElementType::kFloat64: return sum_float64;
  }
  return nullptr;
}

// FP8 on the wire. Blocks of kFp8Block elements; the multiplication and the addition round apart, as on the GPU.
template <class T>
void encode_fp8(const char* from, int64_t size, bool plain, char* to) {
  const T* x = reinterpret_cast<const T*>(from);
  auto* codes = reinterpret_cast<Float8*>(to);
  auto* scales = reinterpret_cast<float*>(to + fp8_scales_offset(size));
  for (int64_t begin = 0; begin < size; begin += kFp8Block) {
    const int64_t end = std::min<int64_t>(size, begin + kFp8Block);
    float amax = 0;
    for (int64_t i = begin; i < end && !plain; ++i) {
      const float magnitude = std::fabs(Codec<T>::load(x[i]));
      if (std::isfinite(magnitude)) amax = std::max(amax, magnitude);
    }
    const Fp8Scale scale(amax);
    for (int64_t i = begin; i < end; ++i) codes[i] = to_float8(Codec<T>::load(x[i]) * scale.inverse);
    scales[begin / kFp8Block] = scale.scale;
  }
}

// As sum_rows, where partials[own] is a row of T and the others have travelled as FP8.
template <class T>
void sum_fp8(const char* const* partials, int32_t count, int32_t own, int64_t size, char* out) {
  for (int64_t i = 0; i < size; ++i) {
    float sum = 0;
    for (int32_t j = 0; j < count; ++j) {
      float term;
      if (j == own) {
        term = Codec<T>::load(reinterpret_cast<const T*>(partials[j])[i]);
      } else {
        const auto* scales = reinterpret_cast<const float*>(partials[j] + fp8_scales_offset(size));
        term = to_float(reinterpret_cast<const Float8*>(partials[j])[i]) * scales[i / kFp8Block];
      }
      sum = j == 0 ? term : sum + term;
    }
    reinterpret_cast<T*>(out)[i] = Codec<T>::store(sum);
  }
}

void encode_fp8(ElementType type, const char* from, int64_t size, bool plain, char* to) {
  switch (type) {
    case ElementType::kBFloat16: return encode_fp8<BFloat16>(from, size, plain, to);
    case ElementType::kFloat16: return encode_fp8<Float16>(from, size, plain, to);
    default: return encode_fp8<float>(from, size, plain, to);
  }
}

void sum_fp8(ElementType type, const char* const* partials, int32_t count, int32_t own, int64_t size, char* out) {
  switch (type) {
    case ElementType::kBFloat16: return sum_fp8<BFloat16>(partials, count, own, size, out);
    case ElementType::kFloat16: return sum_fp8<Float16>(partials, count, own, size, out);
    default: return sum_fp8<float>(partials, count, own, size, out);
  }
}

// The partial for token t of rank `src`.
const char* partial_of(const CombineArgs& a, int32_t src, int32_t t) {
  return a.expert_output.data + (static_cast<int64_t>(src) * a.tokens_per_rank + t) * a.expert_output.stride;
}

// Steps 2 to 4.
void send(Communicator& comm, const CombineArgs& a, const StepHeader& header, HostFence& fence) {
  const WindowShape& shape = comm.shape();
  const Window::Offsets& offsets = comm.offsets();
  fence.delay(DelayPoint::kBeforePut);
  for (const int32_t peer : fence) {
    fence.await_reuse(peer);
    const Window window = comm.window(peer);
    const int32_t* slots = a.routing + static_cast<int64_t>(1 + peer) * a.tokens_per_rank;
    for (int32_t t = 0; t < a.tokens_per_rank; ++t) {
      if (slots[t] < 0 || slots[t] >= a.max_targets) continue;
      char* landing = window.landing(offsets, shape, t, slots[t]);
      if (shape.wire == CombineWire::kRows) {
        std::memcpy(landing, partial_of(a, peer, t), static_cast<size_t>(a.expert_output.bytes));
      } else {
        const bool plain = shape.wire == CombineWire::kFp8Plain;
        encode_fp8(a.element_type, partial_of(a, peer, t), a.hidden_size, plain, landing);
      }
    }
    fence.delay(DelayPoint::kBeforeFlag);
    fence.signal(peer, header);
  }
}

// Steps 5 and 6.
void take(Communicator& comm, const CombineArgs& a, const StepHeader& header, HostFence& fence) {
  const WindowShape& shape = comm.shape();
  const Window::Offsets& offsets = comm.offsets();
  const Window own = comm.window(comm.rank());
  const RankMask& mask = fence.mask();
  const int64_t row_bytes = a.expert_output.bytes;
  fence.wait_all(header, [](int32_t, const StepHeader&) {});
  fence.delay(DelayPoint::kAfterFlags);
  const int32_t* targets = a.routing + static_cast<int64_t>(1 + comm.ep_size()) * a.tokens_per_rank;
  const SumFunction sum = sum_function(a.element_type);
  const bool here = HostFence::is_active(mask, comm.rank());
  for (int32_t t = 0; t < a.num_tokens; ++t) {
    const char* partials[kMaxTopK];
    int32_t count = 0, own_at = -1;
    for (int32_t j = 0; j < a.max_targets && here; ++j) {
      const int32_t rank = targets[static_cast<int64_t>(j) * a.tokens_per_rank + t];
      if (rank < 0 || rank >= comm.ep_size() || !HostFence::is_active(mask, rank)) continue;
      if (rank == comm.rank()) own_at = count;
      partials[count++] = rank == comm.rank() ? partial_of(a, rank, t) : own.landing(offsets, shape, t, j);
    }
    char* out = a.out + t * a.out_stride;
    if (count > 0 && shape.wire != CombineWire::kRows) {
      sum_fp8(a.element_type, partials, count, own_at, a.hidden_size, out);
    } else if (count > 0) {
      sum(partials, count, a.hidden_size, out);
    } else {
      std::memset(out, 0, static_cast<size_t>(row_bytes));
    }
  }
}

}  // namespace

void combine(Communicator& comm, const CombineArgs& a) {
  check_fits(comm, a);
  const StepHeader header = step_header(a);
  HostFence fence(comm, OpKind::kCombine, a, header);
  if (a.phase != Phase::kWait) send(comm, a, header, fence);
  if (a.phase == Phase::kStart) return fence.leave_to_wait(header, a.pending);
  take(comm, a, header, fence);
}

}  // namespace moe_ep::cpu
