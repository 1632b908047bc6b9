// Every byte of a rank's symmetric window, walked once. Host, device and the size formula call the same walk.
//
// A window belongs to one rank and is mapped by all its peers. Who writes what:
//   flags, headers, done, ids, weights, eplb, landing   put by peers (row s is written by rank s alone)
//   lamport_*                                           put by peers; two sets, by the parity of the round
//   totals, counters, counted_rows                      put by peers (csrc/transport/counted.h)
//   stage                                               written by the owner, read (get) by peers
// So no two ranks ever write the same byte, and a rank only ever reads its own window and its peers' stages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/ep.h"
#include "csrc/fp8.h"
#include "csrc/routing.h"
#include "csrc/transport/counted.h"
#include "csrc/transport/lamport.h"

namespace moe_ep {

// What two ranks must agree on to share windows.
struct WindowShape {
  int32_t ep_size = 0;            // W
  int32_t max_tokens = 0;         // C
  int32_t max_top_k = 0;          // K the window has room for
  int32_t eplb_experts = 0;       // n the window has room for
  int32_t weight_itemsize = 4;    // bytes of one routing weight
  int32_t flag_blocks = 1;        // flags per peer: one on the host, one per thread block on a GPU
  int32_t lamport_tokens = 0;     // L, the largest R that the Lamport transport takes; 0 = it is off
  int32_t counted_tokens = 0;         // the largest R that counted writes dispatch; 0 = none
  int32_t counted_combine_tokens = 0; // the largest R that they combine
  int64_t dispatch_row_bytes = 0; // B: hidden + scale, each rounded up to 16
  int64_t combine_row_bytes = 0;  // bytes of one landing row, a multiple of 16
  CombineWire wire = CombineWire::kRows;

  MOE_EP_HD int32_t max_targets() const { return max_top_k < ep_size ? max_top_k : ep_size; }  // M
  MOE_EP_HD bool counts() const { return counted_tokens > 0 || counted_combine_tokens > 0; }
  // Vectors of a (source, token) pair, and of a partial, of the Lamport transport.
  MOE_EP_HD int64_t lamport_row_vectors() const { return 128 * lamport_groups(dispatch_row_bytes / 16); }
  MOE_EP_HD int64_t lamport_choice_vectors() const { return lamport_vectors(max_top_k * (4ll + weight_itemsize)); }
  MOE_EP_HD int64_t lamport_partial_vectors() const { return lamport_vectors(combine_row_bytes); }
};

// What a rank says about its step, put beside its flag. Sixteen 32-bit words, so that it is four 16-byte stores.
struct alignas(16) StepHeader {
  int32_t tokens;           // T
  int32_t tokens_per_rank;  // R
  int32_t top_k;            // K (dispatch), M (combine)
  int32_t num_experts;      // E
  int32_t num_eplb;         // n
  int32_t weight_bytes;     // bytes of one row of weights
  int64_t hidden_bytes;     // bytes of one row of hidden_states / expert_output
  int64_t scale_bytes;
  int64_t dispatch_round;   // combine: the round of the dispatch that made its routing
  int64_t element_type;     // combine: ElementType
  int64_t phases;           // ops that make up the step: 1, or 2 (a start and its wait)
};
static_assert(sizeof(StepHeader) == 64);
constexpr int32_t kHeaderWords = sizeof(StepHeader) / 4;
static_assert(kHeaderWords + 1 <= kLamportWords * kLamportHeaderVectors);

// What of it must be equal on all ranks, by index (T may differ); csrc/transport/fence.cpp has their names.
constexpr int32_t kHeaderFields = 10;
MOE_EP_HD int64_t header_field(const StepHeader& h, int32_t field) {
  switch (field) {
    case 0: return h.tokens_per_rank;
    case 1: return h.top_k;
    case 2: return h.num_experts;
    case 3: return h.weight_bytes;
    case 4: return h.hidden_bytes;
    case 5: return h.scale_bytes;
    case 6: return h.num_eplb;
    case 7: return h.dispatch_round;
    case 8: return h.element_type;
    default: return h.phases;
  }
}

MOE_EP_HD StepHeader step_header(const DispatchArgs& a) {
  StepHeader h{};
  h.tokens = a.num_tokens;
  h.tokens_per_rank = a.tokens_per_rank;
  h.top_k = a.top_k;
  h.num_experts = a.num_experts;
  h.num_eplb = a.num_eplb;
  h.weight_bytes = static_cast<int32_t>(a.weights.bytes);
  h.hidden_bytes = a.hidden.bytes;
  h.scale_bytes = a.scale.bytes;
  h.phases = a.phase == Phase::kWhole ? 1 : 2;
  return h;
}
MOE_EP_HD StepHeader step_header(const CombineArgs& a) {
  StepHeader h{};
  h.tokens = a.num_tokens;
  h.tokens_per_rank = a.tokens_per_rank;
  h.top_k = a.max_targets;
  h.hidden_bytes = a.expert_output.bytes;
  h.element_type = static_cast<int64_t>(a.element_type);
  h.dispatch_round = a.tokens_per_rank > 0 ? a.routing[0] : 0;
  h.phases = a.phase == Phase::kWhole ? 1 : 2;
  return h;
}

// A flag word: the round (42 bits: a year of rounds of 7 us), what op it belongs to (2), the sender's T (20). Rounds
// start at 1; a fresh window reads 0.
constexpr int32_t kMaxTokens = (1 << 20) - 1;  // C
MOE_EP_HD uint64_t make_flag(uint64_t round, int32_t kind, int32_t tokens) {
  return round << 22 | static_cast<uint64_t>(kind) << 20 | static_cast<uint64_t>(tokens);
}
MOE_EP_HD uint64_t flag_round(uint64_t flag) { return flag >> 22; }
MOE_EP_HD int32_t flag_kind(uint64_t flag) { return static_cast<int32_t>(flag >> 20 & 3); }
MOE_EP_HD int32_t flag_tokens(uint64_t flag) { return static_cast<int32_t>(flag & kMaxTokens); }

struct Window {
  char* base;

