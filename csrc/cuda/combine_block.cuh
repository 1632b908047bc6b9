// combine on a GPU. The protocol is in csrc/transport/fence.h and fence.cuh, the cut into blocks in launch.h.
//
// Block (group, piece) of a rank, tokens t of its group, bytes of its piece:
//   1. puts its bytes of every partial it holds for token t of a peer into that peer's landing slot [t, index of this
//      rank among the token's targets]; releases its flag to every peer;
//   2. awaits the flags of the same block of every peer;
//   3. sums its bytes of its own tokens, partials of other ranks from the own landing, its own from expert_output.
#pragma once

#include <cuda_fp8.h>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/launch.h"
#include "csrc/cuda/sum.cuh"
#include "csrc/fp8.h"
#include "csrc/transport/fence.cuh"

namespace moe_ep::cuda {

struct CombineParams {
  DeviceComm comm;
  CombineArgs args;
  Plan plan;
  bool masked;          // the communicator has rank masks
  bool early;           // the next kernel's blocks may be launched while peers still run this round
  int32_t units;        // of a row, of what a thread handles at a time
  int32_t piece_units;  // of a piece
};

constexpr ElementType kElementTypes[] = {ElementType::kBFloat16, ElementType::kFloat16, ElementType::kFloat32,
                                         ElementType::kFloat64};
constexpr intptr_t kOwn = 1;  // addresses of rows are even

template <bool COUNTED>
struct CombineShared {
  static constexpr int kTile = COUNTED ? 512 : 1024;  // (source, token) or (token, target) pairs looked at together
  FenceShared fence;
  int32_t count;
  const char* source[kTile];
  char* target[kTile];                 // counted: the same place in the own window
  int16_t rank[COUNTED ? kTile : 1];   // counted: of the target
  const char* partial[kTile];  // [token, target] of the sum: a landing row, expert_output's row + kOwn, or null
};

// How partials travel. A wire knows what a thread handles at a time (a unit of kElements elements), how it is put into
// a landing row, loaded from one or from a row of expert_output, and added.
//
// Rows travel as they are: a unit is the widest that divides every address of the step.
template <class T, int BYTES>
struct RowWire {
  static constexpr int kBytes = BYTES;
  static constexpr int kElements = BYTES / static_cast<int>(sizeof(T));
  using Value = Unit<BYTES>;

  template <class Src, class Dst, class Before>
  static __device__ void put(const CombineArgs&, int32_t rows, int32_t first_unit, int32_t units, const Src& src_of,
                             const Dst& dst_of, const Before& before_store) {
    copy_rows<BYTES, 8>(
        rows, units, [&](int32_t i) { return src_of(i) + static_cast<int64_t>(first_unit) * BYTES; },
        [&](int32_t i) { return dst_of(i) + static_cast<int64_t>(first_unit) * BYTES; }, before_store);
  }
  static __device__ Value load_landing(const CombineArgs& a, const char* row, int32_t unit) {
    return load_row(a, row, unit);
  }
  static __device__ Value load_row(const CombineArgs&, const char* row, int32_t unit) {
    return load(reinterpret_cast<const Value*>(row) + unit);
  }
  static __device__ void add(RunningSum<T, kElements>& sum, const Value& value, bool) {
    const T* x = reinterpret_cast<const T*>(&value);
    sum.add([&](int e) { return to_sum(x[e]); });
  }
  static __device__ void store(const CombineArgs&, char* row, int32_t unit, const RunningSum<T, kElements>& sum) {
    Value out;
    T* y = reinterpret_cast<T*>(&out);
#pragma unroll
    for (int e = 0; e < kElements; ++e) y[e] = sum.rounded(e);
    reinterpret_cast<Value*>(row)[unit] = out;
  }
};

// FP8 (csrc/fp8.h): a unit is 4 elements, a warp holds a block of 128. WIDE: 4 elements are one aligned vector and
// divide H; otherwise they are loaded one by one.
template <class T, bool WIDE>
struct Fp8Wire {
  static constexpr int kElements = 4;
  struct Row4 {
    T x[4];
  };
  struct Codes4 {
    uint32_t codes;
    float scale;
  };
  union Value {
    Row4 row;
    Codes4 landed;
    __device__ Value() {}
  };

