// dispatch between processes of one host: the protocol is in csrc/transport/fence.h, the row contract in README.md.
#include <algorithm>
#include <cstring>
#include <vector>

#include "csrc/limits.h"
#include "csrc/routing.h"
#include "csrc/transport/fence.h"

namespace moe_ep::cpu {
namespace {

// topk_ids as they travel: int32, dense, every id outside [0, E) replaced by invalid_expert_id. An int64 id is
// compared before it is narrowed, so 2^32 does not turn into expert 0.
std::vector<int32_t> sanitize_ids(const DispatchArgs& a, const ExpertSplit& split) {
  std::vector<int32_t> ids(static_cast<size_t>(a.num_tokens) * static_cast<size_t>(a.top_k));
  for (int32_t t = 0; t < a.num_tokens; ++t) {
    for (int32_t k = 0; k < a.top_k; ++k) {
      const int64_t at = t * a.ids_row_stride + k * a.ids_col_stride;
      const int64_t id =
          a.ids_are_int64 ? static_cast<const int64_t*>(a.topk_ids)[at] : static_cast<const int32_t*>(a.topk_ids)[at];
      ids[static_cast<size_t>(t) * static_cast<size_t>(a.top_k) + static_cast<size_t>(k)] =
          split.contains(id) ? static_cast<int32_t>(id) : a.invalid_expert_id;
    }
  }
  return ids;
}

// Where the rows of one source are found: the tensors passed for the own rank, the windows for a peer.
struct Source {
  Rows hidden, scale, weights;
  const int32_t* ids;
  const int32_t* eplb;
  int32_t num_tokens;
};

class Receiver {
 public:
  Receiver(const DispatchArgs& args, const ExpertSplit& split, int32_t rank) : a_(args), split_(split), rank_(rank) {}

  // Takes what is routed to this rank out of one source; a source without tokens is a masked rank.
  void receive(int32_t src, const Source& from) const {
    const int64_t first = static_cast<int64_t>(src) * a_.tokens_per_rank;
    int32_t* slots = a_.routing + static_cast<int64_t>(1 + src) * a_.tokens_per_rank;
    for (int32_t t = 0; t < a_.tokens_per_rank; ++t) {
      const int64_t row = first + t;
      int32_t* out_ids = a_.out_topk_ids + row * a_.top_k;
      const int32_t* ids = from.ids + static_cast<int64_t>(t) * a_.top_k;
      slots[t] = t < from.num_tokens ? slot_here(ids) : -1;
      if (slots[t] < 0) {
        std::fill_n(out_ids, a_.top_k, a_.invalid_expert_id);
        std::memset(a_.out_weights + row * a_.weights.bytes, 0, static_cast<size_t>(a_.weights.bytes));
        continue;
      }
      std::copy_n(ids, a_.top_k, out_ids);
      copy_row(a_.out_hidden, row, from.hidden, t);
      copy_row(a_.out_scale, row, from.scale, t);
      copy_row(a_.out_weights, row, from.weights, t);
    }
    int32_t* stats = a_.out_eplb + static_cast<int64_t>(src) * a_.num_eplb;
    if (from.eplb != nullptr) {
      std::copy_n(from.eplb, a_.num_eplb, stats);
    } else {
      std::fill_n(stats, a_.num_eplb, 0);
    }
  }

 private:
  int32_t slot_here(const int32_t* ids) const {
    int32_t targets[kMaxTopK];
    const int32_t count = find_targets(ids, a_.top_k, split_, targets);
    const int32_t* found = std::find(targets, targets + count, rank_);
    return found == targets + count ? -1 : static_cast<int32_t>(found - targets);
  }

  static void copy_row(char* out, int64_t row, const Rows& from, int32_t t) {
    if (from.bytes > 0)
      std::memcpy(out + row * from.bytes, from.data + t * from.stride, static_cast<size_t>(from.bytes));
  }