  struct Offsets {
    int64_t flags;    // uint64 [2 parities, flag_blocks, W]
    int64_t done;     // uint64 [W]
    int64_t headers;  // StepHeader [2 parities, W]
    int64_t eplb;     // int32 [W, n]
    int64_t ids;      // int32 [W, C, K]
    int64_t weights;  // [W, C, K] of weight_itemsize
    int64_t stage;    // [C] rows of dispatch_row_bytes
    int64_t landing;  // [C, M] rows of combine_row_bytes
    // LamportVector [2 sets, ...]:
    int64_t lamport_headers;   // [W, kLamportHeaderVectors]
    int64_t lamport_choices;   // [W, L] ids and weights of a token
    int64_t lamport_rows;      // [W, L] rows of a dispatch
    int64_t lamport_partials;  // [L, M] rows of a combine
    int64_t totals;        // uint64 [kCountedBlocks, W]
    int64_t counters;      // uint64 [W, kCountedBlocks], each on 256 bytes
    int64_t counted_rows;  // [W, counted_tokens] rows of dispatch_row_bytes
    int64_t bytes;    // the size is where the walk ends
  };

  // Alignment: every region on 128 bytes, rows on 16.
  static MOE_EP_HD Offsets walk(const WindowShape& s) {
    Offsets o{};
    int64_t at = 0;
    const int64_t w = s.ep_size, c = s.max_tokens;
    // clang-format off
    o.flags = at;    at = round_up(at + 2 * s.flag_blocks * w * 8, 128);
    o.done = at;     at = round_up(at + w * 8, 128);
    o.headers = at;  at = round_up(at + 2 * w * static_cast<int64_t>(sizeof(StepHeader)), 128);
    o.eplb = at;     at = round_up(at + w * s.eplb_experts * 4, 128);
    o.ids = at;      at = round_up(at + w * c * s.max_top_k * 4, 128);
    o.weights = at;  at = round_up(at + w * c * s.max_top_k * s.weight_itemsize, 128);
    o.stage = at;    at = round_up(at + c * s.dispatch_row_bytes, 128);
    o.landing = at;  at = round_up(at + c * s.max_targets() * s.combine_row_bytes, 128);
    const int64_t l = s.lamport_tokens, set = 2 * static_cast<int64_t>(sizeof(LamportVector));
    o.lamport_headers = at;   at = round_up(at + (l > 0 ? set * w * kLamportHeaderVectors : 0), 128);
    o.lamport_choices = at;   at = round_up(at + set * w * l * s.lamport_choice_vectors(), 128);
    o.lamport_rows = at;      at = round_up(at + set * w * l * s.lamport_row_vectors(), 128);
    o.lamport_partials = at;  at = round_up(at + set * l * s.max_targets() * s.lamport_partial_vectors(), 128);
    const int64_t counters = s.counts() ? w * kCountedBlocks : 0, rows = w * s.counted_tokens;
    o.totals = at;        at = round_up(at + counters * 8, s.counts() ? kCounterBytes : 128);
    o.counters = at;      at = round_up(at + counters * kCounterBytes, 128);
    o.counted_rows = at;  at = round_up(at + rows * s.dispatch_row_bytes, 128);
    // clang-format on
    o.bytes = at;
    return o;
  }

