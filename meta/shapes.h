// What is known before anything runs: argument checks and output shapes, for symbolic sizes too. The Meta column is
// these functions; every real column calls them first and then launches, so no check or shape stands twice.
// Legend (T, K, H, E, W, R, C, M) as in csrc/ep.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace moe_ep::meta {

// Those of csrc/ep.h, which this room does not see; ops/columns.cpp holds them together.
constexpr int64_t kMaxTopK = 32, kMaxRanks = 256;

// `op` is the name that errors begin with: the op itself, its start or its wait.
struct DispatchInputs {
  const char* op;
  const at::Tensor& hidden_states;                       // [T, *]
  const at::Tensor& topk_ids;                            // [T, K] int32 or int64
  const std::optional<at::Tensor>& topk_weights;         // [T, K] floating point
  const std::optional<at::Tensor>& hidden_states_scale;  // [T, *]
  const at::Tensor& order;                               // [1]
  c10::SymInt tokens_per_rank;                           // R
  int64_t num_experts;                                   // E
  int64_t ep_size;                                       // W
  int64_t invalid_expert_id;
  const std::optional<at::Tensor>& eplb_local_stats;     // [n] int32
  const std::optional<at::Tensor>& active_rank_mask;     // [ceil(W / 64)] uint64 or int64, on the CPU
  int64_t timeout_sec;
  const std::string& comm;
};

// hidden_states [W*R, *], topk_ids [W*R, K] int32, topk_weights [W*R, K], hidden_states_scale [W*R, *],
// eplb_gathered_stats [W, n] int32, routing [1 + W + M, R] int32; an absent one has zero elements.
using DispatchOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct CombineInputs {
  const char* op;
  const at::Tensor& expert_output;  // [W*R, H] bfloat16, float16, float32 or float64
  const at::Tensor& routing;        // [1 + W + M, R] int32
  const at::Tensor& order;          // [1]
  c10::SymInt num_tokens;           // T
  int64_t ep_size;                  // W
  const std::optional<at::Tensor>& active_rank_mask;
  int64_t timeout_sec;
  const std::string& comm;
};

DispatchOutputs dispatch(const DispatchInputs& in);
at::Tensor combine(const CombineInputs& in);  // [T, H]
at::Tensor start(const DispatchInputs& in);   // pending [1] int64
at::Tensor start(const CombineInputs& in);
DispatchOutputs wait(const DispatchInputs& in, const at::Tensor& pending);
at::Tensor wait(const CombineInputs& in, const at::Tensor& pending);
void combine_out(const CombineInputs& in, const at::Tensor& out);

}  // namespace moe_ep::meta
