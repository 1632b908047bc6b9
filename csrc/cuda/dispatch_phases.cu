// dispatch_start and dispatch_wait on a GPU: csrc/cuda/dispatch_block.cuh in two kernels. And the start of either op on
// a rank without peers, which does nothing but say so.
#include "csrc/cuda/dispatch_block.cuh"

namespace moe_ep::cuda {
namespace {

template <int BYTES, bool MASK, Phase PHASE>
__global__ void __launch_bounds__(kThreads, 2) dispatch_phase_kernel_of(const __grid_constant__ DispatchParams p) {
  __shared__ DispatchShared shared;
  DeviceFence<MASK> fence(p.comm, OpKind::kDispatch, shared.fence);
  DispatchBlock<BYTES, DeviceFence<MASK>> block(p, shared, fence);
  wait_for_predecessor();
  if constexpr (PHASE == Phase::kStart) {
    block.start();
  } else {
    block.wait();
  }
}

template <int BYTES, bool MASK>
const void* kernel_in(Phase phase) {
  return phase == Phase::kStart ? reinterpret_cast<const void*>(dispatch_phase_kernel_of<BYTES, MASK, Phase::kStart>)
                                : reinterpret_cast<const void*>(dispatch_phase_kernel_of<BYTES, MASK, Phase::kWait>);
}

template <int BYTES>
const void* kernel_on(Phase phase, bool mask) {
  return mask ? kernel_in<BYTES, true>(phase) : kernel_in<BYTES, false>(phase);
}

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
  return unit_bytes == 16  ? kernel_on<16>(phase, mask)
         : unit_bytes == 4 ? kernel_on<4>(phase, mask)
                           : kernel_on<1>(phase, mask);
}

std::vector<const void*> dispatch_phase_kernels() {
  std::vector<const void*> all;
  for (const Phase phase : {Phase::kStart, Phase::kWait}) {
    for (const int64_t unit_bytes : {16, 4, 1}) {
      for (const bool mask : {false, true}) all.push_back(dispatch_phase_kernel(phase, unit_bytes, mask));
    }
  }
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
