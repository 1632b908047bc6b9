#include "csrc/transport/fence.h"

namespace moe_ep {

std::atomic<InterruptCheck>& interrupt_check() {
  static std::atomic<InterruptCheck> check{nullptr};
  return check;
}

static const char* const kFieldNames[kHeaderFields] = {
    "tokens_per_rank",
    "top_k",
    "num_experts",
    "the bytes of a row of topk_weights (0 = not passed)",
    "the bytes of a hidden row",
    "the bytes of a row of hidden_states_scale (0 = not passed)",
    "the length of eplb_local_stats (0 = not passed)",
    "the dispatch whose routing is combined (its round)",
    "the dtype of expert_output (0 bfloat16, 1 float16, 2 float32, 3 float64)",
    "the form of the step (1 op, or 2: a start and its wait)",
};

std::string disagreement_text(const Communicator& comm, OpKind kind, uint64_t round, int32_t peer, int32_t field,
                              int64_t mine, int64_t theirs) {
  const auto value = [&](int64_t v) {
    return field < 0 ? std::string(op_name(static_cast<OpKind>(v))) : std::to_string(v);
  };
  return std::string(op_name(kind)) + " round " + std::to_string(round) + " on communicator '" + comm.name() +
         "': ranks disagree about " + (field < 0 ? "the op" : kFieldNames[field]) + ": rank " +
         std::to_string(comm.rank()) + " has " + value(mine) + ", rank " + std::to_string(peer) + " has " +
         value(theirs) + "; it must be the same on every rank";
}

std::string timeout_text(const Communicator& comm, OpKind kind, uint64_t round, int32_t peer, const std::string& what,
                         int64_t timeout_sec) {
  return std::string(op_name(kind)) + " round " + std::to_string(round) + " on rank " + std::to_string(comm.rank()) +
         " of communicator '" + comm.name() + "' waited " + std::to_string(timeout_sec) + " s (timeout_sec) for rank " +
         std::to_string(peer) + ": no " + what + " came; that rank has died, hangs, or issued fewer ops";
}

std::string unusable_text(const Communicator& comm, OpKind kind, const std::string& failure) {
  return std::string(op_name(kind)) + ": communicator '" + comm.name() + "' cannot be used again after: " + failure +
         "; destroy it on every rank and create a new one";
}

std::string misuse_text(const Communicator& comm, OpKind kind, Phase phase, int32_t started, uint64_t round,
                        int64_t pending) {
  const std::string where = std::string(op_name(kind, phase)) + ": ";
  const std::string communicator = "communicator '" + comm.name() + "' ";
  if (started == 0) {
    return where + communicator + "has nothing to wait for; issue " + op_name(kind, Phase::kStart) + " first";
  }
  const auto kind_started = static_cast<OpKind>(started);
  const std::string start =
      std::string(op_name(kind_started, Phase::kStart)) + " (round " + std::to_string(round) + ")";
  if (phase == Phase::kWait && kind == kind_started) {
    return where + "pending: expected that of the last " + start + ", got that of round " + std::to_string(pending);
  }
  return where + communicator + "is between " + start + " and its " + op_name(kind_started, Phase::kWait) +
         "; issue that first";
}

std::string HostFence::find_misuse(const StepHeader& header, int64_t pending) const {
  const auto& started = state_.started;
  const int32_t kind = started.round == 0 ? 0 : static_cast<int32_t>(started.kind);
  const bool waits = phase_ == Phase::kWait;
  if (waits ? kind != static_cast<int32_t>(kind_) || static_cast<uint64_t>(pending) != started.round : kind != 0) {
    return misuse_text(comm_, kind_, phase_, kind, started.round, pending);
  }
  if (!waits) return "";
  const auto differs = [&](const std::string& what, int64_t then, int64_t now) {
    return std::string(op_name(kind_, phase_)) + ": " + what + ": expected " + std::to_string(then) + " as in " +
           op_name(kind_, Phase::kStart) + ", got " + std::to_string(now) + "; pass both the same arguments";
  };
  for (int32_t field = 0; field < kHeaderFields; ++field) {
    const int64_t then = header_field(started.header, field), now = header_field(header, field);
    if (then != now) return differs(kFieldNames[field], then, now);
  }
  if (started.header.tokens != header.tokens) {
    return differs("the number of tokens", started.header.tokens, header.tokens);
  }
  return "";
}

std::string HostFence::compare(const StepHeader& mine, const StepHeader& theirs, int32_t peer,
                               int32_t their_kind) const {
  if (their_kind != static_cast<int32_t>(kind_)) {
    return disagreement_text(comm_, kind_, round_, peer, -1, static_cast<int64_t>(kind_), their_kind);
  }
  for (int32_t field = 0; field < kHeaderFields; ++field) {
    const int64_t here = header_field(mine, field), there = header_field(theirs, field);
    if (here != there) return disagreement_text(comm_, kind_, round_, peer, field, here, there);
  }
  return "";
}

}  // namespace moe_ep
