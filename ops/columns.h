// The signatures of schema.cpp, and what every column does with them: pack one struct, translate errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/communicator.h"
#include "csrc/ep.h"
#include "meta/shapes.h"

#define MOE_EP_DISPATCH_TENSORS                                                                                        \
  const at::Tensor &hidden_states, const at::Tensor &topk_ids, const std::optional<at::Tensor>&topk_weights,           \
      const std::optional<at::Tensor>&hidden_states_scale
#define MOE_EP_DISPATCH_OPTIONS                                                                                        \
  at::Tensor &order, c10::SymInt tokens_per_rank, int64_t num_experts, int64_t ep_size, int64_t invalid_expert_id,     \
      const std::optional<at::Tensor>&eplb_local_stats, const std::optional<at::Tensor>&active_rank_mask,              \
      int64_t timeout_sec, std::string comm
#define MOE_EP_DISPATCH_ARGS MOE_EP_DISPATCH_TENSORS, MOE_EP_DISPATCH_OPTIONS
#define MOE_EP_DISPATCH_WAIT_ARGS                                                                                      \
  MOE_EP_DISPATCH_TENSORS, const at::Tensor &pending, const std::optional<at::Tensor>&after, MOE_EP_DISPATCH_OPTIONS
#define MOE_EP_DISPATCH_INPUTS(op)                                                                                     \
  moe_ep::meta::DispatchInputs {                                                                                       \
    op, hidden_states, topk_ids, topk_weights, hidden_states_scale, order, tokens_per_rank, num_experts, ep_size,      \
        invalid_expert_id, eplb_local_stats, active_rank_mask, timeout_sec, comm                                       \
  }
#define MOE_EP_COMBINE_OPTIONS                                                                                         \
  at::Tensor &order, c10::SymInt num_tokens, int64_t ep_size, const std::optional<at::Tensor>&active_rank_mask,        \
      int64_t timeout_sec, std::string comm
#define MOE_EP_COMBINE_ARGS const at::Tensor &expert_output, const at::Tensor &routing, MOE_EP_COMBINE_OPTIONS
#define MOE_EP_COMBINE_WAIT_ARGS                                                                                       \
  const at::Tensor &expert_output, const at::Tensor &routing, const at::Tensor &pending,                               \
      const std::optional<at::Tensor>&after, MOE_EP_COMBINE_OPTIONS
#define MOE_EP_COMBINE_INPUTS(op)                                                                                      \
  moe_ep::meta::CombineInputs {                                                                                        \
    op, expert_output, routing, order, num_tokens, ep_size, active_rank_mask, timeout_sec, comm                        \
  }

