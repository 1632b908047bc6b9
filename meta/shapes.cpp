#include "meta/shapes.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace moe_ep::meta {
namespace {

// A condition on sizes: true or false for numbers, an assumption recorded in the graph for symbols. Never an `if`.
#define CHECK_SIZE(cond, ...) TORCH_CHECK_VALUE((cond).expect_true(__FILE__, __LINE__), __VA_ARGS__)

void check_common(const char* op, const at::Tensor& order, int64_t ep_size,
                  const std::optional<at::Tensor>& active_rank_mask, int64_t timeout_sec, const std::string& comm) {
  TORCH_CHECK_VALUE(!comm.empty(), op, ": comm: expected the name of a communicator, got ''");
  TORCH_CHECK_VALUE(ep_size >= 1 && ep_size <= kMaxRanks, op, ": ep_size: expected 1..", kMaxRanks, ", got ", ep_size);
  TORCH_CHECK_VALUE(timeout_sec >= 1, op, ": timeout_sec: expected at least 1 second, got ", timeout_sec);
  TORCH_CHECK_VALUE(order.dim() == 1, op, ": order: expected the communicator's 1-element tensor, got ", order.dim(),
                    " dimensions");
  CHECK_SIZE(order.sym_size(0).sym_eq(1), op, ": order: expected 1 element, got ", order.sym_size(0));
  if (active_rank_mask.has_value()) {
    const auto type = active_rank_mask->scalar_type();
    TORCH_CHECK_TYPE(type == at::kUInt64 || type == at::kLong, op, ": active_rank_mask: expected uint64, got ", type);
    // Without dimensions: the one word of up to 64 ranks. Tracing beside CUDA tensors takes CPU scalars only.
    const bool scalar = active_rank_mask->dim() == 0 && ep_size <= 64;
    TORCH_CHECK_VALUE(active_rank_mask->dim() == 1 || scalar, op, ": active_rank_mask: expected 1 dimension",
                      ep_size <= 64 ? " or none" : "", ", got ", active_rank_mask->dim());
    // A mask on the meta device would send the whole call there.
    TORCH_CHECK_VALUE(!active_rank_mask->is_meta() || order.is_meta(), op,
                      ": active_rank_mask: expected a CPU tensor, got ", active_rank_mask->device());
    if (!scalar) {
      CHECK_SIZE(active_rank_mask->sym_size(0).sym_eq((ep_size + 63) / 64), op, ": active_rank_mask: expected ",
                 (ep_size + 63) / 64, " words for ep_size ", ep_size, ", got ", active_rank_mask->sym_size(0));
    }
  }
}

void check_same_device(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& reference,
                       const char* reference_name) {
  TORCH_CHECK_VALUE(tensor.device() == reference.device(), op, ": ", name, ": expected device ", reference.device(),
                    " (that of ", reference_name, "), got ", tensor.device());
}

c10::SymDimVector with_rows(const at::Tensor& tensor, const c10::SymInt& rows) {
  c10::SymDimVector sizes(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  sizes[0] = rows;
  return sizes;
}

void check_dispatch(const DispatchInputs& in) {
  const char* op = in.op;
  check_common(op, in.order, in.ep_size, in.active_rank_mask, in.timeout_sec, in.comm);
  TORCH_CHECK_VALUE(in.num_experts >= 1 && in.num_experts <= INT32_MAX, op,
                    ": num_experts: expected 1..2147483647, got ", in.num_experts);
  TORCH_CHECK_VALUE(in.invalid_expert_id < 0 || in.invalid_expert_id >= in.num_experts, op,
                    ": invalid_expert_id: expected a value outside [0, num_experts=", in.num_experts, "), got ",
                    in.invalid_expert_id);
  TORCH_CHECK_VALUE(in.invalid_expert_id >= INT32_MIN && in.invalid_expert_id <= INT32_MAX, op,
                    ": invalid_expert_id: expected a 32-bit value, got ", in.invalid_expert_id);
  TORCH_CHECK_VALUE(in.hidden_states.dim() >= 2, op,
                    ": hidden_states: expected [T, *] with at least 2 dimensions, got ", in.hidden_states.dim());
  TORCH_CHECK_VALUE(in.topk_ids.dim() == 2, op, ": topk_ids: expected [T, K], got ", in.topk_ids.dim(), " dimensions");
  const auto id_type = in.topk_ids.scalar_type();
  TORCH_CHECK_TYPE(id_type == at::kInt || id_type == at::kLong, op, ": topk_ids: expected int32 or int64, got ",
                   id_type);
  const c10::SymInt tokens = in.hidden_states.sym_size(0), top_k = in.topk_ids.sym_size(1);
  CHECK_SIZE(in.topk_ids.sym_size(0).sym_eq(tokens), op, ": topk_ids: expected ", tokens,
             " rows (those of hidden_states), got ", in.topk_ids.sym_size(0));
  CHECK_SIZE(top_k.sym_ge(1), op, ": topk_ids: expected K in 1..", kMaxTopK, ", got ", top_k);
  CHECK_SIZE(top_k.sym_le(kMaxTopK), op, ": topk_ids: expected K in 1..", kMaxTopK, ", got ", top_k);
  CHECK_SIZE(tokens.sym_le(in.tokens_per_rank), op, ": tokens_per_rank: expected at least the ", tokens,
             " rows of hidden_states, got ", in.tokens_per_rank);
  check_same_device(op, "topk_ids", in.topk_ids, in.hidden_states, "hidden_states");
  check_same_device(op, "order", in.order, in.hidden_states, "hidden_states");
  if (in.topk_weights.has_value()) {
    const at::Tensor& weights = *in.topk_weights;
    TORCH_CHECK_TYPE(at::isFloatingType(weights.scalar_type()), op,
                     ": topk_weights: expected a floating-point dtype, got ", weights.scalar_type());
    TORCH_CHECK_VALUE(weights.dim() == 2, op, ": topk_weights: expected [T, K], got ", weights.dim(), " dimensions");
    CHECK_SIZE(weights.sym_size(0).sym_eq(tokens), op, ": topk_weights: expected ", tokens, " rows, got ",
               weights.sym_size(0));
    CHECK_SIZE(weights.sym_size(1).sym_eq(top_k), op, ": topk_weights: expected K = ", top_k, " columns, got ",
               weights.sym_size(1));
    check_same_device(op, "topk_weights", weights, in.hidden_states, "hidden_states");
  }
  if (in.hidden_states_scale.has_value()) {
    const at::Tensor& scale = *in.hidden_states_scale;
    TORCH_CHECK_VALUE(scale.dim() >= 1, op, ": hidden_states_scale: expected [T, *], got a scalar");
    CHECK_SIZE(scale.sym_size(0).sym_eq(tokens), op, ": hidden_states_scale: expected ", tokens, " rows, got ",
               scale.sym_size(0));
    check_same_device(op, "hidden_states_scale", scale, in.hidden_states, "hidden_states");
  }
  if (in.eplb_local_stats.has_value()) {
    TORCH_CHECK_TYPE(in.eplb_local_stats->scalar_type() == at::kInt, op, ": eplb_local_stats: expected int32, got ",
                     in.eplb_local_stats->scalar_type());
    TORCH_CHECK_VALUE(in.eplb_local_stats->dim() == 1, op, ": eplb_local_stats: expected [n], got ",
                      in.eplb_local_stats->dim(), " dimensions");
    check_same_device(op, "eplb_local_stats", *in.eplb_local_stats, in.hidden_states, "hidden_states");
  }
}

void check_combine(const CombineInputs& in) {
  const char* op = in.op;
  check_common(op, in.order, in.ep_size, in.active_rank_mask, in.timeout_sec, in.comm);
  const auto type = in.expert_output.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBFloat16 || type == at::kHalf || type == at::kFloat || type == at::kDouble, op,
                   ": expert_output: expected bfloat16, float16, float32 or float64, got ", type);
  TORCH_CHECK_VALUE(in.expert_output.dim() == 2, op, ": expert_output: expected [W*R, H], got ", in.expert_output.dim(),
                    " dimensions");
  TORCH_CHECK_TYPE(in.routing.scalar_type() == at::kInt, op, ": routing: expected the int32 tensor of a dispatch, got ",
                   in.routing.scalar_type());
  TORCH_CHECK_VALUE(in.routing.dim() == 2, op, ": routing: expected the 2-dimensional tensor of a dispatch, got ",
                    in.routing.dim(), " dimensions");
  CHECK_SIZE(in.routing.sym_size(0).sym_ge(2 + in.ep_size), op, ": routing: expected 1 + ep_size + M rows, got ",
             in.routing.sym_size(0), " for ep_size ", in.ep_size,
             "; pass the routing of a dispatch of the same ep_size");
  const c10::SymInt tokens_per_rank = in.routing.sym_size(1);
  CHECK_SIZE(in.expert_output.sym_size(0).sym_eq(tokens_per_rank * in.ep_size), op,
             ": expert_output: expected one row per row received, ep_size * tokens_per_rank = ",
             tokens_per_rank * in.ep_size, ", got ", in.expert_output.sym_size(0));
  CHECK_SIZE(in.num_tokens.sym_ge(0), op, ": num_tokens: expected at least 0, got ", in.num_tokens);
  CHECK_SIZE(in.num_tokens.sym_le(tokens_per_rank), op,
             ": num_tokens: expected at most tokens_per_rank = ", tokens_per_rank, ", got ", in.num_tokens);
  check_same_device(op, "routing", in.routing, in.expert_output, "expert_output");
  check_same_device(op, "order", in.order, in.expert_output, "expert_output");
}

void check_pending(const char* op, const at::Tensor& pending, const at::Tensor& reference, const char* reference_name) {
  TORCH_CHECK_TYPE(pending.scalar_type() == at::kLong, op, ": pending: expected the int64 tensor of the start, got ",
                   pending.scalar_type());
  TORCH_CHECK_VALUE(pending.dim() == 1, op, ": pending: expected 1 dimension, got ", pending.dim());
  CHECK_SIZE(pending.sym_size(0).sym_eq(1), op, ": pending: expected 1 element, got ", pending.sym_size(0));
  check_same_device(op, "pending", pending, reference, reference_name);
}

at::Tensor make_pending(const at::Tensor& reference) {
  return reference.new_empty({1}, reference.options().dtype(at::kLong));
}

}  // namespace

