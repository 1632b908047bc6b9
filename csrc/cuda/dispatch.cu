// dispatch on a GPU, over the fence transport: csrc/cuda/dispatch_block.cuh. A rank without peers needs none of that:
// dispatch_alone_kernel.
#include <algorithm>

#include "csrc/cuda/dispatch_block.cuh"
#include "csrc/limits.h"

namespace moe_ep::cuda {
namespace {

// One rank, one block per row: a row goes where it was, whether or not an id selects an expert (the payload of a row
// that holds no token is unspecified), so that no load waits for another.
template <int BYTES>
__global__ void __launch_bounds__(kAloneThreads) dispatch_alone_kernel(const __grid_constant__ DispatchParams p) {
  const DispatchArgs& a = p.args;
  const DeviceComm& c = p.comm;
  const int32_t t = static_cast<int32_t>(blockIdx.x), k = static_cast<int32_t>(threadIdx.x);
  wait_for_predecessor();
  launch_dependents();
  const bool active = !p.masked || (alone_mask(c, a.mask, a.phase) & 1) != 0;
  const bool holds = active && t < a.num_tokens;
  const bool turn = k < a.top_k && t < a.tokens_per_rank;
  int32_t id = a.invalid_expert_id;
  if (turn && t < a.num_tokens) id = sanitised_id(a, t, k);
  Progress before{};
  if (t == 0 && k == 0) before = progress(c);
  if (holds) {
    const char* from = a.hidden.data + t * a.hidden.stride;
    char* to = a.out_hidden + t * a.hidden.bytes;
    copy_rows<BYTES, 4>(
        1, static_cast<int32_t>(a.hidden.bytes / BYTES), [&](int32_t) { return from; }, [&](int32_t) { return to; },
        [] {});
    copy_row_bytes(a.out_scale + t * a.scale.bytes, a.scale.data + t * a.scale.stride, a.scale.bytes, k,
                   static_cast<int32_t>(blockDim.x));
  }
  if (k < 32 && t < a.tokens_per_rank) {
    const bool here = __any_sync(0xFFFFFFFFu, turn && id >= 0 && id < a.num_experts);
    if (turn) a.out_topk_ids[static_cast<int64_t>(t) * a.top_k + k] = here && active ? id : a.invalid_expert_id;
    copy_row_bytes(a.out_weights + t * a.weights.bytes,
                   here && active ? a.weights.data + t * a.weights.stride : nullptr, a.weights.bytes, k, 32);
    if (k == 0) {
      a.routing[t] = t == 0 ? static_cast<int32_t>((before.rounds + 1) & 0x7FFFFFFF) : 0;
      a.routing[a.tokens_per_rank + t] = here && active ? 0 : -1;
      a.routing[2 * static_cast<int64_t>(a.tokens_per_rank) + t] = here && active ? 0 : -1;
    }
  }
  if (t == 0) {
    for (int32_t i = k; i < a.num_eplb; i += static_cast<int32_t>(blockDim.x)) a.out_eplb[i] = active ? a.eplb[i] : 0;
    if (k == 0) end_alone(c, before, OpKind::kDispatch, a.phase, a.pending);
  }
}

}  // namespace

std::vector<const void*> dispatch_kernels() {
  std::vector<const void*> all;
  add_dispatch_kernels<Phase::kWhole>(all);
  return all;
}
std::vector<const void*> dispatch_alone_kernels() {
  return {reinterpret_cast<const void*>(dispatch_alone_kernel<16>),
          reinterpret_cast<const void*>(dispatch_alone_kernel<4>),
          reinterpret_cast<const void*>(dispatch_alone_kernel<1>)};
}

void dispatch(Communicator& comm, const DispatchArgs& args, void* stream) {
  check_fits(comm, args);
  DeviceEnd& end = *comm.device_end();
  end.raise_failure(comm, OpKind::kDispatch);
  if (takes_lamport(comm, args)) return lamport_dispatch(comm, args, stream);
  if (takes_counted(comm, args)) return counted_dispatch(comm, args, stream);
  const bool mask = comm.options().enable_rank_mask;
  DispatchParams p{end.comm(comm, args.timeout_sec), args, end.plan(args.tokens_per_rank, args.hidden.bytes),
                   ExpertSplit(args.num_experts, comm.ep_size()), mask};
  p.early = p.plan.blocks() <= end.early_blocks;
  const int64_t alignment = alignment_of({reinterpret_cast<int64_t>(args.hidden.data), args.hidden.stride,
                                          args.hidden.bytes, reinterpret_cast<int64_t>(args.out_hidden)});
  const int unit = alignment >= 16 ? 16 : alignment >= 4 ? 4 : 1;
  if (comm.ep_size() == 1) {
    if (args.phase == Phase::kStart) {
      return start_alone(comm, OpKind::kDispatch, args.mask, args.timeout_sec, args.pending, stream);
    }
    const void* kernel = dispatch_alone_kernels()[unit == 16 ? 0 : unit == 4 ? 1 : 2];
    launch(kernel, std::max(1, args.tokens_per_rank), alone_threads(args.hidden.bytes / unit), &p, end.pdl, stream,
           "dispatch");
    return;
  }
  const void* kernel = args.phase == Phase::kWhole ? dispatch_kernel_of<Phase::kWhole>(unit, mask)
                                                   : dispatch_phase_kernel(args.phase, unit, mask);
  launch(kernel, p.plan.blocks(), p.plan.threads, &p, end.pdl, stream, op_name(OpKind::kDispatch, args.phase));
}

}  // namespace moe_ep::cuda
