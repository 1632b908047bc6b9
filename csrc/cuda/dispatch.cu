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
// With one rank steps 1, 2, 4 and 5 vanish.
#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.h"
#include "csrc/cuda/launch.cuh"
#include "csrc/limits.h"
#include "csrc/routing.h"
#include "csrc/transport/fence.cuh"

namespace moe_ep::cuda {
namespace {

constexpr int kTile = 1024;  // (source, token) pairs looked at together

struct DispatchParams {
  DeviceComm comm;
  DispatchArgs args;
  Plan plan;
};

struct DispatchShared {
  FenceShared fence;
  int32_t count;                // rows in the list
  const char* source[kTile];    // of the row, piece applied
  int32_t row[kTile];           // of the output
};

template <int BYTES, bool MASK>
class DispatchBlock {
 public:
  __device__ DispatchBlock(const DispatchParams& p, DispatchShared& shared)
      : a_(p.args),
        c_(p.comm),
        shared_(shared),
        fence_(p.comm, OpKind::kDispatch, p.args.mask, shared.fence),
        split_(p.args.num_experts, p.comm.ep_size),
        group_(static_cast<int32_t>(blockIdx.x) / p.plan.pieces),
        groups_(p.plan.groups),
        piece_(static_cast<int32_t>(blockIdx.x) % p.plan.pieces),
        pieces_(p.plan.pieces),
        first_byte_(piece_ * p.plan.piece_bytes) {
    const int64_t left = a_.hidden.bytes - first_byte_;
    units_ = static_cast<int32_t>((left < 0 ? 0 : left < p.plan.piece_bytes ? left : p.plan.piece_bytes) / BYTES);
    own_tokens_ = share_of(a_.num_tokens);
    step_tokens_ = share_of(a_.tokens_per_rank);
  }

  __device__ void run() {
    const bool alone = c_.ep_size == 1;
    StepHeader header{};
    if (alone) {
      __syncthreads();
      launch_dependents();
    } else {
      stage_rows();
      put_routing();
      header = make_header();
      fence_.put_header(header);
      fence_.signal(a_.num_tokens);
    }
    if (threadIdx.x == 0) shared_.fence.tokens[c_.rank] = fence_.is_active(c_.rank) ? a_.num_tokens : 0;
    receive(c_.rank, 1);
    if (!alone) {
      fence_.await(group_ * pieces_, header);
      launch_dependents();
      fence_.check_headers(header);
      receive(c_.rank + 1, c_.ep_size - 1);
    }
    gather_eplb();
  }

 private:
  // Tokens of this block's group among the first n.
  __device__ int32_t share_of(int32_t n) const { return n > group_ ? (n - group_ + groups_ - 1) / groups_ : 0; }
  __device__ int32_t token(int32_t i) const { return group_ + i * groups_; }

  __device__ StepHeader make_header() const {
    StepHeader h{};
    h.tokens = a_.num_tokens;
    h.tokens_per_rank = a_.tokens_per_rank;
    h.top_k = a_.top_k;
    h.num_experts = a_.num_experts;
    h.num_eplb = a_.num_eplb;
    h.weight_bytes = static_cast<int32_t>(a_.weights.bytes);
    h.hidden_bytes = a_.hidden.bytes;
    h.scale_bytes = a_.scale.bytes;
    return h;
  }

  // An own id as it travels: every id outside [0, E) becomes invalid_expert_id, before an int64 is narrowed.
  __device__ int32_t own_id(int32_t t, int32_t k) const {
    const int64_t at = t * a_.ids_row_stride + k * a_.ids_col_stride;
    const int64_t id = a_.ids_are_int64 ? static_cast<const int64_t*>(a_.topk_ids)[at]
                                        : static_cast<const int32_t*>(a_.topk_ids)[at];
    return split_.contains(id) ? static_cast<int32_t>(id) : a_.invalid_expert_id;
  }

  __device__ void stage_rows() {
    const Window own = fence_.own();
    copy_rows<BYTES, 4>(
        own_tokens_, units_,
        [&](int32_t i) { return a_.hidden.data + token(i) * a_.hidden.stride + first_byte_; },
        [&](int32_t i) { return own.stage(c_.offsets, c_.shape, token(i)) + first_byte_; },
        [&] {
          __syncthreads();
          fence_.await_reuse();
        });
    if (piece_ == pieces_ - 1 && a_.scale.bytes > 0) {
      const int64_t offset = round_up(a_.hidden.bytes, 16);
      copy_bytes(own_tokens_, a_.scale.bytes,
                 [&](int32_t i) { return a_.scale.data + token(i) * a_.scale.stride; },
                 [&](int32_t i) { return own.stage(c_.offsets, c_.shape, token(i)) + offset; });
    }
  }

