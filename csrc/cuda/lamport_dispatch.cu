// dispatch over the Lamport transport (csrc/transport/lamport.h): one kernel, a warp per piece of work.
//
// Put: R pieces, the ids and weights of a token, to all peers; then T * groups pieces, a group of a row, to the token's
// target ranks. Take: a piece is GROUPS groups of the row of a (source, token) pair, all on their way before any is
// looked at: one group where there are warps for all, more where a warp would take one piece after another. Every warp
// that takes looks at the pair's ids itself, while its share of the row is already on its way; the first piece of a
// pair also writes the pair's ids, weights and routing. Example, W = 2, H = 1024 in bfloat16, R = 1: a row is 128 units
// of 16 bytes, 2 groups; 3 pieces are put (ids and weights, group 0, group 1), and 4 taken, or 2 where GROUPS is 2.
#include <algorithm>

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/launch.h"
#include "csrc/cuda/targets.cuh"
#include "csrc/limits.h"
#include "csrc/transport/lamport.cuh"

namespace moe_ep::cuda {
namespace {

constexpr int32_t kMostGroups = 3;  // of a piece that is taken

struct LamportDispatchParams {
  DeviceComm comm;
  DispatchArgs args;
  ExpertSplit split;
  int32_t hidden_units, units;  // units of 16 bytes, the last of hidden and of scale perhaps not full
  int32_t groups;  // of a row
  int32_t pieces;  // of a row, when it is taken
  int32_t id_vectors, choice_vectors;
  bool early;  // see DeviceLamport::run
  bool eager;  // row vectors are loaded before it is known whether the row comes
  bool in_units, out_units;  // own rows, output rows begin on 16 bytes
};

template <bool MASK, int GROUPS>
class LamportDispatch {
  static constexpr int kVectors = 4 * GROUPS;  // of a row, in a lane

 public:
  __device__ LamportDispatch(const LamportDispatchParams& p, LamportShared& shared)
      : p_(p),
        a_(p.args),
        c_(p.comm),
        transport_(p.comm, OpKind::kDispatch, shared),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ void run() {
    transport_.begin(a_.mask);
    const auto header = [&] { return step_header(a_); };
    const int32_t puts = a_.tokens_per_rank + a_.num_tokens * p_.groups;
    transport_.run(
        header, p_.early,
        [&](int32_t warp, int32_t warps) {
          for (int32_t i = warp; i < puts; i += warps) {
            if (i < a_.tokens_per_rank) {
              put_choice(i);
            } else {
              const int32_t at = i - a_.tokens_per_rank, t = divide(at, p_.groups);
              put_group(t, at - t * p_.groups);
            }
          }
        },
        [&](int32_t warp, int32_t warps) {
          // Warps that had nothing to put, or less, take first.
          const int32_t shift = puts - divide(puts, warps) * warps;
          const int32_t takes = c_.ep_size * a_.tokens_per_rank * p_.pieces;
          for (int32_t i = warp < shift ? warp - shift + warps : warp - shift; i < takes; i += warps) {
            const int32_t pair = divide(i, p_.pieces), nth = divide(pair, a_.tokens_per_rank), next = c_.rank + nth;
            take_piece(next < c_.ep_size ? next : next - c_.ep_size, pair - nth * a_.tokens_per_rank,
                       (i - pair * p_.pieces) * GROUPS, header);
          }
        });
  }

