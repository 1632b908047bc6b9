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
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS("dispatch");
  const at::Device device = hidden_states.device();
  const c10::DeviceGuard guard(device);
  const std::shared_ptr<Communicator> live = ready(in);
  meta::DispatchOutputs out = meta::dispatch(in);
  guarded([&] {
    Holder holder;
    cuda::dispatch(*live, pack(in, out, holder), current_stream(device));
  });
  return out;
}

void launch_combine(const meta::CombineInputs& in, const at::Tensor& out) {
  const at::Device device = in.expert_output.device();
  const std::shared_ptr<Communicator> live = ready(in);
  guarded([&] {
    Holder holder;
    cuda::combine(*live, pack(in, out, holder), current_stream(device));
  });
}

at::Tensor combine_cuda(MOE_EP_COMBINE_ARGS) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS("combine");
  const c10::DeviceGuard guard(expert_output.device());
  at::Tensor out = meta::combine(in);
  launch_combine(in, out);
  return out;
}

void combine_out_cuda(MOE_EP_COMBINE_ARGS, at::Tensor& out) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS("combine");
  const c10::DeviceGuard guard(expert_output.device());
  combine_out_through(in, out, launch_combine);
}

at::Tensor dispatch_start_cuda(MOE_EP_DISPATCH_ARGS) {
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS("dispatch_start");
  const at::Device device = hidden_states.device();
  const c10::DeviceGuard guard(device);
  const std::shared_ptr<Communicator> live = ready(in, Phase::kStart);
  at::Tensor pending = meta::start(in);
  guarded([&] {
    Holder holder;
    cuda::dispatch(*live, pack_start(in, pending, holder), current_stream(device));
  });
  return pending;
}

meta::DispatchOutputs dispatch_wait_cuda(MOE_EP_DISPATCH_WAIT_ARGS) {
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS("dispatch_wait");
  const at::Device device = hidden_states.device();
  const c10::DeviceGuard guard(device);
  const std::shared_ptr<Communicator> live = ready(in, Phase::kWait);
  meta::DispatchOutputs out = meta::wait(in, pending);
  guarded([&] {
    Holder holder;
    cuda::dispatch(*live, pack_wait(in, pending, out, holder), current_stream(device));
  });
  return out;
}

at::Tensor combine_start_cuda(MOE_EP_COMBINE_ARGS) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS("combine_start");
  const at::Device device = expert_output.device();
  const c10::DeviceGuard guard(device);
  at::Tensor pending = meta::start(in);
  const std::shared_ptr<Communicator> live = ready(in, Phase::kStart);
  guarded([&] {
    Holder holder;
    cuda::combine(*live, pack_start(in, pending, holder), current_stream(device));
  });
  return pending;
}

at::Tensor combine_wait_cuda(MOE_EP_COMBINE_WAIT_ARGS) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS("combine_wait");
  const at::Device device = expert_output.device();
  const c10::DeviceGuard guard(device);
  at::Tensor out = meta::wait(in, pending);
  const std::shared_ptr<Communicator> live = ready(in, Phase::kWait);
  guarded([&] {
    Holder holder;
    cuda::combine(*live, pack_wait(in, pending, out, holder), current_stream(device));
  });
  return out;
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
