// dispatch on a GPU. The protocol is in csrc/transport/fence.h and fence.cuh, the cut into blocks in launch.h.
//
// Block (group, piece) of a rank, tokens t of its group, bytes of its piece:
//   1. stages its bytes of its own rows in the own window; piece 0 puts the group's ids and weights at all peers;
//   2. releases its flag to every peer;
//   3. takes the own rows routed here from the input tensor, while the flags travel;
//   4. awaits the flags of the same block of every peer;
//   5. gets its bytes of the rows routed here straight from the peers' stages into the output.
// Example, W = 2, R = 4, 2 groups, 1 piece: block 0 of each rank handles tokens 0 and 2 of both ranks, block 1 tokens
// 1 and 3. Rank 0's block 1 may get rank 1's token 3 while rank 0's block 0 still waits for rank 1's block 0.
#pragma once

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/launch.h"
#include "csrc/cuda/targets.cuh"
#include "csrc/transport/fence.cuh"

namespace moe_ep::cuda {

constexpr int kDispatchTile = 1024;  // (source, token) pairs looked at together
constexpr int64_t kOwnFirstBytes = 12 * 1024;

struct DispatchParams {
  DeviceComm comm;
  DispatchArgs args;
  Plan plan;
  ExpertSplit split;
  bool masked;  // the communicator has rank masks
  bool early;   // the next kernel's blocks may be launched while peers still run this round
};

struct DispatchShared {
  FenceShared fence;
  int32_t count;                // rows in the list
  const char* source[kDispatchTile];    // of the row, piece applied
  int32_t row[kDispatchTile];           // of the output
};

// Transport: DeviceFence, or DeviceCounted, which pushes rows where the fence stages them and lets peers get them.
template <int BYTES, class Transport>
class DispatchBlock {
 public:
  __device__ DispatchBlock(const DispatchParams& p, DispatchShared& shared, Transport& transport)
      : a_(p.args),
        c_(p.comm),
        shared_(shared),
        transport_(transport),
        split_(p.split),
        group_(divide(static_cast<int32_t>(blockIdx.x), p.plan.pieces)),
        groups_(p.plan.groups),
        piece_(static_cast<int32_t>(blockIdx.x) - group_ * p.plan.pieces),
        pieces_(p.plan.pieces),
        first_byte_(piece_ * p.plan.piece_bytes),
        early_(p.early) {
    const int64_t left = a_.hidden.bytes - first_byte_;
    units_ = static_cast<int32_t>((left < 0 ? 0 : left < p.plan.piece_bytes ? left : p.plan.piece_bytes) / BYTES);
    own_tokens_ = share_of(a_.num_tokens);
    step_tokens_ = share_of(a_.tokens_per_rank);
  }

  // Steps 1 and 2.
  __device__ void send(const StepHeader& header) {
    stage_rows();
    transport_.put_header(header);
    if constexpr (Transport::kCounted) transport_.announce(static_cast<int64_t>(units_) * BYTES + own_scale_bytes());
    transport_.signal(a_.num_tokens);  // holds a barrier
    if constexpr (Transport::kCounted) put_rows();
  }

  // Steps 3 to 5.
  __device__ void take(const StepHeader& header) {
    if (threadIdx.x == 0) shared_.fence.tokens[c_.rank] = transport_.is_active(c_.rank) ? a_.num_tokens : 0;
    // Own rows while the flags travel, where they are worth a pass of their own.
    const bool own_first = static_cast<int64_t>(own_tokens_) * units_ * BYTES >= kOwnFirstBytes;
    for (int pass = own_first ? 0 : 1; pass < 2; ++pass) {
      if (pass == 1) {
        transport_.await(group_ * pieces_, header);
        if constexpr (Transport::kCounted) transport_.await_rows();
        if (!early_) launch_dependents();
      }
      receive(c_.rank + (own_first ? pass : 0), pass == 0 ? 1 : c_.ep_size - (own_first ? 1 : 0));
    }
    transport_.check_headers(header);
    gather_eplb();
    if constexpr (Transport::kCounted) transport_.finish_puts();
  }

 private:
  // Tokens of this block's group among the first n.
  __device__ int32_t share_of(int32_t n) const { return n > group_ ? divide(n - group_ + groups_ - 1, groups_) : 0; }
  __device__ int32_t token(int32_t i) const { return group_ + i * groups_; }

  __device__ int32_t own_id(int32_t t, int32_t k) const { return sanitised_id(a_, t, k); }

