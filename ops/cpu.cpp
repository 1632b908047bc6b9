// The CPU column: meta, then the same protocol as on the GPU between processes of one host.
#include <torch/library.h>

#include "ops/columns.h"

namespace moe_ep::ops {
namespace {

void launch(Communicator& comm, const DispatchArgs& args) { cpu::dispatch(comm, args); }
void launch(Communicator& comm, const CombineArgs& args) { cpu::combine(comm, args); }
constexpr auto launcher = [](Communicator& comm, const auto& args) { launch(comm, args); };

meta::DispatchOutputs dispatch_cpu(MOE_EP_DISPATCH_ARGS) {
  return dispatch_through(MOE_EP_DISPATCH_INPUTS("dispatch"), launcher);
}
at::Tensor dispatch_start_cpu(MOE_EP_DISPATCH_ARGS) {
  return start_through(MOE_EP_DISPATCH_INPUTS("dispatch_start"), launcher);
}
meta::DispatchOutputs dispatch_wait_cpu(MOE_EP_DISPATCH_WAIT_ARGS) {
  return wait_through(MOE_EP_DISPATCH_INPUTS("dispatch_wait"), pending, launcher);
}
at::Tensor combine_cpu(MOE_EP_COMBINE_ARGS) { return combine_through(MOE_EP_COMBINE_INPUTS("combine"), launcher); }
at::Tensor combine_start_cpu(MOE_EP_COMBINE_ARGS) {
  return start_through(MOE_EP_COMBINE_INPUTS("combine_start"), launcher);
}
at::Tensor combine_wait_cpu(MOE_EP_COMBINE_WAIT_ARGS) {
  return wait_through(MOE_EP_COMBINE_INPUTS("combine_wait"), pending, launcher);
}
void combine_out_cpu(MOE_EP_COMBINE_ARGS, at::Tensor& out) {
  combine_out_through(MOE_EP_COMBINE_INPUTS("combine"), out, launcher);
}

TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("dispatch", dispatch_cpu);
  m.impl("dispatch_start", dispatch_start_cpu);
  m.impl("dispatch_wait", dispatch_wait_cpu);
  m.impl("combine", combine_cpu);
  m.impl("combine_start", combine_start_cpu);
  m.impl("combine_wait", combine_wait_cpu);
  m.impl("combine_out", combine_out_cpu);
}

}  // namespace
}  // namespace moe_ep::ops