 private:
  // Word w of what a token chose: K ids, then the bytes of its weights.
  __device__ uint32_t choice_word(int32_t t, int32_t w) const {
    const bool holds = t < a_.num_tokens;
    if (w < a_.top_k) return static_cast<uint32_t>(holds ? sanitised_id(a_, t, w) : a_.invalid_expert_id);
    const int64_t at = 4ll * (w - a_.top_k), left = a_.weights.bytes - at;
    if (!holds || left <= 0) return 0;
    const char* from = a_.weights.data + t * a_.weights.stride + at;
    if (left >= 4 && reinterpret_cast<uintptr_t>(from) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t word = 0;
    for (int i = 0; i < 4 && i < left; ++i) word |= static_cast<uint32_t>(static_cast<uint8_t>(from[i])) << 8 * i;
    return word;
  }

  __device__ void put_choice(int32_t t) {
    uint32_t w[kLamportWords] = {};
    if (lane_ < p_.choice_vectors) {
#pragma unroll
      for (int j = 0; j < kLamportWords; ++j) w[j] = choice_word(t, kLamportWords * lane_ + j);
    }
    transport_.confirm();
    // Lanes walk (peer, vector) pairs.
    const int32_t total = (c_.ep_size - 1) * p_.choice_vectors;
    for (int32_t base = 0; base < total; base += 32) {
      const int32_t at = base + lane_, nth = divide(at, p_.choice_vectors), i = at - nth * p_.choice_vectors;
      uint32_t x[kLamportWords];
#pragma unroll
      for (int j = 0; j < kLamportWords; ++j) x[j] = __shfl_sync(0xFFFFFFFFu, w[j], i);
      const int32_t next = c_.rank + 1 + nth, p = next < c_.ep_size ? next : next - c_.ep_size;
      if (at >= total || !transport_.is_peer(p)) continue;
      store_vector(transport_.window(p).lamport_choice(c_.offsets, c_.shape, transport_.round(), c_.rank, t) + i, x[0],
                   x[1], x[2], transport_.tag());
    }
  }

  __device__ uint4 load_own(int32_t t, int32_t unit) const {
    if (unit < p_.hidden_units) {
      return load_unit(a_.hidden.data + t * a_.hidden.stride + 16ll * unit, a_.hidden.bytes - 16ll * unit, p_.in_units);
    }
    const int64_t at = 16ll * (unit - p_.hidden_units);
    return load_unit(a_.scale.data + t * a_.scale.stride + at, a_.scale.bytes - at, p_.in_units);
  }
  __device__ void store_out(int64_t row, int32_t unit, uint4 value) const {
    if (unit < p_.hidden_units) {
      store_unit(a_.out_hidden + row * a_.hidden.bytes + 16ll * unit, value, a_.hidden.bytes - 16ll * unit,
                 p_.out_units);
    } else {
      const int64_t at = 16ll * (unit - p_.hidden_units);
      store_unit(a_.out_scale + row * a_.scale.bytes + at, value, a_.scale.bytes - at, p_.out_units);
    }
  }
  // How many units of a group this lane holds.
  __device__ int32_t lane_units(int32_t group) const {
    const int32_t left = p_.units - group * kLamportGroupUnits - lane_;
    return left <= 0 ? 0 : left <= 32 ? 1 : left <= 64 ? 2 : 3;
  }
  // Word w of the 12 that a lane holds of a group, in the vectors they travel in.
  static __device__ uint32_t& word_of(LamportVector* vectors, int w) {
    return vectors[w / kLamportWords].word[w % kLamportWords];
  }
  __device__ void load_group(int32_t t, int32_t group, int32_t units, LamportVector* to) const {
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const uint4 x = j < units ? load_own(t, group * kLamportGroupUnits + 32 * j + lane_) : uint4{};
      word_of(to, 4 * j) = x.x, word_of(to, 4 * j + 1) = x.y, word_of(to, 4 * j + 2) = x.z,
                      word_of(to, 4 * j + 3) = x.w;
    }
  }
  __device__ void store_group(int64_t row, int32_t group, int32_t units, LamportVector* from) const {
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      if (j >= units) continue;
      store_out(row, group * kLamportGroupUnits + 32 * j + lane_,
                {word_of(from, 4 * j), word_of(from, 4 * j + 1), word_of(from, 4 * j + 2), word_of(from, 4 * j + 3)});
    }
  }