  // Own rows into the own window, and piece 0 the ids, weights and statistics of the group to all peers:
  // for that, warps form a team per peer, as far as they go.
  __device__ void stage_rows() {
    const Window own = transport_.own();
    const int32_t warps = static_cast<int32_t>(blockDim.x) / 32;
    const int32_t teams = c_.ep_size - 1 < warps ? c_.ep_size - 1 : warps;
    const int32_t team_size = divide(warps, teams) * 32;
    const int32_t team = divide(static_cast<int32_t>(threadIdx.x), team_size);
    const int32_t lane = static_cast<int32_t>(threadIdx.x) - team * team_size;
    // What a thread puts first is loaded together with the rows.
    const int32_t ids = own_tokens_ * a_.top_k;
    const bool puts = piece_ == 0 && team < teams;
    const bool words = weights_are_words();
    int32_t first_id = 0;
    uint32_t first_weight = 0;
    if (puts && lane < ids) {
      first_id = own_id_at(lane);
      if (words) first_weight = own_weight_at(lane);
    }
    if constexpr (Transport::kCounted) {
      __syncthreads();
      transport_.await_reuse();
      count_rows();
    } else {
      copy_rows<BYTES, 8>(
          own_tokens_, units_, [&](int32_t i) { return a_.hidden.data + token(i) * a_.hidden.stride + first_byte_; },
          [&](int32_t i) { return own.stage(c_.offsets, c_.shape, token(i)) + first_byte_; },
          [&] {
            __syncthreads();
            transport_.await_reuse();
          });
      if (own_scale_bytes() > 0) {
        const int64_t offset = round_up(a_.hidden.bytes, 16);
        copy_bytes(
            own_tokens_, a_.scale.bytes, static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x),
            [&](int32_t i) { return a_.scale.data + token(i) * a_.scale.stride; },
            [&](int32_t i) { return own.stage(c_.offsets, c_.shape, token(i)) + offset; });
      }
    }
    if (!puts) return;
    for (int32_t i = 1 + team; i < c_.ep_size; i += teams) {
      const int32_t p = c_.rank + i < c_.ep_size ? c_.rank + i : c_.rank + i - c_.ep_size;
      if (!transport_.is_peer(p)) continue;
      const Window window = transport_.window(p);
      int32_t* out_ids = window.ids(c_.offsets, c_.shape, c_.rank);
      char* out_weights = window.weights(c_.offsets, c_.shape, c_.rank);
      for (int32_t at = lane; at < ids; at += team_size) {
        const int32_t j = divide(at, a_.top_k);
        const int64_t to = static_cast<int64_t>(token(j)) * a_.top_k + (at - j * a_.top_k);
        out_ids[to] = at == lane ? first_id : own_id_at(at);
        if (words) reinterpret_cast<uint32_t*>(out_weights)[to] = at == lane ? first_weight : own_weight_at(at);
      }
      if (!words) {
        copy_bytes(
            own_tokens_, a_.weights.bytes, lane, team_size,
            [&](int32_t j) { return a_.weights.data + token(j) * a_.weights.stride; },
            [&](int32_t j) { return out_weights + token(j) * a_.weights.bytes; });
      }
      if (group_ != 0) continue;
      int32_t* stats = window.eplb(c_.offsets, c_.shape, c_.rank);
      for (int32_t j = lane; j < a_.num_eplb; j += team_size) stats[j] = a_.eplb[j];
    }
  }
  // Of a row, in this block's care: the last piece has them.
  __device__ int64_t own_scale_bytes() const { return piece_ == pieces_ - 1 ? a_.scale.bytes : 0; }

