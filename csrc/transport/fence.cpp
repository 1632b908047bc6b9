#include "csrc/transport/fence.h"

namespace moe_ep {

std::string HostFence::compare(const StepHeader& mine, const StepHeader& theirs, int32_t peer,
                               int32_t their_kind) const {
  const auto sentence = [&](const char* what, const std::string& here, const std::string& there) {
    return std::string(op_name(kind_)) + " round " + std::to_string(round_) + " on communicator '" + comm_.name() +
           "': ranks disagree about " + what + ": rank " + std::to_string(comm_.rank()) + " has " + here + ", rank " +
           std::to_string(peer) + " has " + there + "; it must be the same on every rank";
  };
  if (their_kind != static_cast<int32_t>(kind_)) {
    return sentence("the op", op_name(kind_), op_name(static_cast<OpKind>(their_kind)));
  }
  const struct {
    const char* what;
    int64_t here, there;
  } fields[] = {
      {"tokens_per_rank", mine.tokens_per_rank, theirs.tokens_per_rank},
      {"top_k", mine.top_k, theirs.top_k},
      {"num_experts", mine.num_experts, theirs.num_experts},
      {"the bytes of a row of topk_weights (0 = not passed)", mine.weight_bytes, theirs.weight_bytes},
      {"the bytes of a hidden row", mine.hidden_bytes, theirs.hidden_bytes},
      {"the bytes of a row of hidden_states_scale (0 = not passed)", mine.scale_bytes, theirs.scale_bytes},
      {"the length of eplb_local_stats (0 = not passed)", mine.num_eplb, theirs.num_eplb},
      {"the dispatch whose routing is combined (its round)", mine.dispatch_round, theirs.dispatch_round},
  };
  for (const auto& field : fields) {
    if (field.here != field.there) {
      return sentence(field.what, std::to_string(field.here), std::to_string(field.there));
    }
  }
  return "";
}

}  // namespace moe_ep