  static __device__ int32_t elements_of(const CombineArgs& a, int32_t unit) {
    const int64_t left = a.hidden_size - 4ll * unit;
    return left < 4 ? static_cast<int32_t>(left) : 4;
  }

  template <class Src, class Dst, class Before>
  static __device__ void put(const CombineArgs& a, int32_t rows, int32_t first_unit, int32_t units, const Src& src_of,
                             const Dst& dst_of, const Before& before_store) {
    before_store();
    const bool plain = a.plain_fp8;
    const int32_t padded = (units + 31) / 32 * 32;
    if (padded == 0) return;
    RowWalk walk(padded);  // the lanes of a warp stay in one block of one row
    while (walk.row < rows) {
      const int32_t unit = first_unit + walk.unit;
      const bool inside = walk.unit < units;
      Row4 value{};
      if (inside) value = load_row(a, src_of(walk.row), unit).row;
      float x[4], amax = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = inside && e < elements_of(a, unit) ? static_cast<float>(to_sum(value.x[e])) : 0.0f;
        if (isfinite(x[e])) amax = fmaxf(amax, fabsf(x[e]));
      }
#pragma unroll
      for (int delta = 16; delta > 0; delta /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, delta));
      const Fp8Scale scale(plain ? 0.0f : amax);
      uint32_t codes = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scaled = isfinite(x[e]) ? __fmul_rn(x[e], scale.inverse) : __int_as_float(0x7FFFFFFF);
        codes |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3)) << 8 * e;
      }
      char* landing = dst_of(walk.row);
      if (inside) {
        reinterpret_cast<uint32_t*>(landing)[unit] = codes;
        if (threadIdx.x % 32 == 0) {
          reinterpret_cast<float*>(landing + fp8_scales_offset(a.hidden_size))[unit / 32] = scale.scale;
        }
      }
      walk.advance();
    }
  }
  static __device__ Value load_landing(const CombineArgs& a, const char* row, int32_t unit) {
    Value v;
    v.landed.codes = load(reinterpret_cast<const Unit<4>*>(row) + unit).v;
    v.landed.scale =
        __uint_as_float(load(reinterpret_cast<const Unit<4>*>(row + fp8_scales_offset(a.hidden_size)) + unit / 32).v);
    return v;
  }
  static __device__ Value load_row(const CombineArgs& a, const char* row, int32_t unit) {
    Value v;
    const T* from = reinterpret_cast<const T*>(row) + 4ll * unit;
    if (WIDE) {
      const auto x = load(reinterpret_cast<const Unit<4 * sizeof(T)>*>(from));
      v.row = *reinterpret_cast<const Row4*>(&x);
    } else {
      for (int e = 0; e < elements_of(a, unit); ++e) v.row.x[e] = from[e];
    }
    return v;
  }
  static __device__ void add(RunningSum<T, kElements>& sum, const Value& value, bool landed) {
    if (landed) {
      sum.add([&](int e) {
        const auto code = static_cast<__nv_fp8_storage_t>(value.landed.codes >> 8 * e & 0xFF);
        return __fmul_rn(__half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))), value.landed.scale);
      });
    } else {
      sum.add([&](int e) { return to_sum(value.row.x[e]); });
    }
  }
  static __device__ void store(const CombineArgs& a, char* row, int32_t unit, const RunningSum<T, kElements>& sum) {
    T* to = reinterpret_cast<T*>(row) + 4ll * unit;
    if (WIDE) {
      Unit<4 * sizeof(T)> out;
      T* y = reinterpret_cast<T*>(&out);
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = sum.rounded(e);
      *reinterpret_cast<Unit<4 * sizeof(T)>*>(to) = out;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < elements_of(a, unit)) to[e] = sum.rounded(e);
      }
    }
  }
};

// Transport: DeviceFence, or DeviceCounted, which pushes partials that count themselves.
template <class T, class Wire, class Transport>
class CombineBlock {
 public:
  using Shared = CombineShared<Transport::kCounted>;