  __device__ void put_group(int32_t t, int32_t group) {
    const int32_t units = lane_units(group);
    LamportVector x[4];
    load_group(t, group, units, x);
    const int32_t id = lane_ < a_.top_k ? sanitised_id(a_, t, lane_) : -1;
    const int32_t rank = owner_of(p_.split, id);
    const bool goes = rank >= 0 && transport_.is_peer(rank);
    uint64_t targets = __reduce_or_sync(0xFFFFFFFFu, goes && rank < 32 ? 1u << (rank & 31) : 0u);
    if (c_.ep_size > 32) {
      targets |= static_cast<uint64_t>(__reduce_or_sync(0xFFFFFFFFu, goes && rank >= 32 ? 1u << (rank & 31) : 0u))
                 << 32;
    }
    const int32_t vectors = lamport_lane_vectors(units);
    transport_.confirm();
    // Each rank begins with the target after itself, so that ranks do not all store to one.
    const int32_t first = c_.rank + 1 < c_.ep_size ? c_.rank + 1 : 0;
    for (int half = 0; half < 2; ++half) {
      uint64_t left = targets & (half == 0 ? ~0ull << first : ~(~0ull << first));
      while (left != 0) {
        const int32_t p = __ffsll(static_cast<long long>(left)) - 1;
        left &= left - 1;
        LamportVector* to = transport_.window(p).lamport_row(c_.offsets, c_.shape, transport_.round(), c_.rank, t) +
                            128 * group + lane_;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < vectors) store_vector(to + 32 * i, x[i].word[0], x[i].word[1], x[i].word[2], transport_.tag());
        }
      }
    }
  }

  // The groups of the pair's row from `first` on.
  template <class Header>
  __device__ void take_piece(int32_t source, int32_t t, int32_t first, const Header& header) {
    const bool own = source == c_.rank;
    const bool active = own ? transport_.is_active(source) : transport_.is_peer(source);
    int32_t units[GROUPS];
    unsigned wanted = 0;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      units[g] = lane_units(first + g);
      wanted |= ((1u << lamport_lane_vectors(units[g])) - 1) << 4 * g;
    }
    constexpr int kChoice = kVectors;  // beside the row's vectors
    LamportVector row[kVectors + 1];
    const Window window = transport_.own();
    const LamportVector* row_at =
        window.lamport_row(c_.offsets, c_.shape, transport_.round(), source, t) + 128 * first + lane_;
    const LamportVector* choice_at = window.lamport_choice(c_.offsets, c_.shape, transport_.round(), source, t) + lane_;
    const auto from = [&](int i) { return i == kChoice ? choice_at : row_at + 32 * i; };
    int32_t id = -1;
    bool came = true;
    if (own) {
      const bool holds = active && t < a_.num_tokens;
      if (holds && lane_ < a_.top_k) id = sanitised_id(a_, t, lane_);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) load_group(t, first + g, holds ? units[g] : 0, row + 4 * g);
    } else if (active) {
      const unsigned choice = lane_ < (first == 0 ? p_.choice_vectors : p_.id_vectors) ? 1u << kChoice : 0;
      const unsigned loaded = p_.eager ? wanted | choice : choice;
#pragma unroll
      for (int i = 0; i <= kVectors; ++i) {
        row[i] = {{}, transport_.tag() - 1};
        if (loaded >> i & 1) row[i] = load_vector(from(i));
      }
      came = transport_.await_needed(source, row, from, loaded, choice, header);
      // Id k is word k % 3 of vector k / 3.
      const int32_t at = divide(lane_, kLamportWords);
      uint32_t x[kLamportWords];
#pragma unroll
      for (int j = 0; j < kLamportWords; ++j) x[j] = __shfl_sync(0xFFFFFFFFu, row[kChoice].word[j], at);
      const int32_t j = lane_ - kLamportWords * at;
      if (came && lane_ < a_.top_k) id = static_cast<int32_t>(j == 0 ? x[0] : j == 1 ? x[1] : x[2]);
    }
    bool here;
    if (first == 0) {
      const Targets found = find_targets(p_.split, id, lane_, 32, c_.rank);
      here = found.slot >= 0;
      write_choice(source, t, own, here, id, found, row[kChoice]);
    } else {
      here = __any_sync(0xFFFFFFFFu, owner_of(p_.split, id) == c_.rank);
    }
    if (!here) return;
    if (!own) came = transport_.await(source, row, from, wanted, header);
    if (!came) return;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      store_group(static_cast<int64_t>(source) * a_.tokens_per_rank + t, first + g, units[g], row + 4 * g);
    }
  }

  // What is known of a pair besides the row: by a whole warp.
  __device__ void write_choice(int32_t source, int32_t t, bool own, bool here, int32_t id, const Targets& found,
                               const LamportVector& choice) {
    const bool sent = found.fresh && transport_.is_active(found.rank) && transport_.is_active(c_.rank);
    write_routing(a_, c_.ep_size, own, transport_.round(), source, t, lane_, found, sent);
    const int64_t row = static_cast<int64_t>(source) * a_.tokens_per_rank + t;
    if (lane_ < a_.top_k) a_.out_topk_ids[row * a_.top_k + lane_] = here ? id : a_.invalid_expert_id;
    const int32_t words = static_cast<int32_t>((a_.weights.bytes + 3) / 4);
    for (int32_t base = 0; base < words; base += 32) {
      const int32_t w = a_.top_k + base + lane_, at = divide(w, kLamportWords), j = w - kLamportWords * at;
      uint32_t x[kLamportWords];
#pragma unroll
      for (int i = 0; i < kLamportWords; ++i) x[i] = __shfl_sync(0xFFFFFFFFu, choice.word[i], at & 31);
      if (base + lane_ >= words) continue;
      const uint32_t word = !here ? 0 : own ? choice_word(t, w) : j == 0 ? x[0] : j == 1 ? x[1] : x[2];
      const int64_t offset = 4ll * (base + lane_), left = a_.weights.bytes - offset;
      char* to = a_.out_weights + row * a_.weights.bytes + offset;
      if (left >= 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
        *reinterpret_cast<uint32_t*>(to) = word;
      } else {
        for (int i = 0; i < 4 && i < left; ++i) to[i] = static_cast<char>(word >> 8 * i);
      }
    }
  }

  const LamportDispatchParams& p_;
  const DispatchArgs& a_;
  const DeviceComm& c_;
  DeviceLamport<MASK> transport_;
  const int32_t lane_;
};

