#include "ops/columns.h"

#include <ATen/ATen.h>

#include "csrc/limits.h"

namespace moe_ep::ops {
namespace {

static_assert(meta::kMaxTopK == kMaxTopK && meta::kMaxRanks == kMaxRanks);

ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16: return ElementType::kBFloat16;
    case at::kHalf: return ElementType::kFloat16;
    case at::kFloat: return ElementType::kFloat32;
    default: return ElementType::kFloat64;
  }
}

template <class T>
T* data_of(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

std::shared_ptr<Communicator> find_ready(const std::string& comm, OpKind kind, Phase phase, int64_t ep_size,
                                         at::Device device) {
  std::shared_ptr<Communicator> found = find(comm);
  const DeviceKind device_kind = device.is_cuda() ? DeviceKind::kCuda : DeviceKind::kCpu;
  found->check_ready(kind, phase, static_cast<int32_t>(ep_size), device_kind, device.is_cuda() ? device.index() : 0);
  return found;
}

DispatchArgs pack_inputs(const meta::DispatchInputs& in, Holder& holder) {
  DispatchArgs a;
  a.hidden = holder.rows(in.hidden_states);
  if (in.hidden_states_scale) a.scale = holder.rows(*in.hidden_states_scale);
  if (in.topk_weights) a.weights = holder.rows(*in.topk_weights);
  a.topk_ids = in.topk_ids.data_ptr();
  a.ids_row_stride = in.topk_ids.stride(0);
  a.ids_col_stride = in.topk_ids.stride(1);
  a.ids_are_int64 = in.topk_ids.scalar_type() == at::kLong;
  if (in.eplb_local_stats) {
    const at::Tensor& stats = holder.keep(in.eplb_local_stats->contiguous());
    a.eplb = data_of<const int32_t>(stats);
    a.num_eplb = static_cast<int32_t>(stats.size(0));
  }
  const int64_t tokens_per_rank = in.tokens_per_rank.guard_int(__FILE__, __LINE__);
  TORCH_CHECK_VALUE(tokens_per_rank <= INT32_MAX / std::max<int64_t>(in.ep_size, 1), in.op,
                    ": tokens_per_rank: expected ep_size * tokens_per_rank below 2^31, got ", in.ep_size, " * ",
                    tokens_per_rank);
  a.num_tokens = static_cast<int32_t>(in.hidden_states.size(0));
  a.top_k = static_cast<int32_t>(in.topk_ids.size(1));
  a.tokens_per_rank = static_cast<int32_t>(tokens_per_rank);
  a.num_experts = static_cast<int32_t>(in.num_experts);
  a.invalid_expert_id = static_cast<int32_t>(in.invalid_expert_id);
  a.timeout_sec = in.timeout_sec;
  a.mask = pack_mask(in.active_rank_mask, in.ep_size);
  return a;
}

CombineArgs pack_inputs(const meta::CombineInputs& in, Holder& holder) {
  CombineArgs a;
  a.expert_output = holder.rows(in.expert_output);
  const at::Tensor& routing = holder.keep(in.routing.contiguous());
  a.routing = data_of<const int32_t>(routing);
  a.max_targets = static_cast<int32_t>(routing.size(0) - 1 - in.ep_size);
  a.num_tokens = static_cast<int32_t>(in.num_tokens.guard_int(__FILE__, __LINE__));
  a.tokens_per_rank = static_cast<int32_t>(routing.size(1));
  a.hidden_size = in.expert_output.size(1);
  a.element_type = element_type(in.expert_output.scalar_type());
  a.timeout_sec = in.timeout_sec;
  a.mask = pack_mask(in.active_rank_mask, in.ep_size);
  return a;
}

template <class Args>
Args in_phase(Args args, Phase phase, const at::Tensor& pending) {
  args.phase = phase;
  args.pending = data_of<int64_t>(pending);
  return args;
}

}  // namespace

bool has_contiguous_rows(const at::Tensor& tensor) {
  int64_t expected = 1;
  for (int64_t d = tensor.dim() - 1; d >= 1; --d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != expected) return false;
    expected *= tensor.size(d);
  }
  // A negative or overlapping row stride is nothing to write to and rare to read from.
  return tensor.size(0) <= 1 || tensor.stride(0) >= expected;
}

