// combine_start and combine_wait on a GPU: csrc/cuda/combine_block.cuh in two kernels.
#include "csrc/cuda/combine_block.cuh"

namespace moe_ep::cuda {
namespace {

template <class T, class Wire, bool MASK, Phase PHASE>
__global__ void __launch_bounds__(kThreads, 2) combine_phase_kernel_of(const __grid_constant__ CombineParams p) {
  using Block = CombineBlock<T, Wire, DeviceFence<MASK>>;
  __shared__ typename Block::Shared shared;
  DeviceFence<MASK> fence(p.comm, OpKind::kCombine, shared.fence);
  Block block(p, shared, fence);
  wait_for_predecessor();
  if constexpr (PHASE == Phase::kStart) {
    block.start();
  } else {
    block.wait();
  }
}

template <class T, class Wire, Phase PHASE>
const void* kernel_on(bool mask) {
  return mask ? reinterpret_cast<const void*>(combine_phase_kernel_of<T, Wire, true, PHASE>)
              : reinterpret_cast<const void*>(combine_phase_kernel_of<T, Wire, false, PHASE>);
}

template <class T, Phase PHASE>
const void* kernel_for(bool fp8, bool wide, bool mask) {
  if constexpr (sizeof(T) < 8) {
    if (fp8) return wide ? kernel_on<T, Fp8Wire<T, true>, PHASE>(mask) : kernel_on<T, Fp8Wire<T, false>, PHASE>(mask);
  }
  constexpr int kOne = static_cast<int>(sizeof(T));
  return wide ? kernel_on<T, RowWire<T, 16>, PHASE>(mask) : kernel_on<T, RowWire<T, kOne>, PHASE>(mask);
}

template <Phase PHASE>
const void* kernel_of(ElementType type, bool fp8, bool wide, bool mask) {
  // Rows are put as bytes, whatever they hold.
  if (PHASE == Phase::kStart && !fp8 && wide) return kernel_for<float, Phase::kStart>(false, true, mask);
  switch (type) {
    case ElementType::kBFloat16: return kernel_for<__nv_bfloat16, PHASE>(fp8, wide, mask);
    case ElementType::kFloat16: return kernel_for<__half, PHASE>(fp8, wide, mask);
    case ElementType::kFloat32: return kernel_for<float, PHASE>(fp8, wide, mask);
    case ElementType::kFloat64: return kernel_for<double, PHASE>(fp8, wide, mask);
  }
  return nullptr;
}

}  // namespace

const void* combine_phase_kernel(Phase phase, ElementType type, bool fp8, bool wide, bool mask) {
  return phase == Phase::kStart ? kernel_of<Phase::kStart>(type, fp8, wide, mask)
                                : kernel_of<Phase::kWait>(type, fp8, wide, mask);
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