namespace moe_ep::ops {

// Tensors whose storage a packed struct points into. Keep it until the launch.
struct Holder {
  std::vector<at::Tensor> tensors;
  // The tensor as rows of contiguous bytes; copied only where the bytes of a row are not contiguous.
  Rows rows(const at::Tensor& tensor);
  // Keeps a tensor alive.
  const at::Tensor& keep(at::Tensor tensor);
};

RankMask pack_mask(const std::optional<at::Tensor>& active_rank_mask, int64_t ep_size);
DispatchArgs pack(const meta::DispatchInputs& in, const meta::DispatchOutputs& out, Holder& holder);
CombineArgs pack(const meta::CombineInputs& in, const at::Tensor& out, Holder& holder);
// Of a start, which has no outputs but `pending`, and of its wait.
DispatchArgs pack_start(const meta::DispatchInputs& in, const at::Tensor& pending, Holder& holder);
CombineArgs pack_start(const meta::CombineInputs& in, const at::Tensor& pending, Holder& holder);
DispatchArgs pack_wait(const meta::DispatchInputs& in, const at::Tensor& pending, const meta::DispatchOutputs& out,
                       Holder& holder);
CombineArgs pack_wait(const meta::CombineInputs& in, const at::Tensor& pending, const at::Tensor& out, Holder& holder);
// Whether combine can write rows of `out` in place.
bool has_contiguous_rows(const at::Tensor& tensor);
// Whether elements of a 2-dimensional tensor may share memory.
bool overlaps_itself(const at::Tensor& tensor);

// Runs the launch; csrc's exceptions become ValueError (nothing was sent) or RuntimeError.
template <class Launch>
void guarded(const Launch& launch) {
  try {
    launch();
  } catch (const ArgumentError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const Error& error) {
    TORCH_CHECK(false, error.what());
  }
}

// The live communicator of a call, checked against what the graph was traced for.
std::shared_ptr<Communicator> ready(const meta::CombineInputs& in, Phase phase = Phase::kWhole);
// Before a dispatch's outputs are allocated: an R beyond the capacity is no reason to run out of memory.
std::shared_ptr<Communicator> ready(const meta::DispatchInputs& in, Phase phase = Phase::kWhole);

// `packed` makes the arguments; the holder lives until they are launched.
template <class Launch, class Packed>
void launch_packed(Communicator& live, const Launch& launch, const Packed& packed) {
  guarded([&] {
    Holder holder;
    launch(live, packed(holder));
  });
}

// The ops of a column, which launches packed arguments by launch(live, args). A dispatch looks for its communicator
// before its outputs are made, see ready(); a combine has its arguments checked first.
template <class Launch>
meta::DispatchOutputs dispatch_through(const meta::DispatchInputs& in, const Launch& launch) {
  const std::shared_ptr<Communicator> live = ready(in);
  meta::DispatchOutputs out = meta::dispatch(in);
  launch_packed(*live, launch, [&](Holder& holder) { return pack(in, out, holder); });
  return out;
}

template <class Launch>
at::Tensor start_through(const meta::DispatchInputs& in, const Launch& launch) {
  const std::shared_ptr<Communicator> live = ready(in, Phase::kStart);
  at::Tensor pending = meta::start(in);
  launch_packed(*live, launch, [&](Holder& holder) { return pack_start(in, pending, holder); });
  return pending;
}

template <class Launch>
meta::DispatchOutputs wait_through(const meta::DispatchInputs& in, const at::Tensor& pending, const Launch& launch) {
  const std::shared_ptr<Communicator> live = ready(in, Phase::kWait);
  meta::DispatchOutputs out = meta::wait(in, pending);
  launch_packed(*live, launch, [&](Holder& holder) { return pack_wait(in, pending, out, holder); });
  return out;
}

template <class Launch>
void combine_into(const meta::CombineInputs& in, const at::Tensor& out, const Launch& launch) {
  const std::shared_ptr<Communicator> live = ready(in);
  launch_packed(*live, launch, [&](Holder& holder) { return pack(in, out, holder); });
}

template <class Launch>
at::Tensor combine_through(const meta::CombineInputs& in, const Launch& launch) {
  at::Tensor out = meta::combine(in);
  combine_into(in, out, launch);
  return out;
}

template <class Launch>
at::Tensor start_through(const meta::CombineInputs& in, const Launch& launch) {
  at::Tensor pending = meta::start(in);
  const std::shared_ptr<Communicator> live = ready(in, Phase::kStart);
  launch_packed(*live, launch, [&](Holder& holder) { return pack_start(in, pending, holder); });
  return pending;
}

template <class Launch>
at::Tensor wait_through(const meta::CombineInputs& in, const at::Tensor& pending, const Launch& launch) {
  at::Tensor out = meta::wait(in, pending);
  const std::shared_ptr<Communicator> live = ready(in, Phase::kWait);
  launch_packed(*live, launch, [&](Holder& holder) { return pack_wait(in, pending, out, holder); });
  return out;
}

// combine_out of a column: straight into `out` where its rows allow it and are nobody's input, else through a fresh
// tensor.
template <class Launch>
void combine_out_through(const meta::CombineInputs& in, at::Tensor& out, const Launch& launch) {
  meta::combine_out(in, out);
  TORCH_CHECK_VALUE(!overlaps_itself(out), "combine_out: out: expected elements that do not share memory, got strides ",
                    out.strides());
  if (has_contiguous_rows(out) && !out.is_alias_of(in.expert_output)) {
    combine_into(in, out, launch);
  } else {
    const at::Tensor rows = meta::combine(in);
    combine_into(in, rows, launch);
    out.copy_(rows);
  }
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();  // autograd may have saved it
}

}  // namespace moe_ep::ops
