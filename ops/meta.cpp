// The Meta column: checks and shapes, no launch. Needs no live communicator.
#include <torch/library.h>

#include "ops/columns.h"

namespace moe_ep::ops {
namespace {

meta::DispatchOutputs dispatch_meta(MOE_EP_DISPATCH_ARGS) { return meta::dispatch(MOE_EP_DISPATCH_INPUTS); }

at::Tensor combine_meta(MOE_EP_COMBINE_ARGS) { return meta::combine(MOE_EP_COMBINE_INPUTS); }

void combine_out_meta(MOE_EP_COMBINE_ARGS, at::Tensor& out) { meta::combine_out(MOE_EP_COMBINE_INPUTS, out); }

TORCH_LIBRARY_IMPL(moe_ep, Meta, m) {
  m.impl("dispatch", dispatch_meta);
  m.impl("combine", combine_meta);
  m.impl("combine_out", combine_out_meta);
}

}  // namespace
}  // namespace moe_ep::ops