bool overlaps_itself(const at::Tensor& tensor) {
  const int64_t rows = tensor.size(0), columns = tensor.size(1), down = tensor.stride(0), along = tensor.stride(1);
  if (tensor.numel() <= 1) return false;
  if (rows == 1) return along == 0;
  if (columns == 1) return down == 0;
  return down == 0 || along == 0 || (down <= (columns - 1) * along && along <= (rows - 1) * down);
}

const at::Tensor& Holder::keep(at::Tensor tensor) {
  tensors.push_back(std::move(tensor));
  return tensors.back();
}

Rows Holder::rows(const at::Tensor& tensor) {
  const at::Tensor& held = keep(has_contiguous_rows(tensor) ? tensor : tensor.contiguous());
  int64_t elements = 1;
  for (int64_t d = 1; d < held.dim(); ++d) elements *= held.size(d);
  const int64_t itemsize = held.element_size();
  return {data_of<const char>(held), held.stride(0) * itemsize, elements * itemsize};
}

std::shared_ptr<Communicator> ready(const meta::CombineInputs& in, Phase phase) {
  std::shared_ptr<Communicator> live;
  guarded([&] { live = find_ready(in.comm, OpKind::kCombine, phase, in.ep_size, in.expert_output.device()); });
  return live;
}

std::shared_ptr<Communicator> ready(const meta::DispatchInputs& in, Phase phase) {
  std::shared_ptr<Communicator> live;
  guarded([&] {
    live = find_ready(in.comm, OpKind::kDispatch, phase, in.ep_size, in.hidden_states.device());
    check_tokens_per_rank(*live, phase, in.tokens_per_rank.guard_int(__FILE__, __LINE__));
  });
  return live;
}

RankMask pack_mask(const std::optional<at::Tensor>& active_rank_mask, int64_t ep_size) {
  RankMask mask;
  if (!active_rank_mask) return mask;
  TORCH_CHECK_VALUE(active_rank_mask->device().is_cpu(), "active_rank_mask: expected a CPU tensor, got ",
                    active_rank_mask->device());
  const at::Tensor words = active_rank_mask->contiguous();
  mask.given = true;
  std::memcpy(mask.words, words.data_ptr(), static_cast<size_t>((ep_size + 63) / 64) * sizeof(uint64_t));
  return mask;
}

DispatchArgs pack(const meta::DispatchInputs& in, const meta::DispatchOutputs& out, Holder& holder) {
  DispatchArgs a = pack_inputs(in, holder);
  const auto& [hidden, topk_ids, weights, scale, eplb, routing] = out;
  a.out_hidden = data_of<char>(hidden);
  a.out_scale = data_of<char>(scale);
  a.out_weights = data_of<char>(weights);
  a.out_topk_ids = data_of<int32_t>(topk_ids);
  a.out_eplb = data_of<int32_t>(eplb);
  a.routing = data_of<int32_t>(routing);
  return a;
}

CombineArgs pack(const meta::CombineInputs& in, const at::Tensor& out, Holder& holder) {
  CombineArgs a = pack_inputs(in, holder);
  a.out = data_of<char>(out);
  a.out_stride = out.stride(0) * out.element_size();
  return a;
}

DispatchArgs pack_start(const meta::DispatchInputs& in, const at::Tensor& pending, Holder& holder) {
  return in_phase(pack_inputs(in, holder), Phase::kStart, pending);
}
CombineArgs pack_start(const meta::CombineInputs& in, const at::Tensor& pending, Holder& holder) {
  return in_phase(pack_inputs(in, holder), Phase::kStart, pending);
}
DispatchArgs pack_wait(const meta::DispatchInputs& in, const at::Tensor& pending, const meta::DispatchOutputs& out,
                       Holder& holder) {
  return in_phase(pack(in, out, holder), Phase::kWait, pending);
}
CombineArgs pack_wait(const meta::CombineInputs& in, const at::Tensor& pending, const at::Tensor& out, Holder& holder) {
  return in_phase(pack(in, out, holder), Phase::kWait, pending);
}

}  // namespace moe_ep::ops