  // The ranks that own token t goes to, one per lane: -1 in all other lanes. By a whole warp.
  __device__ int32_t peer_of_lane(int32_t t) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const Targets found = find_targets(split_, lane < a_.top_k ? own_id(t, lane) : -1, lane, 32, c_.rank);
    return found.fresh && transport_.is_peer(found.rank) ? found.rank : -1;
  }
  __device__ void count_rows() {
    const int32_t warps = static_cast<int32_t>(blockDim.x) / 32;
    for (int32_t i = static_cast<int32_t>(threadIdx.x) / 32; i < own_tokens_; i += warps) {
      const int32_t rank = peer_of_lane(token(i));
      if (rank >= 0) transport_.count_row(rank);
    }
  }
  // Every chunk of every own row, by one warp, to all ranks that the token goes to.
  __device__ void put_rows() {
    transport_.begin_puts();
    const int32_t warps = static_cast<int32_t>(blockDim.x) / 32;
    const int64_t hidden_bytes = static_cast<int64_t>(units_) * BYTES, scale_bytes = own_scale_bytes();
    const int32_t chunks = Transport::chunks_of(hidden_bytes), all = chunks + Transport::chunks_of(scale_bytes);
    for (int32_t at = static_cast<int32_t>(threadIdx.x) / 32; at < own_tokens_ * all; at += warps) {
      const int32_t i = divide(at, all), nth = at - i * all, t = token(i);
      const int32_t rank = peer_of_lane(t);
      unsigned goes = __ballot_sync(0xFFFFFFFFu, rank >= 0);
      if (goes == 0) continue;
      const bool hidden = nth < chunks;
      const auto chunk = Transport::chunk(hidden ? nth : nth - chunks, hidden ? hidden_bytes : scale_bytes);
      transport_.load_chunk(
          hidden ? a_.hidden.data + t * a_.hidden.stride + first_byte_ : a_.scale.data + t * a_.scale.stride, chunk);
      const char* row = transport_.own().counted_row(c_.offsets, c_.shape, c_.rank, t);
      const int64_t offset = row - transport_.own().base + (hidden ? first_byte_ : a_.hidden.bytes);
      for (; goes != 0; goes &= goes - 1) {
        transport_.put_chunk(__shfl_sync(0xFFFFFFFFu, rank, __ffs(static_cast<int>(goes)) - 1), offset, chunk);
      }
    }
    if (early_) __syncthreads();
  }
  // Where the row of a peer's token is taken from.
  __device__ const char* row_of(int32_t source, int32_t t) const {
    if constexpr (Transport::kCounted) {
      return transport_.own().counted_row(c_.offsets, c_.shape, source, t);
    } else {
      return transport_.window(source).stage(c_.offsets, c_.shape, t);
    }
  }

  // The at-th id and weight of the group's own tokens, laid end to end.
  __device__ int32_t own_id_at(int32_t at) const {
    const int32_t j = divide(at, a_.top_k);
    return own_id(token(j), at - j * a_.top_k);
  }
  __device__ uint32_t own_weight_at(int32_t at) const {
    const int32_t j = divide(at, a_.top_k);
    const char* row = a_.weights.data + token(j) * a_.weights.stride;
    return reinterpret_cast<const uint32_t*>(row)[at - j * a_.top_k];
  }

  // Takes what sources first_source, ... (modulo W) hold for this rank: this block's tokens, this block's bytes.
  __device__ void receive(int32_t first_source, int32_t sources) {
    const int32_t pairs = sources * step_tokens_;
    for (int32_t begin = 0; begin < pairs; begin += kDispatchTile) {
      __syncthreads();  // the list of the tile before has been read, tokens[] is written
      if (threadIdx.x == 0) shared_.count = 0;
      __syncthreads();
      const int32_t end = pairs - begin < kDispatchTile ? pairs : begin + kDispatchTile;
      look_at(first_source, begin, end);
      __syncthreads();
      copy_rows<BYTES, 8>(
          shared_.count, units_, [&](int32_t i) { return shared_.source[i]; },
          [&](int32_t i) { return a_.out_hidden + shared_.row[i] * a_.hidden.bytes + first_byte_; }, [] {});
    }
  }

  // Pairs [begin, end), 8, 16 or 32 threads per pair, one per id: lists the rows that are routed here, and writes what
  // else a row consists of where it is this piece's turn. The next pair's id is on its way while one is looked at. One
  // copy of the code: in small steps fetching instructions costs more than running them.
  __device__ void look_at(int32_t first_source, int32_t begin, int32_t end) {
    const int32_t lanes = a_.top_k <= 8 ? 8 : a_.top_k <= 16 ? 16 : 32;
    const int32_t nth = static_cast<int32_t>(threadIdx.x) >> (lanes == 8 ? 3 : lanes == 16 ? 4 : 5);
    const int32_t k = static_cast<int32_t>(threadIdx.x) & (lanes - 1);
    const int32_t step = static_cast<int32_t>(blockDim.x) / lanes;
    Choice next = choice(first_source, begin + nth, end, k);
#pragma unroll 1
    for (int32_t base = begin; base < end; base += step) {
      const Choice now = next;
      next = choice(first_source, base + step + nth, end, k);
      look_at_pair(base + nth, now, k, lanes);
    }
  }

  // One of the K ids of a (source, token) pair and its weight.
  struct Choice {
    int32_t source = 0, t = -1;  // t < 0: no pair
    int32_t id = -1;
    uint32_t weight = 0;
  };
  __device__ Choice choice(int32_t first_source, int32_t q, int32_t end, int32_t k) const {
    Choice c;
    if (q >= end) return c;
    const int32_t nth = divide(q, step_tokens_);
    c.source = first_source + nth;
    if (c.source >= c_.ep_size) c.source -= c_.ep_size;
    c.t = token(q - nth * step_tokens_);
    if (k >= a_.top_k || c.t >= shared_.fence.tokens[c.source]) return c;
    const bool own = c.source == c_.rank;
    c.id = own ? own_id(c.t, k)
               : transport_.own().ids(c_.offsets, c_.shape, c.source)[static_cast<int64_t>(c.t) * a_.top_k + k];
    if (weights_are_words()) c.weight = reinterpret_cast<const uint32_t*>(weights_of(c.source, c.t))[k];
    return c;
  }

  __device__ void look_at_pair(int32_t q, const Choice& choice, int32_t k, int32_t lanes) {
    const int32_t source = choice.source, t = choice.t, id = choice.id;
    const Targets found = find_targets(split_, id, k, lanes, c_.rank);
    if (t < 0) return;
    const int32_t slot = found.slot;
    const bool own = source == c_.rank;
    const int32_t row = source * a_.tokens_per_rank + t;
    if (slot >= 0 && k == 0) {
      const int32_t at = atomicAdd(&shared_.count, 1);
      const char* from = own ? a_.hidden.data + t * a_.hidden.stride : row_of(source, t);
      shared_.source[at] = from + first_byte_;
      shared_.row[at] = row;
    }
    if (slot >= 0 && own_scale_bytes() > 0) {
      // Staged or put by this piece of the peer, so this piece's flag or counter covers it.
      const char* from = own ? a_.scale.data + t * a_.scale.stride : row_of(source, t) + round_up(a_.hidden.bytes, 16);
      copy_row_bytes(a_.out_scale + row * a_.scale.bytes, from, a_.scale.bytes, k, lanes);
    }
    if (q - divide(q, pieces_) * pieces_ != piece_) return;
    const bool sent = found.fresh && transport_.is_active(found.rank) && transport_.is_active(c_.rank);
    write_routing(a_, c_.ep_size, own, transport_.round(), source, t, k, found, sent);
    const int64_t out = static_cast<int64_t>(row) * a_.top_k + k;
    if (k < a_.top_k) a_.out_topk_ids[out] = slot < 0 ? a_.invalid_expert_id : id;
    if (weights_are_words()) {
      if (k < a_.top_k) reinterpret_cast<uint32_t*>(a_.out_weights)[out] = slot < 0 ? 0u : choice.weight;
    } else {
      copy_row_bytes(a_.out_weights + row * a_.weights.bytes, slot < 0 ? nullptr : weights_of(source, t),
                     a_.weights.bytes, k, lanes);
    }
  }

  // float32 weights, the common case, travel beside the ids, one per thread.
  __device__ bool weights_are_words() const { return a_.weights.bytes == 4 * a_.top_k; }
  __device__ const char* weights_of(int32_t source, int32_t t) const {
    return source == c_.rank ? a_.weights.data + t * a_.weights.stride
                             : transport_.own().weights(c_.offsets, c_.shape, source) + t * a_.weights.bytes;
  }

  __device__ void gather_eplb() {
    if (blockIdx.x != 0 || a_.num_eplb == 0) return;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < c_.ep_size * a_.num_eplb;
         i += static_cast<int32_t>(blockDim.x)) {
      const int32_t source = i / a_.num_eplb, at = i % a_.num_eplb;
      const bool own = source == c_.rank;
      int32_t value = 0;
      if (own ? transport_.is_active(source) : transport_.is_peer(source)) {
        value = own ? a_.eplb[at] : transport_.own().eplb(c_.offsets, c_.shape, source)[at];
      }
      a_.out_eplb[i] = value;
    }
  }

  const DispatchArgs& a_;
  const DeviceComm& c_;
  DispatchShared& shared_;
  Transport& transport_;
  const ExpertSplit& split_;
  const int32_t group_, groups_, piece_, pieces_;
  const int64_t first_byte_;
  const bool early_;
  int32_t units_, own_tokens_, step_tokens_;
};