  __device__ void put_routing() {
    if (piece_ != 0) return;
    const int32_t n = own_tokens_ * a_.top_k;
    for (int32_t at = static_cast<int32_t>(threadIdx.x); at < n; at += static_cast<int32_t>(blockDim.x)) {
      const int32_t t = token(at / a_.top_k), k = at % a_.top_k;
      const int32_t id = own_id(t, k);
      for (int32_t i = 1; i < c_.ep_size; ++i) {
        const int32_t p = (c_.rank + i) % c_.ep_size;
        if (fence_.is_peer(p)) fence_.window(p).ids(c_.offsets, c_.shape, c_.rank)[t * static_cast<int64_t>(a_.top_k) + k] = id;
      }
    }
    for (int32_t i = 1; i < c_.ep_size; ++i) {
      const int32_t p = (c_.rank + i) % c_.ep_size;
      if (!fence_.is_peer(p)) continue;
      char* weights = fence_.window(p).weights(c_.offsets, c_.shape, c_.rank);
      copy_bytes(own_tokens_, a_.weights.bytes,
                 [&](int32_t j) { return a_.weights.data + token(j) * a_.weights.stride; },
                 [&](int32_t j) { return weights + token(j) * a_.weights.bytes; });
      if (group_ != 0) continue;
      int32_t* stats = fence_.window(p).eplb(c_.offsets, c_.shape, c_.rank);
      for (int32_t j = static_cast<int32_t>(threadIdx.x); j < a_.num_eplb; j += static_cast<int32_t>(blockDim.x)) {
        stats[j] = a_.eplb[j];
      }
    }
  }

  // Takes what sources first_source, ... (modulo W) hold for this rank: this block's tokens, this block's bytes.
  __device__ __noinline__ void receive(int32_t first_source, int32_t sources) {
    const int32_t pairs = sources * step_tokens_;
    for (int32_t begin = 0; begin < pairs; begin += kTile) {
      __syncthreads();  // the list of the tile before has been read, tokens[] is written
      if (threadIdx.x == 0) shared_.count = 0;
      __syncthreads();
      const int32_t end = pairs - begin < kTile ? pairs : begin + kTile;
      look_at(first_source, begin, end);
      __syncthreads();
      copy_rows<BYTES, 4>(
          shared_.count, units_, [&](int32_t i) { return shared_.source[i]; },
          [&](int32_t i) { return a_.out_hidden + shared_.row[i] * a_.hidden.bytes + first_byte_; }, [] {});
    }
  }

  // Pairs [begin, end), 8, 16 or 32 threads per pair, one per id: lists the rows that are routed here, and writes what else
  // a row consists of where it is this piece's turn. The ids of several pairs are loaded before the first is looked
  // at, for every one of these loads is a trip to memory.
  __device__ void look_at(int32_t first_source, int32_t begin, int32_t end) {
    constexpr int kAhead = 4;
    const int32_t lanes = a_.top_k <= 8 ? 8 : a_.top_k <= 16 ? 16 : 32;
    const int32_t step = static_cast<int32_t>(blockDim.x) / lanes;
    const int32_t first = begin + static_cast<int32_t>(threadIdx.x) / lanes;
    const int32_t k = static_cast<int32_t>(threadIdx.x) % lanes;
    for (int32_t base = first; base - first + begin < end; base += kAhead * step) {
      int32_t id[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t q = base + i * step;
        id[i] = -1;
        if (q >= end || k >= a_.top_k) continue;
        const int32_t source = source_of(first_source, q), t = token(q % step_tokens_);
        if (t >= shared_.fence.tokens[source]) continue;
        id[i] = source == c_.rank ? own_id(t, k) : peer_ids(source, t)[k];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t q = base + i * step;
        if (q - first + begin >= end) break;  // no thread of the block has a pair left
        look_at_pair(q, q < end, source_of(first_source, q), id[i], k, lanes);
      }
    }
  }

  __device__ int32_t source_of(int32_t first_source, int32_t q) const {
    int32_t source = first_source + q / step_tokens_;
    while (source >= c_.ep_size) source -= c_.ep_size;
    return source;
  }
  __device__ const int32_t* peer_ids(int32_t source, int32_t t) const {
    return fence_.own().ids(c_.offsets, c_.shape, source) + static_cast<int64_t>(t) * a_.top_k;
  }