template <bool MASK, int GROUPS>
__global__ void __launch_bounds__(kThreads, 2)
    lamport_dispatch_kernel(const __grid_constant__ LamportDispatchParams p) {
  __shared__ LamportShared shared;
  LamportDispatch<MASK, GROUPS> dispatch(p, shared);
  wait_for_predecessor();
  dispatch.run();
}

template <bool MASK>
const void* kernel_with(int32_t groups) {
  return groups == 1   ? reinterpret_cast<const void*>(lamport_dispatch_kernel<MASK, 1>)
         : groups == 2 ? reinterpret_cast<const void*>(lamport_dispatch_kernel<MASK, 2>)
                       : reinterpret_cast<const void*>(lamport_dispatch_kernel<MASK, kMostGroups>);
}
const void* kernel_of(bool mask, int32_t groups) {
  return mask ? kernel_with<true>(groups) : kernel_with<false>(groups);
}

}  // namespace

std::vector<const void*> lamport_dispatch_kernels() {
  std::vector<const void*> all;
  for (const bool mask : {false, true}) {
    for (int32_t groups = 1; groups <= kMostGroups; ++groups) all.push_back(kernel_of(mask, groups));
  }
  return all;
}

bool takes_lamport(const Communicator& comm, const DispatchArgs& args) {
  return in_reach(comm, args, comm.shape().lamport_tokens) && args.num_eplb == 0;
}

void lamport_dispatch(Communicator& comm, const DispatchArgs& args, void* stream) {
  DeviceEnd& end = *comm.device_end();
  const auto units = [](int64_t bytes) { return static_cast<int32_t>((bytes + 15) / 16); };
  LamportDispatchParams p{end.comm(comm, args.timeout_sec), args, ExpertSplit(args.num_experts, comm.ep_size())};
  p.hidden_units = units(args.hidden.bytes);
  p.units = p.hidden_units + units(args.scale.bytes);
  p.groups = std::max(1, static_cast<int32_t>(lamport_groups(p.units)));
  p.id_vectors = static_cast<int32_t>(lamport_vectors(4ll * args.top_k));
  p.choice_vectors = static_cast<int32_t>(lamport_vectors(4ll * args.top_k + args.weights.bytes));
  // Where most pairs hold no row, loading it on suspicion costs more than it saves.
  p.eager = comm.ep_size() <= 2 * args.top_k;
  p.in_units = alignment_of({reinterpret_cast<int64_t>(args.hidden.data), args.hidden.stride,
                             reinterpret_cast<int64_t>(args.scale.data), args.scale.stride}) >= 16;
  p.out_units = alignment_of({reinterpret_cast<int64_t>(args.out_hidden), args.hidden.bytes,
                              reinterpret_cast<int64_t>(args.out_scale), args.scale.bytes}) >= 16;
  const int32_t pairs = comm.ep_size() * std::max(1, args.tokens_per_rank), warps_of_block = kThreads / 32;
  int32_t groups = 1;
  for (;; ++groups) {
    p.pieces = (p.groups + groups - 1) / groups;
    if (groups == kMostGroups || pairs * p.pieces <= warps_of_block * (end.max_blocks - 1)) break;
  }
  const int32_t blocks = std::min(end.max_blocks, 1 + (pairs * p.pieces + warps_of_block - 1) / warps_of_block);
  p.early = blocks <= end.early_blocks;
  launch(kernel_of(comm.options().enable_rank_mask, groups), blocks, kThreads, &p, end.pdl, stream, "dispatch");
}

}  // namespace moe_ep::cuda
