// combine_start and combine_wait on a GPU: csrc/cuda/combine_block.cuh in two kernels.
#include "csrc/cuda/combine_block.cuh"

namespace moe_ep::cuda {

const void* combine_phase_kernel(Phase phase, ElementType type, bool fp8, bool wide, bool mask) {
  return phase == Phase::kStart ? combine_kernel_of<Phase::kStart>(type, fp8, wide, mask)
                                : combine_kernel_of<Phase::kWait>(type, fp8, wide, mask);
}

std::vector<const void*> combine_phase_kernels() {
  std::vector<const void*> all;
  add_combine_kernels<Phase::kStart>(all);
  add_combine_kernels<Phase::kWait>(all);
  return all;
}

}  // namespace moe_ep::cuda
