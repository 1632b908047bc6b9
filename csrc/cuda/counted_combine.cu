// combine with counted writes: csrc/cuda/combine_block.cuh over csrc/transport/counted.cuh.
#include "csrc/cuda/combine_block.cuh"
#include "csrc/limits.h"
#include "csrc/transport/counted.cuh"

namespace moe_ep::cuda {
namespace {

template <class Block>
struct CountedCombineShared {
  typename Block::Shared combine;
  CountedShared counted;
};

template <class T, bool WIDE, bool MASK, class Put>
__global__ void __launch_bounds__(kThreads, 2) counted_combine_kernel(const __grid_constant__ CombineParams p) {
  using Transport = DeviceCounted<MASK, Put>;
  using Block = CombineBlock<T, RowWire<T, WIDE ? 16 : static_cast<int>(sizeof(T))>, Transport>;
  __shared__ CountedCombineShared<Block> shared;
  extern __shared__ __align__(128) char slices[];
  Transport transport(p.comm, OpKind::kCombine, shared.combine.fence, shared.counted, slices);
  Block block(p, shared.combine, transport);
  wait_for_predecessor();
  run_block(block, transport, p);
}

template <class T, class Put>
const void* kernel_for(bool wide, bool mask) {
  if (wide) {
    return mask ? reinterpret_cast<const void*>(counted_combine_kernel<T, true, true, Put>)
                : reinterpret_cast<const void*>(counted_combine_kernel<T, true, false, Put>);
  }
  return mask ? reinterpret_cast<const void*>(counted_combine_kernel<T, false, true, Put>)
              : reinterpret_cast<const void*>(counted_combine_kernel<T, false, false, Put>);
}

template <class Put>
const void* kernel_with(ElementType type, bool wide, bool mask) {
  switch (type) {
    case ElementType::kBFloat16: return kernel_for<__nv_bfloat16, Put>(wide, mask);
    case ElementType::kFloat16: return kernel_for<__half, Put>(wide, mask);
    case ElementType::kFloat32: return kernel_for<float, Put>(wide, mask);
    case ElementType::kFloat64: return kernel_for<double, Put>(wide, mask);
  }
  return nullptr;
}

const void* kernel_of(CountedPuts puts, ElementType type, bool wide, bool mask) {
#if MOE_EP_COUNTED
  if (puts == CountedPuts::kFabric) return kernel_with<FabricPut>(type, wide, mask);
#endif
  return kernel_with<EmulatedPut>(type, wide, mask);
}

}  // namespace

std::vector<const void*> counted_combine_kernels(CountedPuts puts) {
  std::vector<const void*> all;
  for (const ElementType type : kElementTypes) {
    for (const bool wide : {false, true}) {
      for (const bool mask : {false, true}) all.push_back(kernel_of(puts, type, wide, mask));
    }
  }
  return all;
}

bool takes_counted(const Communicator& comm, const CombineArgs& args) {
  const WindowShape& shape = comm.shape();
  return in_reach(comm, args, shape.counted_combine_tokens) && shape.wire == CombineWire::kRows &&
         args.expert_output.bytes % kCountedAlignment == 0;
}

void counted_combine(Communicator& comm, const CombineArgs& args, void* stream) {
  DeviceEnd& end = *comm.device_end();
  const int64_t itemsize = element_size(args.element_type);
  const bool wide =
      alignment_of({reinterpret_cast<int64_t>(args.expert_output.data), args.expert_output.stride,
                    args.expert_output.bytes, reinterpret_cast<int64_t>(args.out), args.out_stride}) >= 16;
  const int64_t unit = wide ? 16 : itemsize;
  CombineParams p{end.comm(comm, args.timeout_sec), args,
                  end.plan(args.tokens_per_rank, args.expert_output.bytes, kCountedBlocks),
                  comm.options().enable_rank_mask};
  p.early = p.plan.blocks() <= end.early_blocks;
  p.units = static_cast<int32_t>(args.expert_output.bytes / unit);
  p.piece_units = static_cast<int32_t>(p.plan.piece_bytes / unit);
  launch(kernel_of(comm.options().counted, args.element_type, wide, p.masked), p.plan.blocks(), p.plan.threads, &p,
         end.pdl, stream, "combine", kSlicesBytes);
}

}  // namespace moe_ep::cuda
