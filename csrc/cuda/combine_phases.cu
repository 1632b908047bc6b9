// combine_start and combine_wait on a GPU: csrc/cuda/combine_block.cuh in two kernels.
#include "csrc/cuda/combine_block.cuh"

namespace moe_ep::cuda {
const void* combine_phase_kernel(Phase phase, ElementType type, bool fp8, bool wide, bool mask) {
  return phase == Phase::kStart ? combine_kernel_of<Phase::kStart>(type, fp8, wide, mask)
                                : combine_kernel_of<Phase::kWait>(type, fp8, wide, mask);
}

std::vector<const void*> combine_phase_kernels() {
  std::vector<const void*> all;
  for (const Phase phase : {Phase::kStart, Phase::kWait}) {
    for (const ElementType type :
         {ElementType::kBFloat16, ElementType::kFloat16, ElementType::kFloat32, ElementType::kFloat64}) {
      for (const bool fp8 : {false, true}) {
        for (const bool wide : {false, true}) {
          for (const bool mask : {false, true}) all.push_back(combine_phase_kernel(phase, type, fp8, wide, mask));
        }
      }
    }
  }
  return all;
}

}  // namespace moe_ep::cuda
