// Which rank owns an expert, and which ranks a token goes to. The one place where this arithmetic stands: the CPU
// column, the CUDA kernels and (in Python, for tests) tests/reference.py all agree with it.
//
// Experts are split in contiguous blocks, ceil first: the first E mod W ranks own one more.
//   E = 10, W = 4:  rank 0 owns 0..2, rank 1 owns 3..5, rank 2 owns 6..7, rank 3 owns 8..9
//
// The targets of a token are the distinct owners of its ids, in the order of their first appearance in the top-k;
// ids outside [0, E) select nothing. Above, with top-k row [9, 0, -1, 8, 4]: targets [3, 0, 1].
//
// `routing` (int32 [1 + W + M, R], M = min(K, W)) is what dispatch remembers for combine on this rank:
//   row 0           element 0 holds the round of the dispatch (a tag by which combine detects that ranks pass
//                   the routing of different dispatches), the rest is 0
//   row 1 + s       for the row received from token t of rank s: the index of this rank among that token's
//                   targets (= its landing slot on rank s), or -1 where the row holds no token
//   row 1 + W + j   the j-th target rank of local token t, or -1: none, masked in the dispatch, or t >= T
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOE_EP_HD __host__ __device__ __forceinline__
#else
#define MOE_EP_HD inline
#endif

namespace moe_ep {

// Division of [0, E) among W ranks; owner() is two divisions by constants of the step, no table.
struct ExpertSplit {
  int32_t num_experts;  // E
  int32_t per_rank;     // floor(E / W)
  int32_t wide_ranks;   // E mod W, ranks that own per_rank + 1

  MOE_EP_HD ExpertSplit(int32_t experts, int32_t ep_size)
      : num_experts(experts), per_rank(experts / ep_size), wide_ranks(experts % ep_size) {}

  MOE_EP_HD bool contains(int64_t id) const { return id >= 0 && id < num_experts; }

  MOE_EP_HD int32_t owner(int32_t id) const {
    const int32_t wide = wide_ranks * (per_rank + 1);  // experts on the wide ranks
    if (id < wide) return id / (per_rank + 1);
    return wide_ranks + (id - wide) / per_rank;  // not reached with per_rank == 0: then id < E == wide
  }
};

// Distinct target ranks of one top-k row, in order of first appearance. Returns their number.
MOE_EP_HD int32_t find_targets(const int32_t* ids, int32_t top_k, const ExpertSplit& split, int32_t* targets) {
  int32_t count = 0;
  for (int32_t k = 0; k < top_k; ++k) {
    if (!split.contains(ids[k])) continue;
    const int32_t rank = split.owner(ids[k]);
    bool seen = false;
    for (int32_t j = 0; j < count; ++j) seen |= targets[j] == rank;
    if (!seen) targets[count++] = rank;
  }
  return count;
}

}  // namespace moe_ep
