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

meta::DispatchOutputs dispatch_cuda(MOE_EP_DISPATCH_ARGS) {
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS;
  const at::Device device = hidden_states.device();
  const c10::DeviceGuard guard(device);
  const std::shared_ptr<Communicator> live = ready_to_dispatch(in);
  meta::DispatchOutputs out = meta::dispatch(in);
  guarded([&] {
    Holder holder;
    cuda::dispatch(*live, pack(in, out, holder), current_stream(device));
  });
  return out;
}

void launch_combine(const meta::CombineInputs& in, const at::Tensor& out) {
  const at::Device device = in.expert_output.device();
  guarded([&] {
    const auto live = ready(in.comm, OpKind::kCombine, in.ep_size, device);
    Holder holder;
    cuda::combine(*live, pack(in, out, holder), current_stream(device));
  });
}

at::Tensor combine_cuda(MOE_EP_COMBINE_ARGS) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS;
  const c10::DeviceGuard guard(expert_output.device());
  at::Tensor out = meta::combine(in);
  launch_combine(in, out);
  return out;
}

void combine_out_cuda(MOE_EP_COMBINE_ARGS, at::Tensor& out) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS;
  const c10::DeviceGuard guard(expert_output.device());
  combine_out_through(in, out, launch_combine);
}

TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  m.impl("dispatch", dispatch_cuda);
  m.impl("combine", combine_cuda);
  m.impl("combine_out", combine_out_cuda);
}

}  // namespace
}  // namespace moe_ep::ops
