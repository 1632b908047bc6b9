// combine on a GPU. The protocol is in csrc/transport/fence.h and fence.cuh, the cut into blocks in launch.h.
//
// Block (group, piece) of a rank, tokens t of its group, bytes of its piece:
//   1. puts its bytes of every partial it holds for token t of a peer into that peer's landing slot [t, index of this
//      rank among the token's targets]; releases its flag to every peer;
//   2. awaits the flags of the same block of every peer;
//   3. sums its bytes of its own tokens, partials of other ranks from the own landing, its own from expert_output.
// The sum is taken in float32 (float64 for float64 rows) over the targets in the order of their first appearance in
// the top-k, starting from the first partial, and rounded once, as csrc/cpu/combine.cpp does it. A rank without peers
// needs none of this: combine_alone_kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/launch.h"
#include "csrc/limits.h"
#include "csrc/transport/fence.cuh"

namespace moe_ep::cuda {
namespace {

constexpr int kTile = 1024;  // (source, token) pairs, or (token, target) pairs, looked at together

struct CombineParams {
  DeviceComm comm;
  CombineArgs args;
  Plan plan;
  bool masked;  // the communicator has rank masks
};

struct CombineShared {
  FenceShared fence;
  int32_t count;
  const char* source[kTile];
  char* target[kTile];
  const char* partial[kTile];  // [token, target] of the sum, null where there is none
};

__device__ __forceinline__ float to_sum(float x) { return x; }
__device__ __forceinline__ double to_sum(double x) { return x; }
__device__ __forceinline__ float to_sum(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_sum(__half x) { return __half2float(x); }
__device__ __forceinline__ void round_to(float& out, float x) { out = x; }
__device__ __forceinline__ void round_to(double& out, double x) { out = x; }
__device__ __forceinline__ void round_to(__nv_bfloat16& out, float x) { out = __float2bfloat16_rn(x); }
__device__ __forceinline__ void round_to(__half& out, float x) { out = __float2half_rn(x); }

// The sum of units of T, in the order of add(), starting from the first; zeros without any.
template <class T, int BYTES>
class RunningSum {
 public:
  __device__ void add(const Unit<BYTES>& unit) {
    const T* x = reinterpret_cast<const T*>(&unit);
#pragma unroll
    for (int e = 0; e < kElements; ++e) sums_[e] = any_ ? sums_[e] + to_sum(x[e]) : to_sum(x[e]);
    any_ = true;
  }
  __device__ Unit<BYTES> rounded() const {
    Unit<BYTES> out{};
    T* y = reinterpret_cast<T*>(&out);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (any_) round_to(y[e], sums_[e]);
    }
    return out;
  }

 private:
  static constexpr int kElements = BYTES / static_cast<int>(sizeof(T));
  decltype(to_sum(T{})) sums_[kElements];
  bool any_ = false;
};

template <class T, int BYTES, bool MASK>
class CombineBlock {
 public:
  __device__ CombineBlock(const CombineParams& p, CombineShared& shared)
      : a_(p.args),
        c_(p.comm),
        shared_(shared),
        fence_(p.comm, OpKind::kCombine, p.args.mask, shared.fence),
        group_(divide(static_cast<int32_t>(blockIdx.x), p.plan.pieces)),
        groups_(p.plan.groups),
        descending_(p.plan.descending),
        first_byte_((static_cast<int32_t>(blockIdx.x) - group_ * p.plan.pieces) * p.plan.piece_bytes) {
    const int64_t left = a_.expert_output.bytes - first_byte_;
    units_ = static_cast<int32_t>((left < 0 ? 0 : left < p.plan.piece_bytes ? left : p.plan.piece_bytes) / BYTES);
  }

  __device__ void run() {
    StepHeader header{};
    header.tokens = a_.num_tokens;
    header.tokens_per_rank = a_.tokens_per_rank;
    header.top_k = a_.max_targets;
    header.hidden_bytes = a_.expert_output.bytes;
    if (blockIdx.x == 0 && a_.tokens_per_rank > 0) header.dispatch_round = a_.routing[0];
    put();
    fence_.put_header(header);
    fence_.signal(a_.num_tokens);
    list_partials(0);  // while the flags travel
    fence_.await(static_cast<int32_t>(blockIdx.x), header);
    launch_dependents();
    if (a_.max_targets <= 2) {
      reduce<2, 6>();
    } else if (a_.max_targets <= 4) {
      reduce<4, 3>();
    } else {
      reduce<8, 1>();
    }
    fence_.check_headers(header);
    fence_.end();
  }

 private:
  __device__ int32_t share_of(int32_t n) const { return n > group_ ? divide(n - group_ + groups_ - 1, groups_) : 0; }
  // The i-th of the first n tokens of the group that this kernel takes. From the last to the first where the plan says
  // so: what the kernels before wrote last is what the cache still holds.
  __device__ int32_t token(int32_t i, int32_t n) const {
    return group_ + (descending_ ? share_of(n) - 1 - i : i) * groups_;
  }
  __device__ const char* partial_of(int32_t source, int32_t t) const {
    return a_.expert_output.data + (static_cast<int64_t>(source) * a_.tokens_per_rank + t) * a_.expert_output.stride +
           first_byte_;
  }