  __device__ CombineBlock(const CombineParams& p, Shared& shared, Transport& transport)
      : a_(p.args),
        c_(p.comm),
        shared_(shared),
        transport_(transport),
        group_(divide(static_cast<int32_t>(blockIdx.x), p.plan.pieces)),
        groups_(p.plan.groups),
        descending_(p.plan.descending),
        early_(p.early),
        first_unit_((static_cast<int32_t>(blockIdx.x) - group_ * p.plan.pieces) * p.piece_units) {
    const int32_t left = p.units - first_unit_;
    units_ = left < 0 ? 0 : left < p.piece_units ? left : p.piece_units;
  }

  // Step 1.
  __device__ void send(const StepHeader& header) {
    if constexpr (Transport::kCounted) {
      __syncthreads();
      transport_.await_reuse();
      count_partials();
      transport_.announce(static_cast<int64_t>(units_) * Wire::kBytes);
    } else {
      put([&] { transport_.await_reuse(); });
    }
    transport_.put_header(header);
    transport_.signal(a_.num_tokens);  // holds a barrier
    if constexpr (Transport::kCounted) {
      transport_.begin_puts();
      put([] {});
      if (early_) __syncthreads();
    }
  }

  // Steps 2 and 3.
  __device__ void take(const StepHeader& header) {
    list_partials(0);  // while the flags travel
    transport_.await(static_cast<int32_t>(blockIdx.x), header);
    if constexpr (Transport::kCounted) transport_.await_rows();
    if (!early_) launch_dependents();
    if (a_.max_targets <= 2) {
      reduce<2, 6>();
    } else if (a_.max_targets <= 4) {
      reduce<4, 3>();
    } else {
      reduce<8, 1>();
    }
    transport_.check_headers(header);
    if constexpr (Transport::kCounted) transport_.finish_puts();
  }

 private:
  __device__ int32_t share_of(int32_t n) const { return n > group_ ? divide(n - group_ + groups_ - 1, groups_) : 0; }
  // The i-th of the first n tokens of the group that this kernel takes. From the last to the first where the plan says
  // so: what the kernels before wrote last is what the cache still holds.
  __device__ int32_t token(int32_t i, int32_t n) const {
    return group_ + (descending_ ? share_of(n) - 1 - i : i) * groups_;
  }
  __device__ const char* partial_of(int32_t source, int32_t t) const {
    return a_.expert_output.data + (static_cast<int64_t>(source) * a_.tokens_per_rank + t) * a_.expert_output.stride;
  }

  // The q-th pair of a peer and one of its tokens in this group, and the landing slot of the partial for it; -1: none.
  struct Pair {
    int32_t source, t, slot;
  };
  __device__ Pair pair(int32_t q, int32_t tokens) const {
    const int32_t nth = divide(q, tokens), t = token(q - nth * tokens, a_.tokens_per_rank);
    const int32_t next = c_.rank + 1 + nth, source = next < c_.ep_size ? next : next - c_.ep_size;
    const int32_t slot = a_.routing[static_cast<int64_t>(1 + source) * a_.tokens_per_rank + t];
    return {source, t, slot < a_.max_targets && transport_.is_peer(source) ? slot : -1};
  }
  __device__ int32_t pairs() const { return (c_.ep_size - 1) * share_of(a_.tokens_per_rank); }

  __device__ void count_partials() {
    const int32_t tokens = share_of(a_.tokens_per_rank), n = pairs();
    for (int32_t q = static_cast<int32_t>(threadIdx.x); q < n; q += static_cast<int32_t>(blockDim.x)) {
      const Pair at = pair(q, tokens);
      if (at.slot >= 0) transport_.count_row(at.source);
    }
  }

