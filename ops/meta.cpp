// The Meta column: checks and shapes, no launch. Needs no live communicator.
#include <torch/library.h>

#include "ops/columns.h"

namespace moe_ep::ops {
namespace {

meta::DispatchOutputs dispatch_meta(MOE_EP_DISPATCH_ARGS) { return meta::dispatch(MOE_EP_DISPATCH_INPUTS("dispatch")); }

at::Tensor dispatch_start_meta(MOE_EP_DISPATCH_ARGS) { return meta::start(MOE_EP_DISPATCH_INPUTS("dispatch_start")); }

meta::DispatchOutputs dispatch_wait_meta(MOE_EP_DISPATCH_WAIT_ARGS) {
  return meta::wait(MOE_EP_DISPATCH_INPUTS("dispatch_wait"), pending);
}

at::Tensor combine_meta(MOE_EP_COMBINE_ARGS) { return meta::combine(MOE_EP_COMBINE_INPUTS("combine")); }

at::Tensor combine_start_meta(MOE_EP_COMBINE_ARGS) { return meta::start(MOE_EP_COMBINE_INPUTS("combine_start")); }

at::Tensor combine_wait_meta(MOE_EP_COMBINE_WAIT_ARGS) {
  return meta::wait(MOE_EP_COMBINE_INPUTS("combine_wait"), pending);
}

void combine_out_meta(MOE_EP_COMBINE_ARGS, at::Tensor& out) {
  meta::combine_out(MOE_EP_COMBINE_INPUTS("combine"), out);
}

TORCH_LIBRARY_IMPL(moe_ep, Meta, m) {
  m.impl("dispatch", dispatch_meta);
  m.impl("dispatch_start", dispatch_start_meta);
  m.impl("dispatch_wait", dispatch_wait_meta);
  m.impl("combine", combine_meta);
  m.impl("combine_start", combine_start_meta);
  m.impl("combine_wait", combine_wait_meta);
  m.impl("combine_out", combine_out_meta);
}

}  // namespace
}  // namespace moe_ep::ops