  __device__ void put() {
    const int32_t tokens = share_of(a_.tokens_per_rank);
    const int32_t pairs = (c_.ep_size - 1) * tokens;
    int32_t begin = 0;
    do {
      if (begin > 0) __syncthreads();  // the list of the tile before has been read
      if (threadIdx.x == 0) shared_.count = 0;
      __syncthreads();
      const int32_t end = pairs - begin < kTile ? pairs : begin + kTile;
      for (int32_t q = begin + static_cast<int32_t>(threadIdx.x); q < end; q += static_cast<int32_t>(blockDim.x)) {
        const int32_t nth = divide(q, tokens), t = token(q - nth * tokens, a_.tokens_per_rank);
        const int32_t next = c_.rank + 1 + nth, source = next < c_.ep_size ? next : next - c_.ep_size;
        const int32_t slot = a_.routing[static_cast<int64_t>(1 + source) * a_.tokens_per_rank + t];
        if (slot < 0 || slot >= a_.max_targets || !fence_.is_peer(source)) continue;
        const int32_t at = atomicAdd(&shared_.count, 1);
        shared_.source[at] = partial_of(source, t);
        shared_.target[at] = fence_.window(source).landing(c_.offsets, c_.shape, t, slot) + first_byte_;
      }
      __syncthreads();
      copy_rows<BYTES, 8>(
          shared_.count, units_, [&](int32_t i) { return shared_.source[i]; },
          [&](int32_t i) { return shared_.target[i]; },
          [&] {
            if (begin == 0) fence_.await_reuse();
          });
      begin += kTile;
    } while (begin < pairs);
  }

  // Tokens of a tile of the sum: their partials fill the list.
  __device__ int32_t tile_tokens() const { return divide(kTile, a_.max_targets); }

  __device__ void list_partials(int32_t begin) {
    const int32_t tokens = share_of(a_.num_tokens), targets = a_.max_targets;
    const int32_t n = tokens - begin < tile_tokens() ? tokens - begin : tile_tokens();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < n * targets; i += static_cast<int32_t>(blockDim.x)) {
      const int32_t nth = divide(i, targets), j = i - nth * targets;
      const int32_t t = token(begin + nth, a_.num_tokens);
      const int32_t rank = a_.routing[static_cast<int64_t>(1 + c_.ep_size + j) * a_.tokens_per_rank + t];
      const bool counts = rank >= 0 && rank < c_.ep_size && fence_.is_active(rank) && fence_.is_active(c_.rank);
      shared_.partial[i] = !counts           ? nullptr
                           : rank == c_.rank ? partial_of(rank, t)
                                             : fence_.own().landing(c_.offsets, c_.shape, t, j) + first_byte_;
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
    Unit<BYTES> values[U][J];
    int32_t row[U], unit[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      row[u] = walk.row;
      unit[u] = walk.unit;
      walk.advance();
    }
    unsigned present[U];
#pragma unroll
    for (int u = 0; u < U; ++u) present[u] = row[u] < n ? load_partials<J>(values[u], row[u], unit[u], 0, targets) : 0;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (row[u] >= n) continue;
      RunningSum<T, BYTES> sum;
      for (int32_t first = 0;;) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
          if (present[u] >> j & 1) sum.add(values[u][j]);
        }
        first += J;
        if (first >= targets) break;
        present[u] = load_partials<J>(values[u], row[u], unit[u], first, targets);
      }
      char* to = a_.out + token(begin + row[u], a_.num_tokens) * a_.out_stride + first_byte_;
      reinterpret_cast<Unit<BYTES>*>(to)[unit[u]] = sum.rounded();
    }
  }

  // Loads partials first, ..., first + J - 1 of a token; bit j of the result: the j-th is there.
  template <int J>
  __device__ unsigned load_partials(Unit<BYTES>* values, int32_t row, int32_t unit, int32_t first, int32_t targets) {
    const char* from[J];
    unsigned present = 0;
#pragma unroll
    for (int j = 0; j < J; ++j) {
      from[j] = first + j < targets ? shared_.partial[row * targets + first + j] : nullptr;
      present |= (from[j] != nullptr ? 1u : 0u) << j;
    }
#pragma unroll
    for (int j = 0; j < J; ++j) {
      if (from[j] != nullptr) values[j] = load(reinterpret_cast<const Unit<BYTES>*>(from[j]) + unit);
    }
    return present;
  }

  const CombineArgs& a_;
  const DeviceComm& c_;
  CombineShared& shared_;
  DeviceFence<MASK> fence_;
  const int32_t group_, groups_;
  const bool descending_;
  const int64_t first_byte_;
  int32_t units_;
};

template <class T, int BYTES, bool MASK>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineParams p) {
  __shared__ CombineShared shared;
  wait_for_predecessor();
  CombineBlock<T, BYTES, MASK>(p, shared).run();
}

