// dispatch_start and dispatch_wait on a GPU: csrc/cuda/dispatch_block.cuh in two kernels. And the start of either op on
// a rank without peers, which does nothing but say so.
#include "csrc/cuda/dispatch_block.cuh"

namespace moe_ep::cuda {
namespace {

struct StartAloneParams {
  DeviceComm comm;
  OpKind kind;
  RankMask mask;
  int64_t* pending;
};

__global__ void start_alone_kernel(const __grid_constant__ StartAloneParams p) {
  wait_for_predecessor();
  launch_dependents();
  const Progress before = progress(p.comm);
  if (before.started) return record_misuse(p.comm, before, p.kind, Phase::kStart, nullptr);
  note_kind(p.comm, before.rounds + 1, static_cast<uint32_t>(p.kind));
  p.comm.state->started_active[0] = alone_mask(p.comm, p.mask, Phase::kStart);
  *p.pending = static_cast<int64_t>(before.rounds + 1);
  end_alone(p.comm, before, p.kind, Phase::kStart, nullptr);
}

}  // namespace

const void* dispatch_phase_kernel(Phase phase, int64_t unit_bytes, bool mask) {
  return phase == Phase::kStart ? dispatch_kernel_of<Phase::kStart>(unit_bytes, mask)
                                : dispatch_kernel_of<Phase::kWait>(unit_bytes, mask);
}

std::vector<const void*> dispatch_phase_kernels() {
  std::vector<const void*> all;
  add_dispatch_kernels<Phase::kStart>(all);
  add_dispatch_kernels<Phase::kWait>(all);
  return all;
}

std::vector<const void*> start_alone_kernels() { return {reinterpret_cast<const void*>(start_alone_kernel)}; }

void start_alone(Communicator& comm, OpKind kind, const RankMask& mask, int64_t timeout_sec, int64_t* pending,
                 void* stream) {
  DeviceEnd& end = *comm.device_end();
  StartAloneParams p{end.comm(comm, timeout_sec), kind, mask, pending};
  launch(reinterpret_cast<const void*>(start_alone_kernel), 1, 1, &p, end.pdl, stream, op_name(kind, Phase::kStart));
}

}  // namespace moe_ep::cuda
