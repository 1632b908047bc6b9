// combine on a GPU, over the fence transport: csrc/cuda/combine_block.cuh. A rank without peers needs none of that:
// combine_alone_kernel.
#include <algorithm>

#include "csrc/cuda/combine_block.cuh"
#include "csrc/limits.h"

namespace moe_ep::cuda {
namespace {

// One rank, one block per token: the row is loaded beside the word that says whether it counts.
template <class T, int BYTES>
__global__ void __launch_bounds__(kAloneThreads) combine_alone_kernel(const __grid_constant__ CombineParams p) {
  using Wire = RowWire<T, BYTES>;  // nothing travels
  const CombineArgs& a = p.args;
  const int32_t t = static_cast<int32_t>(p.plan.descending ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  wait_for_predecessor();
  launch_dependents();
  Progress before{};
  if (t == 0 && threadIdx.x == 0) before = progress(p.comm);
  const auto end = [&] {
    if (t == 0 && threadIdx.x == 0) end_alone(p.comm, before, OpKind::kCombine, a.phase, a.pending);
  };
  if (t >= a.num_tokens) return end();
  const bool active = !p.masked || (alone_mask(p.comm, a.mask, a.phase) & 1) != 0;
  const int32_t target = a.routing[2 * static_cast<int64_t>(a.tokens_per_rank) + t];
  const auto* from = reinterpret_cast<const Unit<BYTES>*>(a.expert_output.data + t * a.expert_output.stride);
  char* to = a.out + t * a.out_stride;
  const int32_t units = static_cast<int32_t>(a.expert_output.bytes / BYTES), step = static_cast<int32_t>(blockDim.x);
  for (int32_t base = static_cast<int32_t>(threadIdx.x); base < units; base += 4 * step) {
    Unit<BYTES> value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i * step < units) value[i] = load(from + base + i * step);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i * step >= units) continue;
      RunningSum<T, Wire::kElements> sum;
      if (active && target == 0) Wire::add(sum, value[i], false);
      Wire::store(a, to, base + i * step, sum);
    }
  }
  end();
}

template <class T>
const void* alone_kernel_for(bool wide) {
  constexpr int kOne = static_cast<int>(sizeof(T));
  return wide ? reinterpret_cast<const void*>(combine_alone_kernel<T, 16>)
              : reinterpret_cast<const void*>(combine_alone_kernel<T, kOne>);
}

const void* alone_kernel_of(ElementType type, bool wide) {
  switch (type) {
    case ElementType::kBFloat16: return alone_kernel_for<__nv_bfloat16>(wide);
    case ElementType::kFloat16: return alone_kernel_for<__half>(wide);
    case ElementType::kFloat32: return alone_kernel_for<float>(wide);
    case ElementType::kFloat64: return alone_kernel_for<double>(wide);
  }
  return nullptr;
}

}  // namespace

std::vector<const void*> combine_alone_kernels() {
  std::vector<const void*> all;
  for (const ElementType type : kElementTypes) {
    for (const bool wide : {false, true}) all.push_back(alone_kernel_of(type, wide));
  }
  return all;
}

std::vector<const void*> combine_kernels() {
  std::vector<const void*> all;
  add_combine_kernels<Phase::kWhole>(all);
  return all;
}

void combine(Communicator& comm, const CombineArgs& args, void* stream) {
  check_fits(comm, args);
  DeviceEnd& end = *comm.device_end();
  end.raise_failure(comm, OpKind::kCombine);
  if (takes_lamport(comm, args)) return lamport_combine(comm, args, stream);
  if (takes_counted(comm, args)) return counted_combine(comm, args, stream);
  const bool mask = comm.options().enable_rank_mask, alone = comm.ep_size() == 1;
  const bool fp8 = comm.shape().wire != CombineWire::kRows && !alone;
  const int64_t itemsize = element_size(args.element_type);
  const int64_t alignment =
      alignment_of({reinterpret_cast<int64_t>(args.expert_output.data), args.expert_output.stride,
                    args.expert_output.bytes, reinterpret_cast<int64_t>(args.out), args.out_stride});
  const bool wide = alignment >= (fp8 ? 4 * itemsize : 16);
  const int64_t unit = fp8 ? 4 * itemsize : wide ? 16 : itemsize;  // bytes of expert_output
  CombineParams p{end.comm(comm, args.timeout_sec), args, end.plan(args.tokens_per_rank, args.expert_output.bytes),
                  mask};
  p.early = p.plan.blocks() <= end.early_blocks;
  p.args.plain_fp8 = comm.shape().wire == CombineWire::kFp8Plain;
  p.units = static_cast<int32_t>((args.expert_output.bytes + unit - 1) / unit);
  // Pieces begin where a block of FP8 codes does.
  p.piece_units = static_cast<int32_t>(round_up(p.plan.piece_bytes, kFp8Block * itemsize) / unit);
  if (alone) {
    if (args.phase == Phase::kStart) {
      return start_alone(comm, OpKind::kCombine, args.mask, args.timeout_sec, args.pending, stream);
    }
    launch(alone_kernel_of(args.element_type, wide), std::max(1, args.num_tokens), alone_threads(p.units), &p, end.pdl,
           stream, "combine");
    return;
  }
  const void* kernel = args.phase == Phase::kWhole
                           ? combine_kernel_of<Phase::kWhole>(args.element_type, fp8, wide, mask)
                           : combine_phase_kernel(args.phase, args.element_type, fp8, wide, mask);
  launch(kernel, p.plan.blocks(), p.plan.threads, &p, end.pdl, stream, op_name(OpKind::kCombine, args.phase));
}

}  // namespace moe_ep::cuda
