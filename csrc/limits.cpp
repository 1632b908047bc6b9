#include "csrc/limits.h"

namespace moe_ep {
namespace {

class Check {
 public:
  Check(const Communicator& comm, OpKind kind, Phase phase) : comm_(comm), kind_(kind), phase_(phase) {}

  // value <= limit, or a sentence.
  void at_most(int64_t value, int64_t limit, const char* argument, const char* remedy) const {
    if (value <= limit) return;
    fail(std::string(argument) + ": communicator '" + comm_.name() + "' has room for " + std::to_string(limit) +
         ", got " + std::to_string(value) + "; " + remedy);
  }

  void mask(const RankMask& mask) const {
    if (mask.given && !comm_.options().enable_rank_mask) {
      fail("active_rank_mask: communicator '" + comm_.name() +
           "' was made without rank masks; create it with enable_rank_mask=True");
    }
  }

  [[noreturn]] void fail(const std::string& text) const {
    throw ArgumentError(std::string(op_name(kind_, phase_)) + ": " + text);
  }

 private:
  const Communicator& comm_;
  OpKind kind_;
  Phase phase_;
};

}  // namespace

void check_tokens_per_rank(const Communicator& comm, Phase phase, int64_t tokens_per_rank) {
  Check(comm, OpKind::kDispatch, phase)
      .at_most(tokens_per_rank, comm.shape().max_tokens, "tokens_per_rank", "raise max_tokens_per_rank");
}

void check_fits(const Communicator& comm, const DispatchArgs& a) {
  const WindowShape& shape = comm.shape();
  const Check check(comm, OpKind::kDispatch, a.phase);
  check_tokens_per_rank(comm, a.phase, a.tokens_per_rank);
  check.at_most(a.top_k, shape.max_top_k, "topk_ids: top_k", "raise top_k of the communicator");
  check.at_most(round_up(a.hidden.bytes, 16) + round_up(a.scale.bytes, 16), shape.dispatch_row_bytes,
                "hidden_states: bytes per row, hidden_states_scale included (each rounded up to 16)",
                "raise hidden_size, or choose the dispatch_format or extra_payload_bytes_per_token that fits");
  check.at_most(a.weights.bytes, static_cast<int64_t>(shape.max_top_k) * shape.weight_itemsize,
                "topk_weights: bytes per row", "pass weights of a narrower dtype");
  check.at_most(a.num_eplb, shape.eplb_experts, "eplb_local_stats: entries",
                "create the communicator with eplb_stats_num_experts");
  check.mask(a.mask);
}

void check_fits(const Communicator& comm, const CombineArgs& a) {
  const WindowShape& shape = comm.shape();
  const Check check(comm, OpKind::kCombine, a.phase);
  check.at_most(a.tokens_per_rank, shape.max_tokens, "expert_output: rows per rank", "raise max_tokens_per_rank");
  check.at_most(a.max_targets, shape.max_targets(), "routing: targets per token",
                "pass the routing of a dispatch on this communicator");
  if (shape.wire != CombineWire::kRows && a.element_type == ElementType::kFloat64) {
    check.fail(
        "expert_output: float64 rows do not travel as FP8; pass float32 or create the communicator without "
        "use_low_precision_combine");
  }
  check.at_most(shape.wire == CombineWire::kRows ? a.expert_output.bytes : fp8_row_bytes(a.hidden_size),
                shape.combine_row_bytes, "expert_output: bytes per row",
                "raise hidden_size or dtype of the communicator");
  check.mask(a.mask);
}

}  // namespace moe_ep