  const DispatchArgs& a_;
  const ExpertSplit& split_;
  int32_t rank_;
};

// Rows 1 + W .. of routing, where there is one: the targets of every local token. `needed[t]` = some active peer gets
// token t.
void route_local_tokens(const DispatchArgs& a, const std::vector<int32_t>& ids, const ExpertSplit& split,
                        const Communicator& comm, const RankMask& mask, std::vector<char>& needed) {
  const int32_t max_targets = std::min(a.top_k, comm.ep_size());
  const bool here = HostFence::is_active(mask, comm.rank());
  int32_t* out = nullptr;
  if (a.routing != nullptr) out = a.routing + static_cast<int64_t>(1 + comm.ep_size()) * a.tokens_per_rank;
  for (int32_t t = 0; t < a.tokens_per_rank; ++t) {
    int32_t targets[kMaxTopK];
    const int32_t count =
        t < a.num_tokens ? find_targets(ids.data() + static_cast<int64_t>(t) * a.top_k, a.top_k, split, targets) : 0;
    for (int32_t j = 0; j < max_targets; ++j) {
      const bool sent = j < count && here && HostFence::is_active(mask, targets[j]);
      if (out != nullptr) out[static_cast<int64_t>(j) * a.tokens_per_rank + t] = sent ? targets[j] : -1;
      if (sent && targets[j] != comm.rank()) needed[static_cast<size_t>(t)] = 1;
    }
  }
}

// Steps 2 to 4.
void send(Communicator& comm, const DispatchArgs& a, const std::vector<int32_t>& ids, const std::vector<char>& needed,
          const StepHeader& header, HostFence& fence) {
  fence.delay(DelayPoint::kBeforePut);
  for (const int32_t peer : fence) fence.await_reuse(peer);

  const WindowShape& shape = comm.shape();
  const Window::Offsets& offsets = comm.offsets();
  const Window own = comm.window(comm.rank());
  const int64_t scale_offset = round_up(a.hidden.bytes, 16);
  for (int32_t t = 0; t < a.num_tokens; ++t) {
    if (!needed[static_cast<size_t>(t)]) continue;
    char* row = own.stage(offsets, shape, t);
    std::memcpy(row, a.hidden.data + t * a.hidden.stride, static_cast<size_t>(a.hidden.bytes));
    if (a.scale.bytes > 0) {
      std::memcpy(row + scale_offset, a.scale.data + t * a.scale.stride, static_cast<size_t>(a.scale.bytes));
    }
  }

  for (const int32_t peer : fence) {
    const Window window = comm.window(peer);
    std::copy(ids.begin(), ids.end(), window.ids(offsets, shape, comm.rank()));
    char* weights = window.weights(offsets, shape, comm.rank());
    for (int32_t t = 0; t < a.num_tokens && a.weights.bytes > 0; ++t) {
      std::memcpy(weights + t * a.weights.bytes, a.weights.data + t * a.weights.stride,
                  static_cast<size_t>(a.weights.bytes));
    }
    std::copy_n(a.eplb, a.num_eplb, window.eplb(offsets, shape, comm.rank()));
    fence.delay(DelayPoint::kBeforeFlag);
    fence.signal(peer, header);
  }
}

// Steps 5 and 6.
void take(Communicator& comm, const DispatchArgs& a, const ExpertSplit& split, const std::vector<int32_t>& ids,
          const StepHeader& header, HostFence& fence) {
  const WindowShape& shape = comm.shape();
  const Window::Offsets& offsets = comm.offsets();
  const Window own = comm.window(comm.rank());
  const int64_t scale_offset = round_up(a.hidden.bytes, 16);
  const RankMask& mask = fence.mask();
  if (a.tokens_per_rank > 0) {
    std::fill_n(a.routing, a.tokens_per_rank, 0);
    a.routing[0] = static_cast<int32_t>(fence.round() & 0x7FFFFFFF);
  }
  const Receiver receiver(a, split, comm.rank());
  const Source none{{}, {}, {}, ids.data(), nullptr, 0};
  for (int32_t src = 0; src < comm.ep_size(); ++src) {
    if (!HostFence::is_active(mask, src) || !HostFence::is_active(mask, comm.rank())) receiver.receive(src, none);
  }
  if (HostFence::is_active(mask, comm.rank())) {
    receiver.receive(comm.rank(), {a.hidden, a.scale, a.weights, ids.data(), a.eplb, a.num_tokens});
  }
  fence.wait_all(header, [&](int32_t peer, const StepHeader& theirs) {
    fence.delay(DelayPoint::kAfterFlags);
    const char* stage = comm.window(peer).stage(offsets, shape, 0);
    const int64_t stride = shape.dispatch_row_bytes;
    receiver.receive(peer, {{stage, stride, a.hidden.bytes},
                            {stage + scale_offset, stride, a.scale.bytes},
                            {own.weights(offsets, shape, peer), a.weights.bytes, a.weights.bytes},
                            own.ids(offsets, shape, peer),
                            own.eplb(offsets, shape, peer),
                            theirs.tokens});
  });
}

}  // namespace

void dispatch(Communicator& comm, const DispatchArgs& a) {
  check_fits(comm, a);
  const ExpertSplit split(a.num_experts, comm.ep_size());
  const std::vector<int32_t> ids = sanitize_ids(a, split);
  std::vector<char> needed(static_cast<size_t>(a.num_tokens), 0);
  const StepHeader header = step_header(a);
  HostFence fence(comm, OpKind::kDispatch, a, header);
  route_local_tokens(a, ids, split, comm, fence.mask(), needed);
  if (a.phase != Phase::kWait) send(comm, a, ids, needed, header, fence);
  if (a.phase == Phase::kStart) return fence.leave_to_wait(header, a.pending);
  take(comm, a, split, ids, header, fence);
}

}  // namespace moe_ep::cpu