  // `before_first_store` runs once, by every thread.
  template <class Before>
  __device__ void put(const Before& before_first_store) {
    const int32_t tokens = share_of(a_.tokens_per_rank), all = pairs();
    int32_t begin = 0;
    do {
      if (begin > 0) __syncthreads();  // the list of the tile before has been read
      if (threadIdx.x == 0) shared_.count = 0;
      __syncthreads();
      const int32_t end = all - begin < Shared::kTile ? all : begin + Shared::kTile;
      for (int32_t q = begin + static_cast<int32_t>(threadIdx.x); q < end; q += static_cast<int32_t>(blockDim.x)) {
        const Pair found = pair(q, tokens);
        if (found.slot < 0) continue;
        const int32_t at = atomicAdd(&shared_.count, 1);
        shared_.source[at] = partial_of(found.source, found.t);
        if constexpr (Transport::kCounted) shared_.rank[at] = static_cast<int16_t>(found.source);
        const Window window = Transport::kCounted ? transport_.own() : transport_.window(found.source);
        shared_.target[at] = window.landing(c_.offsets, c_.shape, found.t, found.slot);
      }
      __syncthreads();
      if constexpr (Transport::kCounted) {
        put_counted();
      } else {
        Wire::put(
            a_, shared_.count, first_unit_, units_, [&](int32_t i) { return shared_.source[i]; },
            [&](int32_t i) { return shared_.target[i]; },
            [&] {
              if (begin == 0) before_first_store();
            });
      }
      begin += Shared::kTile;
    } while (begin < all);
  }

  // Every chunk of every partial in the list, by one warp.
  __device__ void put_counted() {
    const int64_t bytes = static_cast<int64_t>(units_) * Wire::kBytes;
    const int64_t first_byte = static_cast<int64_t>(first_unit_) * Wire::kBytes;
    const int32_t warps = static_cast<int32_t>(blockDim.x) / 32, chunks = Transport::chunks_of(bytes);
    for (int32_t at = static_cast<int32_t>(threadIdx.x) / 32; at < shared_.count * chunks; at += warps) {
      const int32_t i = divide(at, chunks);
      const auto chunk = Transport::chunk(at - i * chunks, bytes);
      transport_.load_chunk(shared_.source[i] + first_byte, chunk);
      transport_.put_chunk(shared_.rank[i], shared_.target[i] - transport_.own().base + first_byte, chunk);
    }
  }

  // Tokens of a tile of the sum: their partials fill the list.
  __device__ int32_t tile_tokens() const { return divide(Shared::kTile, a_.max_targets); }

  __device__ void list_partials(int32_t begin) {
    const int32_t tokens = share_of(a_.num_tokens), targets = a_.max_targets;
    const int32_t n = tokens - begin < tile_tokens() ? tokens - begin : tile_tokens();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < n * targets; i += static_cast<int32_t>(blockDim.x)) {
      const int32_t nth = divide(i, targets), j = i - nth * targets;
      const int32_t t = token(begin + nth, a_.num_tokens);
      const int32_t rank = a_.routing[static_cast<int64_t>(1 + c_.ep_size + j) * a_.tokens_per_rank + t];
      const bool counts = rank >= 0 && rank < c_.ep_size && transport_.is_active(rank) && transport_.is_active(c_.rank);
      shared_.partial[i] = !counts           ? nullptr
                           : rank == c_.rank ? partial_of(rank, t) + kOwn
                                             : transport_.own().landing(c_.offsets, c_.shape, t, j);
    }
  }

  // J partials of each of U units are loaded before the first is added.
  template <int J, int U>
  __device__ void reduce() {
    const int32_t tokens = share_of(a_.num_tokens), tile = tile_tokens();
    for (int32_t begin = 0; begin < tokens; begin += tile) {
      if (begin > 0) {
        __syncthreads();
        list_partials(begin);
      }
      __syncthreads();
      const int32_t n = tokens - begin < tile ? tokens - begin : tile;
      RowWalk walk(units_ > 0 ? units_ : 1);
      while (walk.row < n && units_ > 0) sum_units<J, U>(walk, begin, n, a_.max_targets);
    }
  }

  template <int J, int U>
  __device__ void sum_units(RowWalk& walk, int32_t begin, int32_t n, int32_t targets) {
    typename Wire::Value values[U][J];
    int32_t row[U], unit[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      row[u] = walk.row;
      unit[u] = first_unit_ + walk.unit;
      walk.advance();
    }
    Loaded loaded[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row[u] < n) loaded[u] = load_partials<J>(values[u], row[u], unit[u], 0, targets);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row[u] >= n) continue;
      RunningSum<T, Wire::kElements> sum;
      for (int32_t first = 0;;) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
          if (loaded[u].present >> j & 1) Wire::add(sum, values[u][j], (loaded[u].landed >> j & 1) != 0);
        }
        first += J;
        if (first >= targets) break;
        loaded[u] = load_partials<J>(values[u], row[u], unit[u], first, targets);
      }
      Wire::store(a_, a_.out + token(begin + row[u], a_.num_tokens) * a_.out_stride, unit[u], sum);
    }
  }

  // Of partials first, ..., first + J - 1 of a token, bit j: whether the j-th is there, whether it has travelled.
  struct Loaded {
    unsigned present = 0, landed = 0;
  };
  template <int J>
  __device__ Loaded load_partials(typename Wire::Value* values, int32_t row, int32_t unit, int32_t first,
                                  int32_t targets) {
    const char* from[J];
    Loaded loaded;
#pragma unroll
    for (int j = 0; j < J; ++j) {
      from[j] = first + j < targets ? shared_.partial[row * targets + first + j] : nullptr;
      loaded.present |= (from[j] != nullptr ? 1u : 0u) << j;
      loaded.landed |= ((reinterpret_cast<intptr_t>(from[j]) & kOwn) == 0 ? 1u : 0u) << j;
    }
#pragma unroll
    for (int j = 0; j < J; ++j) {
      if (from[j] == nullptr) continue;
      values[j] =
          loaded.landed >> j & 1 ? Wire::load_landing(a_, from[j], unit) : Wire::load_row(a_, from[j] - kOwn, unit);
    }
    return loaded;
  }

  const CombineArgs& a_;
  const DeviceComm& c_;
  Shared& shared_;
  Transport& transport_;
  const int32_t group_, groups_;
  const bool descending_;
  const bool early_;
  const int32_t first_unit_;
  int32_t units_;
};

