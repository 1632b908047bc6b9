// The CPU column: meta, then the same protocol as on the GPU between processes of one host.
#include <torch/library.h>

#include "ops/columns.h"

namespace moe_ep::ops {
namespace {

meta::DispatchOutputs dispatch_cpu(MOE_EP_DISPATCH_ARGS) {
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS;
  const std::shared_ptr<Communicator> live = ready_to_dispatch(in);
  meta::DispatchOutputs out = meta::dispatch(in);
  guarded([&] {
    Holder holder;
    cpu::dispatch(*live, pack(in, out, holder));
  });
  return out;
}

void launch_combine(const meta::CombineInputs& in, const at::Tensor& out) {
  guarded([&] {
    const auto live = ready(in.comm, OpKind::kCombine, in.ep_size, in.expert_output.device());
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