// One rank, one block per token: the row is loaded beside the word that says whether it counts.
template <class T, int BYTES>
__global__ void __launch_bounds__(kAloneThreads) combine_alone_kernel(const __grid_constant__ CombineParams p) {
  const CombineArgs& a = p.args;
  const int32_t t = static_cast<int32_t>(p.plan.descending ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  wait_for_predecessor();
  launch_dependents();
  if (t == 0 && threadIdx.x == 0) atomicAdd(&p.comm.state->ticket, kTicket);
  if (t >= a.num_tokens) return;
  const bool active = !p.masked || ((a.mask.given ? a.mask.words[0] : p.comm.state->active[0]) & 1) != 0;
  const int32_t target = a.routing[2 * static_cast<int64_t>(a.tokens_per_rank) + t];
  const auto* from = reinterpret_cast<const Unit<BYTES>*>(a.expert_output.data + t * a.expert_output.stride);
  auto* to = reinterpret_cast<Unit<BYTES>*>(a.out + t * a.out_stride);
  const int32_t units = static_cast<int32_t>(a.expert_output.bytes / BYTES), step = static_cast<int32_t>(blockDim.x);
  for (int32_t base = static_cast<int32_t>(threadIdx.x); base < units; base += 4 * step) {
    Unit<BYTES> value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i * step < units) value[i] = load(from + base + i * step);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i * step >= units) continue;
      RunningSum<T, BYTES> sum;
      if (active && target == 0) sum.add(value[i]);
      to[base + i * step] = sum.rounded();
    }
  }
}

template <class T>
const void* alone_kernel_for(bool wide) {
  constexpr int kOne = static_cast<int>(sizeof(T));
  return wide ? reinterpret_cast<const void*>(combine_alone_kernel<T, 16>)
              : reinterpret_cast<const void*>(combine_alone_kernel<T, kOne>);
}

const void* alone_kernel_of(ElementType type, bool wide) {
  switch (type) {
    case ElementType::kBFloat16: return alone_kernel_for<__nv_bfloat16>(wide);
    case ElementType::kFloat16: return alone_kernel_for<__half>(wide);
    case ElementType::kFloat32: return alone_kernel_for<float>(wide);
    case ElementType::kFloat64: return alone_kernel_for<double>(wide);
  }
  return nullptr;
}

template <class T>
const void* kernel_for(bool wide, bool mask) {
  constexpr int kOne = static_cast<int>(sizeof(T));
  if (wide) {
    return mask ? reinterpret_cast<const void*>(combine_kernel<T, 16, true>)
                : reinterpret_cast<const void*>(combine_kernel<T, 16, false>);
  }
  return mask ? reinterpret_cast<const void*>(combine_kernel<T, kOne, true>)
              : reinterpret_cast<const void*>(combine_kernel<T, kOne, false>);
}

const void* kernel_of(ElementType type, bool wide, bool mask) {
  switch (type) {
    case ElementType::kBFloat16: return kernel_for<__nv_bfloat16>(wide, mask);
    case ElementType::kFloat16: return kernel_for<__half>(wide, mask);
    case ElementType::kFloat32: return kernel_for<float>(wide, mask);
    case ElementType::kFloat64: return kernel_for<double>(wide, mask);
  }
  return nullptr;
}

}  // namespace

constexpr ElementType kElementTypes[] = {ElementType::kBFloat16, ElementType::kFloat16, ElementType::kFloat32,
                                         ElementType::kFloat64};

std::vector<const void*> combine_alone_kernels() {
  std::vector<const void*> all;
  for (const ElementType type : kElementTypes) {
    for (const bool wide : {false, true}) all.push_back(alone_kernel_of(type, wide));
  }
  return all;
}

std::vector<const void*> combine_kernels() {
  std::vector<const void*> all;
  for (const ElementType type : kElementTypes) {
    for (const bool wide : {false, true}) {
      for (const bool mask : {false, true}) all.push_back(kernel_of(type, wide, mask));
    }
  }
  return all;
}

void combine(Communicator& comm, const CombineArgs& args, void* stream) {
  check_fits(comm, args);
  DeviceEnd& end = *comm.device_end();
  end.raise_failure(comm, OpKind::kCombine);
  const bool mask = comm.options().enable_rank_mask;
  CombineParams p{end.comm(comm, args.timeout_sec), args, end.plan(args.tokens_per_rank, args.expert_output.bytes), mask};
  const bool wide = alignment_of({reinterpret_cast<int64_t>(args.expert_output.data), args.expert_output.stride,
                                  args.expert_output.bytes, reinterpret_cast<int64_t>(args.out), args.out_stride}) == 16;
  if (comm.ep_size() == 1) {
    const int64_t units = args.expert_output.bytes / (wide ? 16 : args.expert_output.bytes / args.hidden_size);
    launch(alone_kernel_of(args.element_type, wide), std::max(1, args.num_tokens), alone_threads(units), &p, end.pdl,
           stream, "combine");
    return;
  }
  const void* kernel = kernel_of(args.element_type, wide, mask);
  launch(kernel, p.plan.blocks(), p.plan.threads, &p, end.pdl, stream, "combine");
}

}  // namespace moe_ep::cuda