// The kernels over the fence transport: of the whole op, of its start, of its wait.
template <class T, class Wire, bool MASK, Phase PHASE>
__global__ void __launch_bounds__(kThreads, 2) combine_kernel(const __grid_constant__ CombineParams p) {
  using Block = CombineBlock<T, Wire, DeviceFence<MASK>>;
  __shared__ typename Block::Shared shared;
  DeviceFence<MASK> fence(p.comm, OpKind::kCombine, shared.fence);
  Block block(p, shared, fence);
  wait_for_predecessor();
  run_block<PHASE>(block, fence, p);
}

template <Phase PHASE, class T, class Wire>
const void* combine_kernel_on(bool mask) {
  return mask ? reinterpret_cast<const void*>(combine_kernel<T, Wire, true, PHASE>)
              : reinterpret_cast<const void*>(combine_kernel<T, Wire, false, PHASE>);
}

template <Phase PHASE, class T>
const void* combine_kernel_for(bool fp8, bool wide, bool mask) {
  if constexpr (sizeof(T) < 8) {
    if (fp8) {
      return wide ? combine_kernel_on<PHASE, T, Fp8Wire<T, true>>(mask)
                  : combine_kernel_on<PHASE, T, Fp8Wire<T, false>>(mask);
    }
  }
  constexpr int kOne = static_cast<int>(sizeof(T));
  return wide ? combine_kernel_on<PHASE, T, RowWire<T, 16>>(mask) : combine_kernel_on<PHASE, T, RowWire<T, kOne>>(mask);
}

template <Phase PHASE>
const void* combine_kernel_of(ElementType type, bool fp8, bool wide, bool mask) {
  // A start puts rows as bytes, whatever they hold.
  if (PHASE == Phase::kStart && !fp8 && wide) type = ElementType::kFloat32;
  switch (type) {
    case ElementType::kBFloat16: return combine_kernel_for<PHASE, __nv_bfloat16>(fp8, wide, mask);
    case ElementType::kFloat16: return combine_kernel_for<PHASE, __half>(fp8, wide, mask);
    case ElementType::kFloat32: return combine_kernel_for<PHASE, float>(fp8, wide, mask);
    case ElementType::kFloat64: return combine_kernel_for<PHASE, double>(fp8, wide, mask);
  }
  return nullptr;
}

template <Phase PHASE>
void add_combine_kernels(std::vector<const void*>& all) {
  for (const ElementType type : kElementTypes) {
    for (const bool fp8 : {false, true}) {
      for (const bool wide : {false, true}) {
        for (const bool mask : {false, true}) all.push_back(combine_kernel_of<PHASE>(type, fp8, wide, mask));
      }
    }
  }
}

}  // namespace moe_ep::cuda
