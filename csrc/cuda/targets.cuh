// What the ids of a token say, looked up by a group of lanes of a warp, one id each; and the rows of `routing` that
// follow from it (csrc/routing.h).
#pragma once

#include "csrc/cuda/device.cuh"
#include "csrc/ep.h"
#include "csrc/routing.h"

namespace moe_ep::cuda {

// An own id as it travels: every id outside [0, E) becomes invalid_expert_id, before an int64 is narrowed.
__device__ __forceinline__ int32_t sanitised_id(const DispatchArgs& a, int32_t t, int32_t k) {
  const int64_t at = t * a.ids_row_stride + k * a.ids_col_stride;
  const int64_t id =
      a.ids_are_int64 ? static_cast<const int64_t*>(a.topk_ids)[at] : static_cast<const int32_t*>(a.topk_ids)[at];
  return id >= 0 && id < a.num_experts ? static_cast<int32_t>(id) : a.invalid_expert_id;
}

// ExpertSplit::owner with the cheaper division; -1 for an id that selects nothing.
__device__ __forceinline__ int32_t owner_of(const ExpertSplit& split, int32_t id) {
  if (!split.contains(id)) return -1;
  const int32_t wide = split.wide_ranks * (split.per_rank + 1);
  return id < wide ? divide(id, split.per_rank + 1) : split.wide_ranks + divide(id - wide, split.per_rank);
}

struct Targets {
  int32_t rank;      // owner of this lane's id, or -1
  bool fresh;        // this lane's id is the first of that rank
  int32_t earlier;   // ranks that appear first in lanes before this one
  int32_t count;     // ranks in all
  int32_t slot;      // index of the own rank among them, or -1
};

// `lanes` (8, 16 or 32) lanes side by side hold the ids of one token, this one the k-th; every lane of the warp calls
// it.
__device__ __forceinline__ Targets find_targets(const ExpertSplit& split, int32_t id, int32_t k, int32_t lanes,
                                                int32_t own_rank) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const unsigned before = (1u << lane) - 1;                                  // lanes below
  const unsigned group = kAll >> (32 - lanes) << (lane - k);                 // lanes of this token
  Targets found;
  found.rank = owner_of(split, id);
  // Equal keys: the same rank of the same token. The first of them is where the rank appears first.
  const unsigned same = __match_any_sync(kAll, found.rank >= 0 ? found.rank : -1 - lane) & group;
  found.fresh = found.rank >= 0 && (same & before) == 0;
  const unsigned targets = __ballot_sync(kAll, found.fresh) & group;
  const unsigned here = __ballot_sync(kAll, found.fresh && found.rank == own_rank) & group;
  found.earlier = __popc(targets & before);
  found.count = __popc(targets);
  found.slot = here == 0 ? -1 : __popc(targets & ((here & -here) - 1));
  return found;
}

// By the lanes of one token t of `source`. `sent`: whether the rank of this lane's id takes part in the step; a mask
// leaves slots where they are, but a target that it cuts off is none for combine.
__device__ __forceinline__ void write_routing(const DispatchArgs& a, int32_t ep_size, bool own, uint64_t round,
                                              int32_t source, int32_t t, int32_t k, const Targets& found, bool sent) {
  if (k == 0) a.routing[static_cast<int64_t>(1 + source) * a.tokens_per_rank + t] = found.slot;
  if (!own) return;
  if (k == 0) a.routing[t] = t == 0 ? static_cast<int32_t>(round & 0x7FFFFFFF) : 0;
  int32_t* out = a.routing + static_cast<int64_t>(1 + ep_size) * a.tokens_per_rank + t;
  const int32_t max_targets = a.top_k < ep_size ? a.top_k : ep_size;
  if (found.fresh) out[static_cast<int64_t>(found.earlier) * a.tokens_per_rank] = sent ? found.rank : -1;
  if (k >= found.count && k < max_targets) out[static_cast<int64_t>(k) * a.tokens_per_rank] = -1;
}

}  // namespace moe_ep::cuda