// The kernels over the fence transport: of the whole op, of its start, of its wait.
template <int BYTES, bool MASK, Phase PHASE>
__global__ void __launch_bounds__(kThreads, 2) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  __shared__ DispatchShared shared;
  DeviceFence<MASK> fence(p.comm, OpKind::kDispatch, shared.fence);
  DispatchBlock<BYTES, DeviceFence<MASK>> block(p, shared, fence);
  wait_for_predecessor();
  run_block<PHASE>(block, fence, p);
}

template <Phase PHASE, int BYTES>
const void* dispatch_kernel_on(bool mask) {
  return mask ? reinterpret_cast<const void*>(dispatch_kernel<BYTES, true, PHASE>)
              : reinterpret_cast<const void*>(dispatch_kernel<BYTES, false, PHASE>);
}

template <Phase PHASE>
const void* dispatch_kernel_of(int64_t unit_bytes, bool mask) {
  return unit_bytes == 16  ? dispatch_kernel_on<PHASE, 16>(mask)
         : unit_bytes == 4 ? dispatch_kernel_on<PHASE, 4>(mask)
                           : dispatch_kernel_on<PHASE, 1>(mask);
}

template <Phase PHASE>
void add_dispatch_kernels(std::vector<const void*>& all) {
  for (const int64_t unit_bytes : {16, 4, 1}) {
    for (const bool mask : {false, true}) all.push_back(dispatch_kernel_of<PHASE>(unit_bytes, mask));
  }
}

}  // namespace moe_ep::cuda
