// dispatch with counted writes: csrc/cuda/dispatch_block.cuh over csrc/transport/counted.cuh.
#include "csrc/cuda/dispatch_block.cuh"
#include "csrc/limits.h"
#include "csrc/transport/counted.cuh"

namespace moe_ep::cuda {
namespace {

struct CountedDispatchShared {
  DispatchShared dispatch;
  CountedShared counted;
};

template <int BYTES, bool MASK, class Put>
__global__ void __launch_bounds__(kThreads, 2) counted_dispatch_kernel(const __grid_constant__ DispatchParams p) {
  using Transport = DeviceCounted<MASK, Put>;
  __shared__ CountedDispatchShared shared;
  extern __shared__ __align__(128) char slices[];
  Transport transport(p.comm, OpKind::kDispatch, shared.dispatch.fence, shared.counted, slices);
  DispatchBlock<BYTES, Transport> block(p, shared.dispatch, transport);
  wait_for_predecessor();
  run_block(block, transport, p);
}

template <class Put>
const void* kernel_with(bool wide, bool mask) {
  if (wide) {
    return mask ? reinterpret_cast<const void*>(counted_dispatch_kernel<16, true, Put>)
                : reinterpret_cast<const void*>(counted_dispatch_kernel<16, false, Put>);
  }
  return mask ? reinterpret_cast<const void*>(counted_dispatch_kernel<1, true, Put>)
              : reinterpret_cast<const void*>(counted_dispatch_kernel<1, false, Put>);
}

const void* kernel_of(CountedPuts puts, bool wide, bool mask) {
#if MOE_EP_COUNTED
  if (puts == CountedPuts::kFabric) return kernel_with<FabricPut>(wide, mask);
#endif
  return kernel_with<EmulatedPut>(wide, mask);
}

}  // namespace

std::vector<const void*> counted_dispatch_kernels(CountedPuts puts) {
  std::vector<const void*> all;
  for (const bool wide : {false, true}) {
    for (const bool mask : {false, true}) all.push_back(kernel_of(puts, wide, mask));
  }
  return all;
}

bool takes_counted(const Communicator& comm, const DispatchArgs& args) {
  return in_reach(comm, args, comm.shape().counted_tokens) && args.hidden.bytes % kCountedAlignment == 0 &&
         args.scale.bytes % kCountedAlignment == 0;
}

void counted_dispatch(Communicator& comm, const DispatchArgs& args, void* stream) {
  DeviceEnd& end = *comm.device_end();
  DispatchParams p{end.comm(comm, args.timeout_sec), args,
                   end.plan(args.tokens_per_rank, args.hidden.bytes, kCountedBlocks),
                   ExpertSplit(args.num_experts, comm.ep_size()), comm.options().enable_rank_mask};
  p.early = p.plan.blocks() <= end.early_blocks;
  const bool wide = alignment_of({reinterpret_cast<int64_t>(args.hidden.data), args.hidden.stride, args.hidden.bytes,
                                  reinterpret_cast<int64_t>(args.out_hidden)}) >= 16;
  launch(kernel_of(comm.options().counted, wide, p.masked), p.plan.blocks(), p.plan.threads, &p, end.pdl, stream,
         "dispatch", kSlicesBytes);
}

}  // namespace moe_ep::cuda
