// The driver's side of csrc/memory/logical_endpoint.h. Looked up at run time: the library loads beside old drivers.
#include <cuda.h>
#include <cuda_runtime.h>

#include "csrc/memory/logical_endpoint.h"

// 1 = the toolkit has counted writes.
#define MOE_EP_COUNTED (CUDA_VERSION >= 13040)

namespace moe_ep::endpoint {

Driver installed_driver() {
  return Driver::load([](const char* name) -> void* {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &entry, kToolkit, cudaEnableDefault, &found);
    if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) return entry;
    cudaGetLastError();
    return nullptr;
  });
}

bool compiled() { return MOE_EP_COUNTED; }

}  // namespace moe_ep::endpoint