DispatchOutputs dispatch(const DispatchInputs& in) {
  check_dispatch(in);
  const at::Tensor& hidden = in.hidden_states;
  const c10::SymInt rows = in.tokens_per_rank * in.ep_size, top_k = in.topk_ids.sym_size(1);
  const auto ints = hidden.options().dtype(at::kInt);
  const auto absent = [&] { return hidden.new_empty({0}); };
  return {
      hidden.new_empty_symint(with_rows(hidden, rows)),
      hidden.new_empty_symint({rows, top_k}, ints),
      in.topk_weights ? in.topk_weights->new_empty_symint({rows, top_k}) : absent(),
      in.hidden_states_scale ? in.hidden_states_scale->new_empty_symint(with_rows(*in.hidden_states_scale, rows))
                             : absent(),
      in.eplb_local_stats ? hidden.new_empty_symint({in.ep_size, in.eplb_local_stats->sym_size(0)}, ints)
                          : hidden.new_empty({0}, ints),
      hidden.new_empty_symint({top_k.min(in.ep_size) + (1 + in.ep_size), in.tokens_per_rank}, ints),
  };
}

at::Tensor combine(const CombineInputs& in) {
  check_combine(in);
  return in.expert_output.new_empty_symint({in.num_tokens, in.expert_output.sym_size(1)});
}

