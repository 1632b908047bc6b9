// The CPU column: meta, then the same protocol as on the GPU between processes of one host.
#include <torch/library.h>

#include "csrc/limits.h"
#include "ops/columns.h"

namespace moe_ep::ops {
namespace {

std::shared_ptr<Communicator> ready(const std::string& comm, OpKind kind, int64_t ep_size) {
  std::shared_ptr<Communicator> found = find(comm);
  found->check_ready(kind, static_cast<int32_t>(ep_size), DeviceKind::kCpu, 0);
  return found;
}

meta::DispatchOutputs dispatch_cpu(MOE_EP_DISPATCH_ARGS) {
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS;
  std::shared_ptr<Communicator> live;
  guarded([&] {
    live = ready(comm, OpKind::kDispatch, ep_size);
    check_tokens_per_rank(*live, tokens_per_rank.guard_int(__FILE__, __LINE__));
  });
  meta::DispatchOutputs out = meta::dispatch(in);
  guarded([&] {
    Holder holder;
    cpu::dispatch(*live, pack(in, out, holder));
  });
  return out;
}

void launch_combine(const meta::CombineInputs& in, const at::Tensor& out) {
  guarded([&] {
    const auto live = ready(in.comm, OpKind::kCombine, in.ep_size);
    Holder holder;
    cpu::combine(*live, pack(in, out, holder));
  });
}

at::Tensor combine_cpu(MOE_EP_COMBINE_ARGS) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS;
  at::Tensor out = meta::combine(in);
  launch_combine(in, out);
  return out;
}

void combine_out_cpu(MOE_EP_COMBINE_ARGS, at::Tensor& out) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS;
  combine_out_through(in, out, launch_combine);
}

TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("dispatch", dispatch_cpu);
  m.impl("combine", combine_cpu);
  m.impl("combine_out", combine_out_cpu);
}

}  // namespace
}  // namespace moe_ep::ops
