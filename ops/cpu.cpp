// The CPU column: meta, then the same protocol as on the GPU between processes of one host.
#include <torch/library.h>

#include "ops/columns.h"

namespace moe_ep::ops {
namespace {

meta::DispatchOutputs dispatch_cpu(MOE_EP_DISPATCH_ARGS) {
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS("dispatch");
  const std::shared_ptr<Communicator> live = ready(in);
  meta::DispatchOutputs out = meta::dispatch(in);
  guarded([&] {
    Holder holder;
    cpu::dispatch(*live, pack(in, out, holder));
  });
  return out;
}

void launch_combine(const meta::CombineInputs& in, const at::Tensor& out) {
  const std::shared_ptr<Communicator> live = ready(in);
  guarded([&] {
    Holder holder;
    cpu::combine(*live, pack(in, out, holder));
  });
}

at::Tensor combine_cpu(MOE_EP_COMBINE_ARGS) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS("combine");
  at::Tensor out = meta::combine(in);
  launch_combine(in, out);
  return out;
}

void combine_out_cpu(MOE_EP_COMBINE_ARGS, at::Tensor& out) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS("combine");
  combine_out_through(in, out, launch_combine);
}

at::Tensor dispatch_start_cpu(MOE_EP_DISPATCH_ARGS) {
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS("dispatch_start");
  const std::shared_ptr<Communicator> live = ready(in, Phase::kStart);
  at::Tensor pending = meta::start(in);
  guarded([&] {
    Holder holder;
    cpu::dispatch(*live, pack_start(in, pending, holder));
  });
  return pending;
}

meta::DispatchOutputs dispatch_wait_cpu(MOE_EP_DISPATCH_WAIT_ARGS) {
  const meta::DispatchInputs in = MOE_EP_DISPATCH_INPUTS("dispatch_wait");
  const std::shared_ptr<Communicator> live = ready(in, Phase::kWait);
  meta::DispatchOutputs out = meta::wait(in, pending);
  guarded([&] {
    Holder holder;
    cpu::dispatch(*live, pack_wait(in, pending, out, holder));
  });
  return out;
}

at::Tensor combine_start_cpu(MOE_EP_COMBINE_ARGS) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS("combine_start");
  at::Tensor pending = meta::start(in);
  const std::shared_ptr<Communicator> live = ready(in, Phase::kStart);
  guarded([&] {
    Holder holder;
    cpu::combine(*live, pack_start(in, pending, holder));
  });
  return pending;
}

at::Tensor combine_wait_cpu(MOE_EP_COMBINE_WAIT_ARGS) {
  const meta::CombineInputs in = MOE_EP_COMBINE_INPUTS("combine_wait");
  at::Tensor out = meta::wait(in, pending);
  const std::shared_ptr<Communicator> live = ready(in, Phase::kWait);
  guarded([&] {
    Holder holder;
    cpu::combine(*live, pack_wait(in, pending, out, holder));
  });
  return out;
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