at::Tensor start(const DispatchInputs& in) {
  check_dispatch(in);
  return make_pending(in.hidden_states);
}

at::Tensor start(const CombineInputs& in) {
  check_combine(in);
  return make_pending(in.expert_output);
}

DispatchOutputs wait(const DispatchInputs& in, const at::Tensor& pending) {
  check_pending(in.op, pending, in.hidden_states, "hidden_states");
  return dispatch(in);
}

at::Tensor wait(const CombineInputs& in, const at::Tensor& pending) {
  check_pending(in.op, pending, in.expert_output, "expert_output");
  return combine(in);
}

void combine_out(const CombineInputs& in, const at::Tensor& out) {
  check_combine(in);
  TORCH_CHECK_TYPE(out.scalar_type() == in.expert_output.scalar_type(), "combine_out: out: expected ",
                   in.expert_output.scalar_type(), " (that of expert_output), got ", out.scalar_type());
  TORCH_CHECK_VALUE(out.dim() == 2, "combine_out: out: expected [T, H], got ", out.dim(), " dimensions");
  CHECK_SIZE(out.sym_size(0).sym_eq(in.num_tokens), "combine_out: out: expected num_tokens = ", in.num_tokens,
             " rows, got ", out.sym_size(0));
  CHECK_SIZE(out.sym_size(1).sym_eq(in.expert_output.sym_size(1)), "combine_out: out: expected ",
             in.expert_output.sym_size(1), " columns (those of expert_output), got ", out.sym_size(1));
  check_same_device("combine_out", "out", out, in.expert_output, "expert_output");
}

}  // namespace moe_ep::meta