  MOE_EP_HD uint64_t* flag(const Offsets& o, const WindowShape& s, uint64_t round, int32_t from,
                           int32_t block = 0) const {
    const int64_t row = static_cast<int64_t>(round & 1) * s.flag_blocks + block;
    return reinterpret_cast<uint64_t*>(base + o.flags) + row * s.ep_size + from;
  }
  MOE_EP_HD uint64_t* done(const Offsets& o, int32_t from) const {
    return reinterpret_cast<uint64_t*>(base + o.done) + from;
  }
  MOE_EP_HD StepHeader* header(const Offsets& o, const WindowShape& s, uint64_t round, int32_t from) const {
    return reinterpret_cast<StepHeader*>(base + o.headers) + static_cast<int64_t>(round & 1) * s.ep_size + from;
  }
  MOE_EP_HD int32_t* eplb(const Offsets& o, const WindowShape& s, int32_t from) const {
    return reinterpret_cast<int32_t*>(base + o.eplb) + static_cast<int64_t>(from) * s.eplb_experts;
  }
  // Rows of ids and weights are packed with the K of the step, so that a step reads one dense block per peer.
  MOE_EP_HD int32_t* ids(const Offsets& o, const WindowShape& s, int32_t from) const {
    return reinterpret_cast<int32_t*>(base + o.ids) + static_cast<int64_t>(from) * s.max_tokens * s.max_top_k;
  }
  MOE_EP_HD char* weights(const Offsets& o, const WindowShape& s, int32_t from) const {
    return base + o.weights + static_cast<int64_t>(from) * s.max_tokens * s.max_top_k * s.weight_itemsize;
  }
  MOE_EP_HD char* stage(const Offsets& o, const WindowShape& s, int32_t token) const {
    return base + o.stage + token * s.dispatch_row_bytes;
  }
  MOE_EP_HD char* landing(const Offsets& o, const WindowShape& s, int32_t token, int32_t slot) const {
    return base + o.landing + (static_cast<int64_t>(token) * s.max_targets() + slot) * s.combine_row_bytes;
  }
  MOE_EP_HD LamportVector* lamport_header(const Offsets& o, const WindowShape& s, uint64_t round, int32_t from) const {
    return vectors(o.lamport_headers) + (set(round) * s.ep_size + from) * kLamportHeaderVectors;
  }
  MOE_EP_HD LamportVector* lamport_choice(const Offsets& o, const WindowShape& s, uint64_t round, int32_t from,
                                          int32_t token) const {
    const int64_t pair = (set(round) * s.ep_size + from) * s.lamport_tokens + token;
    return vectors(o.lamport_choices) + pair * s.lamport_choice_vectors();
  }
  MOE_EP_HD LamportVector* lamport_row(const Offsets& o, const WindowShape& s, uint64_t round, int32_t from,
                                       int32_t token) const {
    const int64_t pair = (set(round) * s.ep_size + from) * s.lamport_tokens + token;
    return vectors(o.lamport_rows) + pair * s.lamport_row_vectors();
  }
  MOE_EP_HD LamportVector* lamport_partial(const Offsets& o, const WindowShape& s, uint64_t round, int32_t token,
                                           int32_t slot) const {
    const int64_t pair = (set(round) * s.lamport_tokens + token) * s.max_targets() + slot;
    return vectors(o.lamport_partials) + pair * s.lamport_partial_vectors();
  }
  MOE_EP_HD uint64_t* total(const Offsets& o, const WindowShape& s, int32_t from, int32_t block) const {
    return reinterpret_cast<uint64_t*>(base + o.totals) + static_cast<int64_t>(block) * s.ep_size + from;
  }
  MOE_EP_HD uint64_t* counter(const Offsets& o, int32_t from, int32_t block) const {
    const int64_t nth = static_cast<int64_t>(from) * kCountedBlocks + block;
    return reinterpret_cast<uint64_t*>(base + o.counters + nth * kCounterBytes);
  }
  MOE_EP_HD char* counted_row(const Offsets& o, const WindowShape& s, int32_t from, int32_t token) const {
    const int64_t pair = static_cast<int64_t>(from) * s.counted_tokens + token;
    return base + o.counted_rows + pair * s.dispatch_row_bytes;
  }

 private:
  static MOE_EP_HD int64_t set(uint64_t round) { return static_cast<int64_t>(round & 1); }
  MOE_EP_HD LamportVector* vectors(int64_t offset) const { return reinterpret_cast<LamportVector*>(base + offset); }
};

}  // namespace moe_ep