  __device__ void look_at_pair(int32_t q, bool valid, int32_t source, int32_t id, int32_t k, int32_t lanes) {
    constexpr unsigned kAll = 0xFFFFFFFFu;
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const unsigned before = (1u << lane) - 1;                                     // lanes below
    const unsigned group = kAll >> (32 - lanes) << (lane - k);                     // lanes of this pair
    const bool selects = split_.contains(id);
    const int32_t rank = selects ? split_.owner(id) : -1;
    // Equal keys: the same rank of the same pair. The first of them is where the rank appears first.
    const unsigned same = __match_any_sync(kAll, selects ? rank : -1 - lane) & group;
    const bool fresh = selects && (same & before) == 0;
    const unsigned targets = __ballot_sync(kAll, fresh) & group;
    const unsigned here = __ballot_sync(kAll, fresh && rank == c_.rank) & group;
    if (!valid) return;
    const int32_t slot = here == 0 ? -1 : __popc(targets & ((here & -here) - 1));
    const bool own = source == c_.rank;
    const int32_t t = token(q % step_tokens_);
    const int32_t row = source * a_.tokens_per_rank + t;
    if (slot >= 0 && k == 0) {
      const int32_t at = atomicAdd(&shared_.count, 1);
      const char* from = own ? a_.hidden.data + t * a_.hidden.stride
                             : fence_.window(source).stage(c_.offsets, c_.shape, t);
      shared_.source[at] = from + first_byte_;
      shared_.row[at] = row;
    }
    if (slot >= 0 && piece_ == pieces_ - 1 && a_.scale.bytes > 0) {
      // Staged by this piece of the peer, so this piece's flag covers it.
      const char* from = own ? a_.scale.data + t * a_.scale.stride
                             : fence_.window(source).stage(c_.offsets, c_.shape, t) + round_up(a_.hidden.bytes, 16);
      copy_row_bytes(a_.out_scale + row * a_.scale.bytes, from, a_.scale.bytes, k, lanes);
    }
    if (q % pieces_ != piece_) return;
    int32_t* slots = a_.routing + static_cast<int64_t>(1 + source) * a_.tokens_per_rank + t;
    if (k == 0) *slots = slot;
    if (own) {
      // This rank's own token: row 0 of routing, and the targets in the order of their first appearance.
      if (k == 0) a_.routing[t] = t == 0 ? static_cast<int32_t>(fence_.round() & 0x7FFFFFFF) : 0;
      int32_t* out = a_.routing + static_cast<int64_t>(1 + c_.ep_size) * a_.tokens_per_rank + t;
      const int32_t max_targets = a_.top_k < c_.ep_size ? a_.top_k : c_.ep_size;
      // Masked or not: a mask leaves slots where they are.
      if (fresh) out[static_cast<int64_t>(__popc(targets & before)) * a_.tokens_per_rank] = rank;
      if (k >= __popc(targets) && k < max_targets) out[static_cast<int64_t>(k) * a_.tokens_per_rank] = -1;
    }
    if (k < a_.top_k) a_.out_topk_ids[static_cast<int64_t>(row) * a_.top_k + k] = slot < 0 ? a_.invalid_expert_id : id;
    const char* weights = own ? a_.weights.data + t * a_.weights.stride
                              : fence_.own().weights(c_.offsets, c_.shape, source) + t * a_.weights.bytes;
    copy_row_bytes(a_.out_weights + row * a_.weights.bytes, slot < 0 ? nullptr : weights, a_.weights.bytes, k, lanes);
  }

  __device__ void gather_eplb() {
    if (blockIdx.x != 0 || a_.num_eplb == 0) return;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < c_.ep_size * a_.num_eplb;
         i += static_cast<int32_t>(blockDim.x)) {
      const int32_t source = i / a_.num_eplb, at = i % a_.num_eplb;
      const bool own = source == c_.rank;
      int32_t value = 0;
      if (own ? fence_.is_active(source) : fence_.is_peer(source)) {
        value = own ? a_.eplb[at] : fence_.own().eplb(c_.offsets, c_.shape, source)[at];
      }
      a_.out_eplb[i] = value;
    }
  }

  const DispatchArgs& a_;
  const DeviceComm& c_;
  DispatchShared& shared_;
  DeviceFence<MASK> fence_;
  const ExpertSplit split_;
  const int32_t group_, groups_, piece_, pieces_;
  const int64_t first_byte_;
  int32_t units_, own_tokens_, step_tokens_;
};

template <int BYTES, bool MASK>
__global__ void __launch_bounds__(kMaxThreads) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  __shared__ DispatchShared shared;
  wait_for_predecessor();
  DispatchBlock<BYTES, MASK>(p, shared).run();
}

template <int BYTES>
const void* kernel_of(bool mask) {
  return mask ? reinterpret_cast<const void*>(dispatch_kernel<BYTES, true>)
              : reinterpret_cast<const void*>(dispatch_kernel<BYTES, false>);
}

}  // namespace

std::vector<const void*> dispatch_kernels() {
  return {kernel_of<16>(false), kernel_of<16>(true), kernel_of<4>(false),
          kernel_of<4>(true),   kernel_of<1>(false), kernel_of<1>(true)};
}

void dispatch(Communicator& comm, const DispatchArgs& args, void* stream) {
  check_fits(comm, args);
  DeviceEnd& end = *comm.device_end();
  end.raise_failure(comm, OpKind::kDispatch);
  DispatchParams p{end.comm(comm, args.timeout_sec), args, end.plan(args.tokens_per_rank, args.hidden.bytes)};
  const int64_t alignment = alignment_of({reinterpret_cast<int64_t>(args.hidden.data), args.hidden.stride,
                                          args.hidden.bytes, reinterpret_cast<int64_t>(args.out_hidden)});
  const bool mask = comm.options().enable_rank_mask;
  const void* kernel = alignment >= 16 ? kernel_of<16>(mask) : alignment >= 4 ? kernel_of<4>(mask) : kernel_of<1>(mask);
  launch(kernel, p.plan.blocks(), p.plan.threads, &p, end.pdl, stream, "dispatch");
}

}  // namespace moe_ep::cuda
