// The CUDA column: meta, then one kernel on the current stream. The stream is reached through c10's generic guard, so
// that this file compiles against any torch wheel, also one without CUDA.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "csrc/cuda/launch.h"
#include "ops/columns.h"

namespace moe_ep::ops {
namespace {

void* current_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStream(device).native_handle();
}

// On the current stream of a device, which is the current one while this lives.
class Launcher {
 public:
  explicit Launcher(at::Device device) : device_(device), guard_(device) {}
  void operator()(Communicator& comm, const DispatchArgs& args) const {
    cuda::dispatch(comm, args, current_stream(device_));
  }
  void operator()(Communicator& comm, const CombineArgs& args) const {
    cuda::combine(comm, args, current_stream(device_));
  }

 private:
  at::Device device_;
  c10::DeviceGuard guard_;
};

meta::DispatchOutputs dispatch_cuda(MOE_EP_DISPATCH_ARGS) {
  return dispatch_through(MOE_EP_DISPATCH_INPUTS("dispatch"), Launcher(hidden_states.device()));
}
at::Tensor dispatch_start_cuda(MOE_EP_DISPATCH_ARGS) {
  return start_through(MOE_EP_DISPATCH_INPUTS("dispatch_start"), Launcher(hidden_states.device()));
}
meta::DispatchOutputs dispatch_wait_cuda(MOE_EP_DISPATCH_WAIT_ARGS) {
  return wait_through(MOE_EP_DISPATCH_INPUTS("dispatch_wait"), pending, Launcher(hidden_states.device()));
}
at::Tensor combine_cuda(MOE_EP_COMBINE_ARGS) {
  return combine_through(MOE_EP_COMBINE_INPUTS("combine"), Launcher(expert_output.device()));
}
at::Tensor combine_start_cuda(MOE_EP_COMBINE_ARGS) {
  return start_through(MOE_EP_COMBINE_INPUTS("combine_start"), Launcher(expert_output.device()));
}
at::Tensor combine_wait_cuda(MOE_EP_COMBINE_WAIT_ARGS) {
  return wait_through(MOE_EP_COMBINE_INPUTS("combine_wait"), pending, Launcher(expert_output.device()));
}
void combine_out_cuda(MOE_EP_COMBINE_ARGS, at::Tensor& out) {
  combine_out_through(MOE_EP_COMBINE_INPUTS("combine"), out, Launcher(expert_output.device()));
}

TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  m.impl("dispatch", dispatch_cuda);
  m.impl("dispatch_start", dispatch_start_cuda);
  m.impl("dispatch_wait", dispatch_wait_cuda);
  m.impl("combine", combine_cuda);
  m.impl("combine_start", combine_start_cuda);
  m.impl("combine_wait", combine_wait_cuda);
  m.impl("combine_out", combine_out_cuda);
}

}  // namespace
}  // namespace moe_ep::ops
